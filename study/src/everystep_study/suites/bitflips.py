"""The study's suite ``bitflips``: each bit position of a weight is flipped. Who notices, and when?

Training: the bit is flipped in some weights in memory, as a loader without checksums would bring them back,
and the loss is compared with that of a training without the flip. Loader: the same bit is flipped inside of
the files of a checkpoint, which is then loaded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everystep_study.frameworks.api import Arrays
from everystep_study.harness.files import files_below
from everystep_study.harness.results import Row
from everystep_study.harness.suite import Case, Group, Turn
from everystep_study.report.elements import (
    NOTHING,
    Item,
    Number,
    Source,
    Strip,
    SuiteReport,
    is_ours,
    small,
    whole,
)
from everystep_study.suites.by_framework import FrameworkSuite, MechanismCase
from everystep_study.suites.damage import file_bit_flipped
from everystep_study.workers.orders import Context, build, load, save
from everystep_study.workers.processes import FrameworkProcess

BITS = 32
STEPS = 10
WEIGHTS = (1, 100)
_MODEL = "mlp"


NOTICED_LOSS = 0.01
"""A loss that is off by more than this part of it can be seen in its curve."""
_NEIGHBOURS = 8


def flip_and_train(
    context: Context, bits: int, weights: int, steps: int, seed: int, draw: int, directory: str
) -> dict[str, float]:
    """Trains; then for each bit position goes back to that state, flips the bit in some weights, trains
    on, and compares the losses with those of a training without the flip.

    `draw` chooses the weights. Our own checkpoint goes back, where there is one: it is quick and exact.
    """
    model, quick, _ = context.built
    training = context.framework.training(model, quick, seed)
    for _ in range(steps):
        training.step()
    kinds = context.framework.mechanisms
    chosen = next((each.key for each in kinds if each.ours), kinds[0].key)
    readings: dict[str, float] = {}
    with context.opened(chosen, directory, durable=False, training=training) as opened:
        opened.save_and_wait()
        clean = [training.step() for _ in range(steps)]
        for bit in range(bits):
            opened.load()
            training.set_weights(flip_in_memory(training.weights(), bit, weights, draw))
            found = _compared(clean, [training.step() for _ in range(steps)])
            readings |= {f"{name}, bit {bit}": value for name, value in found.items()}
    return readings


def flip_in_file(context: Context, mechanism: str, directory: str, bit: int, seed: int) -> dict[str, float]:
    """Flips one bit of one weight inside of the files of a checkpoint, loads it, and flips it back.

    A weight is found by its bytes and those of its neighbours. A format that compresses, or stores them
    in another order, has them nowhere.
    """
    with context.opened(mechanism, directory, durable=False) as opened:
        path = opened.path
    array = max(context.training.weights().values(), key=lambda array: array.nbytes)
    flat = np.ascontiguousarray(array).reshape(-1)
    index = random.Random(seed * 1000 + bit).randrange(_NEIGHBOURS, flat.size - _NEIGHBOURS)
    place = find_bytes(path, flat[index - _NEIGHBOURS : index + _NEIGHBOURS].tobytes())
    if place is None:
        return {"found": 0.0}
    file, offset = place
    offset += _NEIGHBOURS * flat.itemsize + bit // 8
    with file_bit_flipped(file, offset, bit % 8):
        try:
            equal = load(context, mechanism, directory, again=True)["readings"]["equal"]
        except Exception:
            return {"found": 1.0, "refused": 1.0}
    return {"found": 1.0, "refused": 0.0, "silent": 1.0 - equal}


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


class Trained(Case):
    """A training that goes on with flipped bits; every round draws other weights."""

    def __init__(self, process: FrameworkProcess, weights: int, seed: int) -> None:
        self.key = f"{weights}"
        self.title = f"{weights} flipped {'weight' if weights == 1 else 'weights'}"
        self.sections = ("training",)
        self._process, self._weights, self._seed = process, weights, seed

    def measure(self, turn: Turn) -> None:
        found = self._process.ask(
            flip_and_train,
            bits=BITS,
            weights=self._weights,
            steps=STEPS,
            seed=self._seed,
            draw=self._seed + turn.round,
            directory=str(turn.directory),
        )
        readings = {"steps": float(STEPS), **found}
        noticed = [bit for bit in range(BITS) if readings[f"noticed_step, bit {bit}"]]
        broken = [bit for bit in range(BITS) if readings[f"broken_step, bit {bit}"]]
        readings |= {"noticed_bits": len(noticed), "broken_bits": len(broken)}
        if noticed:
            readings["lowest_noticed_bit"] = min(noticed)
        turn.record("training", readings)


class Loaded(MechanismCase):
    """A loader that meets a flipped bit in a file."""

    def __init__(self, process: FrameworkProcess, mechanism: dict[str, Any], seed: int) -> None:
        super().__init__(process, mechanism, ("loader",))
        self._seed = seed

    def measure(self, turn: Turn) -> None:
        directory = str(turn.directory)
        self.process.ask(save, mechanism=self.key, directory=directory)
        readings: dict[str, float] = {}
        for bit in range(BITS):
            found = self.process.ask(
                flip_in_file, mechanism=self.key, directory=directory, bit=bit, seed=self._seed
            )
            readings |= {f"{name}, bit {bit}": value for name, value in found.items()}
        for name in ("found", "refused", "silent"):
            readings[name] = sum(readings.get(f"{name}, bit {bit}", 0.0) for bit in range(BITS))
        turn.record("loader", readings)


_BITS_BELOW = ("0, least of the fraction", "23 to 30: exponent, 31: sign")


def _items(source: Source) -> Iterator[Item]:
    if trained := source.rows("training"):
        yield _trained_strip(source, trained)
        headings = {
            "bits noticed in the loss": "noticed_bits",
            "bits that break it": "broken_bits",
            "lowest bit noticed": "lowest_noticed_bit",
        }
        title = f"Training, of {BITS} bits: medians (lowest{NOTHING}highest)"
        yield source.table(title, "training", headings, whole)
    if loaded := source.rows("loader"):
        yield _loaded_strip(source, loaded)
        headings = {"bits found in files and flipped": "found", "refused": "refused", "loaded": "silent"}
        yield source.table("Loaders", "loader", headings, whole)


def _trained_strip(source: Source, rows: Sequence[Row]) -> Strip:
    def square(row: Row, bit: int) -> tuple[str, Number | None]:
        worst = source.number(row, f"worst_loss_change, bit {bit}", small, "high")
        broken = source.number(row, f"broken_step, bit {bit}", whole, "high")
        noticed = source.number(row, f"noticed_step, bit {bit}", whole, "high")
        tone = "bad" if broken and broken.value else "p1" if noticed and noticed.value else "none"
        return tone, worst

    made = tuple((row.title, tuple(square(row, bit) for bit in range(BITS)), False) for row in rows)
    legend = (("none", "unnoticed"), ("p1", "noticed in the loss"), ("bad", "loss broken"))
    return Strip("Training on flipped weights, worst of all rounds, by bit", legend, made, _BITS_BELOW)


def _loaded_strip(source: Source, rows: Sequence[Row]) -> Strip:
    def square(row: Row, bit: int) -> tuple[str, Number | None]:
        refused = source.number(row, f"refused, bit {bit}", whole)
        if refused is None:
            return "none", None
        return ("good" if refused.value else "bad"), refused

    made = tuple((row.title, tuple(square(row, bit) for bit in range(BITS)), is_ours(row)) for row in rows)
    legend = (("good", "the loader refuses"), ("bad", "loaded without a word"), ("none", "not found"))
    return Strip("Loading a checkpoint with the bit flipped in its file, by bit", legend, made, _BITS_BELOW)


REPORT = SuiteReport(
    "One flipped bit in a weight: who notices?",
    (
        "Each bit position of fp32 weights is flipped, from the least of the fraction to the sign. "
        "Training: the flipped weights are trained on, and the losses compared with a training without "
        "the flip. Noticed: "
        f"the loss is off by more than {100 * NOTICED_LOSS:.0f} % within {STEPS} steps; broken: it "
        "is infinite or not a number. Loader: the same bit is flipped inside of the checkpoint's files. "
        "Where a format compresses, a weight's bits cannot be found in its files.",
    ),
    _items,
)


@dataclass
class BitflipsSuite(FrameworkSuite):
    name = "bitflips"
    report = REPORT

    def measured(self, process: FrameworkProcess) -> Iterator[Group]:
        self.built = process.ask(build, model=_MODEL, quick=True, seed=self.seed)
        trained = [Trained(process, count, self.seed) for count in WEIGHTS]
        yield self.group("training", [*trained], share=0.5, warm_up=0)
        loaded = [Loaded(process, each, self.seed) for each in process.hello["mechanisms"]]
        yield Group("loader", loaded, 1, warm_up=0)
