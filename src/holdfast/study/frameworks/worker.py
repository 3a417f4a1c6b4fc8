"""The process in which a framework runs: ``python -m holdfast.study.frameworks.worker MODULE``.

It imports MODULE, which has a `api.Framework` named ``FRAMEWORK``, and follows the orders on its standard
input, one JSON object per line: ``{"do": "train", ...}``. It answers each with one line: ``{"ok": {...}}``,
``{"missing": WHY}`` or ``{"failure": WHY}``. The orders are the methods of `Worker`. It ends when its input
ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.study.costs import cost_of
from holdfast.study.frameworks.api import Arrays, Framework, LoopFramework, Mechanism, Training
from holdfast.study.peers.base import files_below, remove, sync_tree
from holdfast.study.results import PEAK_NBYTES, SECONDS

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
NOTICED_LOSS = 0.01
"""A loss that is off by more than this part of it would be seen by whoever watches the curve."""
LONG_SECONDS = 2.0
"""Saves that take longer are not repeated before the clock starts: what one of them finds out is the same."""
SLOW_SECONDS = 10.0
"""A save that takes longer is made once in a turn."""


class Worker:
    """What a worker keeps from order to order. The arguments of an order are those of its method."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._mechanisms = {mechanism.key: mechanism for mechanism in framework.mechanisms}
        self._training: Training | None = None
        self._built: tuple[str, bool, int] = ("", False, 0)
        self._digests: dict[str, str] = {}
        self._filled: Training | None = None

    def hello(self) -> dict[str, Any]:
        return {
            "versions": self._framework.versions(),
            "models": list(self._framework.models),
            "loop": isinstance(self._framework, LoopFramework),
            "mechanisms": [
                {
                    "key": mechanism.key,
                    "title": mechanism.title,
                    "ours": mechanism.ours,
                    "background": mechanism.background,
                    "always_durable": mechanism.always_durable,
                    "weights_only_possible": mechanism.weights_only_possible,
                    "optimizer_possible": mechanism.optimizer_possible,
                    "missing": mechanism.missing(),
                }
                for mechanism in self._framework.mechanisms
            ],
            "defaults": [
                {"key": each.key, "title": each.title, "ours": each.ours, "missing": each.missing()}
                for each in self._framework.defaults
            ],
        }

    def prepare(self, mechanism: str) -> dict[str, Any]:
        self._mechanisms[mechanism].prepare()
        return {}

    def build(self, model: str, quick: bool, seed: int) -> dict[str, float]:
        """Builds a model and takes steps until memory and thread pools are there."""
        self._training, self._built = self._framework.build(model, quick, seed), (model, quick, seed)
        self._filled = None
        for _ in range(2):
            self._training.step()
        began = time.perf_counter()
        self._training.step()
        seconds = time.perf_counter() - began
        return {
            "weights_nbytes": _nbytes(self._training.weights()),
            "optimizer_nbytes": _nbytes(self._training.optimizer_arrays()),
            "step_seconds": seconds,
        }

    def train(
        self, mechanism: str, durable: bool, every: list[int], steps: int, directory: str
    ) -> dict[str, Any]:
        """So many steps without checkpoints; for each frequency as many with one after each `every` steps;
        as many without again. Answers readings by frequency.

        Some saves are made before the clock starts: what is measured is the middle of a training, in which
        every name has been written before, and a save that is due may have to wait for the one before it.
        """
        if isinstance(self._framework, LoopFramework):
            return self._train_loop(self._framework, mechanism, durable, every, steps, Path(directory))
        training = self._require_training()

        def train_only() -> float:
            return _seconds(lambda: [training.step() for _ in range(steps)])

        before = train_only()
        opened = self._open(mechanism, Path(directory), durable=durable)
        try:
            slow = settling = 0.0
            for _ in range(opened.slots + 1):
                slow = _seconds(lambda: self._save(opened))
                settling += slow
                if settling > LONG_SECONDS:
                    break
            if slow > SLOW_SECONDS and not opened.background:
                # Nothing overlaps with it, so it costs what it takes: once is enough.
                alone = {"call_seconds": slow, **_stall(before + slow, before, 1)}
                return {str(each): {**alone, **_lost(slow, before * each / steps)} for each in every}
            blocks = [self._block(opened, each, steps) for each in every]
        finally:
            opened.close()
        base = (before + train_only()) / 2
        found = {}
        for each, (seconds, called, drained) in zip(every, blocks, strict=True):
            saves = steps // each
            found[str(each)] = {
                **_stall(seconds, base, saves),
                **_lost(seconds - base, base),
                "call_seconds": called / saves,
                "drain_seconds": drained,
            }
        return found

    def _block(self, opened: Mechanism, every: int, steps: int) -> tuple[float, float, float]:
        """Steps with checkpoints: all seconds, those in saves, and those until the last was written."""
        training, called = self._require_training(), 0.0
        began = time.perf_counter()
        for step in range(1, steps + 1):
            training.step()
            if step % every == 0:
                called += _seconds(lambda: self._save(opened))
        return time.perf_counter() - began, called, _seconds(opened.wait)

    def _train_loop(
        self,
        framework: LoopFramework,
        mechanism: str,
        durable: bool,
        every: list[int],
        steps: int,
        directory: Path,
    ) -> dict[str, Any]:
        def seconds_of(mechanism: str, every: int) -> float:
            directory.mkdir(parents=True)
            try:
                return framework.loop(mechanism, durable, every, steps, directory)
            finally:
                remove(directory)

        before = seconds_of("", 1)
        blocks = [seconds_of(mechanism, each) for each in every]
        base = (before + seconds_of("", 1)) / 2
        return {
            str(each): {**_stall(seconds, base, steps // each), **_lost(seconds - base, base)}
            for each, seconds in zip(every, blocks, strict=True)
        }

    def split(self, mechanism: str, directory: str, memory: str) -> dict[str, float]:
        """Where the time of one durable save goes, found from outside, the same way for all.

        Serialising: all of a save into a filesystem in memory. Writing: how much longer the same takes on the
        disk. Syncing: what it then takes to make it durable. Each is timed at the second save in its
        directory; a long one at the first.
        """
        found = {}
        for name, place in (("memory", memory), ("disk", directory)):
            if not place:
                continue
            opened = self._open(mechanism, Path(place), durable=False)
            try:
                for _ in range(2):
                    found[name] = _seconds(opened.save) + _seconds(opened.wait)
                    found[f"{name} sync"] = opened.own_sync_seconds()
                    if name == "disk" and not opened.always_durable:
                        found["disk sync"] = _seconds(opened.sync)
                    if found[name] > LONG_SECONDS:
                        break
            finally:
                opened.close()
                remove(Path(place))
        inner = self._mechanisms[mechanism].always_durable
        save = found["disk"] - (found["disk sync"] if inner else 0.0)
        readings = {"save_seconds": found["disk"], "sync_seconds": found["disk sync"]}
        if "memory" in found:
            readings["serialise_seconds"] = min(found["memory"], save)
            readings["write_seconds"] = max(0.0, save - found["memory"])
        return readings

    def save(
        self, mechanism: str, directory: str, weights_only: bool = False, durable: bool = True, slots: int = 1
    ) -> dict[str, Any]:
        """One save, and what it cost. `load` and `part` compare with it."""
        training = self._require_training()
        opened = self._open(
            mechanism, Path(directory), durable=durable, weights_only=weights_only, slots=slots
        )
        try:
            _, readings = cost_of(opened.save_and_wait)
            if durable and not opened.always_durable:
                opened.sync()
            path = opened.path
        finally:
            opened.close()
        arrays = training.arrays(opened.weights_only)
        self._digests[directory] = digest(arrays)
        stored = sum(file.stat().st_size for file in files_below(path))
        return {
            "readings": {
                SECONDS: readings[SECONDS],
                PEAK_NBYTES: readings.get(PEAK_NBYTES, 0.0),
                "stored_nbytes": stored,
                "arrays_nbytes": _nbytes(arrays),
            },
            "path": str(path),
            "digest": self._digests[directory],
        }

    def load(
        self, mechanism: str, directory: str, weights_only: bool = False, again: bool = False
    ) -> dict[str, Any]:
        """Loads into a training that was built from another seed; `equal` tells whether all came back.

        `again`: into the same one as before, after a step that changes all of it. Building takes longer than
        loading.
        """
        model, quick, seed = self._built
        fresh = self._changed() if again else None
        if fresh is None:
            fresh = self._framework.build(model, quick, seed + 1)
        self._filled = fresh if again else None  # kept, it would count as memory of the next load
        opened = self._open(
            mechanism, Path(directory), durable=False, weights_only=weights_only, slots=1, training=fresh
        )
        try:
            _, readings = cost_of(opened.load)
        finally:
            opened.close()
        found = digest(fresh.arrays(opened.weights_only))
        return {
            "readings": {
                SECONDS: readings[SECONDS],
                PEAK_NBYTES: readings.get(PEAK_NBYTES, 0.0),
                "equal": float(found == self._digests.get(directory)),
            },
            "digest": found,
        }

    def _changed(self) -> Training | None:
        """The training that was loaded into before, one step on; None if there is none that can step."""
        if self._filled is not None:
            try:
                self._filled.step()
            except Exception:  # a load that failed may have left anything in it
                self._filled = None
        return self._filled

    def part(self, mechanism: str, directory: str, weights_only: bool = False) -> dict[str, Any]:
        """Reads one weight of middling size, if the mechanism has a way."""
        training = self._require_training()
        by_size = sorted(training.weights().items(), key=lambda item: item[1].nbytes)
        name, array = by_size[len(by_size) // 2]
        opened = self._open(mechanism, Path(directory), durable=False, weights_only=weights_only, slots=1)
        try:
            got, readings = cost_of(lambda: opened.read_part(name))
        except NotImplementedError:
            return {"possible": 0.0}
        finally:
            opened.close()
        same = got.shape == array.shape and np.array_equal(got, array)
        return {
            "possible": float(same),
            "part_seconds": readings[SECONDS],
            "part_nbytes": float(array.nbytes),
            "part_peak_nbytes": readings.get(PEAK_NBYTES, 0.0),
        }

    def overwrite(self, mechanism: str, directory: str) -> dict[str, float]:
        """Two saves to one name with a step between them. The process is to be killed during the second.

        The file ``DIRECTORY.begun`` appears when the second begins, with the digests of both states.
        """
        training = self._require_training()
        opened = self._open(mechanism, Path(directory), durable=True, slots=1)
        self._save(opened)
        opened.wait()
        sync_tree(opened.directory)
        old = digest(training.arrays(opened.weights_only))
        training.step()
        begun = Path(f"{directory}.new")
        begun.write_text(f"{old} {digest(training.arrays(opened.weights_only))}")
        begun.rename(f"{directory}.begun")
        seconds = _seconds(lambda: self._save(opened)) + _seconds(opened.wait)
        opened.close()
        return {SECONDS: seconds}

    def plant(self, mechanism: str, directory: str, marker: str) -> dict[str, Any]:
        opened = self._open(mechanism, Path(directory), durable=False, slots=1)
        try:
            return {"planted": opened.plant(Path(marker))}
        finally:
            opened.close()

    def determinism(
        self, steps: int, seed: int, without: str, default: str, directory: str
    ) -> dict[str, Any]:
        """2N steps against N steps, a restore into a new training of another seed, and N more.

        `without` is the ingredient that is left out; `default` the checkpoint that is used instead of a full
        one.
        """
        whole = self._framework.probe(seed)
        losses = [whole.step() for _ in range(2 * steps)]
        expected = whole.weights()
        first = self._framework.probe(seed)
        early = [first.step() for _ in range(steps)]
        restored: dict[str, float] = {}
        if default:
            saved = first.capture()
            checkpoint = next(each for each in self._framework.defaults if each.key == default)()
            checkpoint.save(first, Path(directory))
            resumed = self._framework.probe(seed + 1)
            checkpoint.load(resumed, Path(directory))
            loaded = resumed.capture()
            restored = {f"restored, {key}": float(same(saved[key], loaded[key])) for key in saved}
        else:
            captured = first.capture()
            resumed = self._framework.probe(seed + 1)
            resumed.restore({key: value for key, value in captured.items() if key != without})
        late = [resumed.step() for _ in range(steps)]
        differing = [
            index + 1
            for index, (loss, other) in enumerate(zip(losses, early + late, strict=True))
            if loss != other
        ]
        found = resumed.weights()
        return {
            **restored,
            "steps": 2.0 * steps,
            "repeatable": float(losses[:steps] == early),
            "first_differing_step": float(differing[0]) if differing else 0.0,
            "largest_loss_difference": _largest(losses, early + late),
            "largest_weight_difference": max(
                _largest(expected[name].ravel(), found[name].ravel()) for name in expected
            ),
            "equal": float(
                not differing and all(np.array_equal(expected[name], found[name]) for name in expected)
            ),
        }

    def ingredients(self) -> dict[str, Any]:
        return dict(self._framework.probe(0).ingredients)

    def flip_and_train(
        self, bits: int, weights: int, steps: int, seed: int, draw: int, directory: str
    ) -> dict[str, float]:
        """Trains; then for each bit position goes back to that state, flips the bit in some weights, trains
        on, and compares the losses with those of a training without the flip.

        `draw` chooses the weights. Our own checkpoint goes back, where there is one: it is quick and exact.
        """
        model, quick, _ = self._built
        training = self._framework.build(model, quick, seed)
        for _ in range(steps):
            training.step()
        chosen = next(
            (each.key for each in self._framework.mechanisms if each.ours), next(iter(self._mechanisms))
        )
        opened = self._open(chosen, Path(directory), durable=False, slots=1, training=training)
        readings: dict[str, float] = {}
        try:
            opened.save_and_wait()
            clean = [training.step() for _ in range(steps)]
            for bit in range(bits):
                opened.load()
                training.set_weights(flip_in_memory(training.weights(), bit, weights, draw))
                found = _compared(clean, [training.step() for _ in range(steps)])
                readings |= {f"{name}, bit {bit}": value for name, value in found.items()}
        finally:
            opened.close()
        return readings

    def flip_in_file(self, mechanism: str, directory: str, bit: int, seed: int) -> dict[str, float]:
        """Flips one bit of one weight inside of the files of a checkpoint, loads it, and flips it back.

        A weight is found by its bytes and those of its neighbours. A format that compresses, or stores them
        in another order, has them nowhere.
        """
        training = self._require_training()
        opened = self._open(mechanism, Path(directory), durable=False, slots=1)
        path = opened.path
        opened.close()
        _, array = max(training.weights().items(), key=lambda item: item[1].nbytes)
        flat = np.ascontiguousarray(array).reshape(-1)
        index = random.Random(seed * 1000 + bit).randrange(8, flat.size - 8)
        place = find_bytes(path, flat[index - 8 : index + 8].tobytes())
        if place is None:
            return {"found": 0.0}
        file, offset = place
        offset += 8 * flat.itemsize + bit // 8
        with file_bit_flipped(file, offset, bit % 8):
            try:
                digest_now = self.load(mechanism, directory, again=True)["digest"]
            except Exception:
                return {"found": 1.0, "refused": 1.0}
        return {"found": 1.0, "refused": 0.0, "silent": float(digest_now != self._digests.get(directory))}

    def _require_training(self) -> Training:
        if self._training is None:
            raise RuntimeError("nothing has been built")
        return self._training

    def _open(
        self,
        mechanism: str,
        directory: Path,
        *,
        durable: bool,
        weights_only: bool = False,
        slots: int = 2,
        training: Training | None = None,
    ) -> Mechanism:
        directory.mkdir(parents=True, exist_ok=True)
        kind = self._mechanisms[mechanism]
        weights_only = weights_only or not kind.optimizer_possible
        return kind(
            training or self._require_training(),
            directory,
            durable=durable,
            weights_only=weights_only,
            slots=slots,
        )

    def _save(self, opened: Mechanism) -> None:
        opened.save()
        if opened.durable and not opened.always_durable and not opened.background:
            opened.sync()


@contextmanager
def file_bit_flipped(file: Path, offset: int, bit: int) -> Iterator[None]:
    """A context in which one bit of a file is the other way round."""

    def flip() -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            old = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([old ^ (1 << bit)]))

    flip()
    try:
        yield
    finally:
        flip()


def flip_in_memory(weights: Arrays, bit: int, count: int, seed: int) -> dict[str, NDArray[Any]]:
    """The weights that change: bit `bit` of `count` elements, drawn from all floating-point ones of four
    bytes.
    """
    names = sorted(name for name, array in weights.items() if array.dtype == np.float32 and array.ndim > 1)
    sizes = [weights[name].size for name in names]
    draw = random.Random(seed * 1000 + bit)
    changed: dict[str, NDArray[Any]] = {}
    for name in draw.choices(names, sizes, k=count):
        array = changed.setdefault(name, np.array(weights[name], order="C"))
        flat = array.reshape(-1).view(np.uint32)
        flat[draw.randrange(flat.size)] ^= np.uint32(1 << bit)
    return changed


def find_bytes(path: Path, wanted: bytes) -> tuple[Path, int] | None:
    for file in files_below(path):
        at = file.read_bytes().find(wanted)
        if at >= 0:
            return file, at
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two trees of containers, arrays and plain values are equal."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__array__"):
        first, second = (each.detach() if hasattr(each, "detach") else each for each in (one, other))
        return bool(np.array_equal(np.asarray(first), np.asarray(second)))
    return bool(one == other)


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _nbytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _stall(seconds: float, base: float, saves: int) -> dict[str, float]:
    return {
        SECONDS: seconds,
        "base_seconds": base,
        "saves": saves,
        "stall_seconds": (seconds - base) / saves,
    }


def _lost(seconds: float, base: float) -> dict[str, float]:
    return {"lost_percent": 100 * seconds / base}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _compared(clean: list[float], losses: list[float]) -> dict[str, float]:
    """The first step whose loss is off, or no number at all, and how far off the worst one is."""
    noticed = broken = 0
    worst = 0.0
    for step, (loss, expected) in enumerate(zip(losses, clean, strict=True), 1):
        off = abs(loss - expected) / max(abs(expected), 1e-12) if math.isfinite(loss) else math.inf
        if not math.isfinite(loss) and not broken:
            broken = step
        if off > NOTICED_LOSS and not noticed:
            noticed = step
        worst = max(worst, min(off, 1e30))
    return {"noticed_step": noticed, "broken_step": broken, "worst_loss_change": worst}


def _largest(expected: Any, found: Any) -> float:
    with np.errstate(all="ignore"):
        apart = np.abs(np.asarray(expected, np.float64) - np.asarray(found, np.float64))
    return float(np.nan_to_num(apart, nan=1e308, posinf=1e308).max(initial=0.0))


def _load_framework(module: str) -> Framework | str:
    try:
        framework: Framework = importlib.import_module(module).FRAMEWORK
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return framework


def _end_with_parent() -> None:
    """A framework that hangs must not outlive a harness that was killed. Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def main(module: str) -> None:
    _end_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    framework = _load_framework(module)
    worker = framework if isinstance(framework, str) else Worker(framework)
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if isinstance(worker, str):
            answer: dict[str, Any] = {"missing": worker}
        else:
            try:
                answer = {"ok": getattr(worker, order.pop("do"))(**order)}
            except Exception as error:  # whatever a framework can raise: it is reported, and costs its row
                first = (str(error).strip().splitlines() or ["no message"])[0]
                answer = {"failure": f"{type(error).__name__}: {first[:500]}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
