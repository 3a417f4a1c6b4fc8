"""What a worker keeps from order to order, and the orders that several suites give.

They describe the framework (`hello`), prepare a mechanism, build a training, save it and load it. Further
orders of a suite are in the suite's file. They need numpy, msgspec and Everystep, and nothing else of the
environment.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everystep_study.frameworks.api import Arrays, Framework, Training
from everystep_study.harness.costs import cost_of, wall_seconds
from everystep_study.harness.files import files_below
from everystep_study.harness.results import PEAK_NBYTES, SECONDS
from everystep_study.mechanisms.mechanism import Mechanism

_SHOWN = ("key", "title", "always_durable", "weights_only_possible", "optimizer_possible")


class Context:
    framework: Framework

    def __init__(self) -> None:
        self.mechanisms: dict[str, type[Mechanism]] = {}
        self.built: tuple[str, bool, int] = ("", False, 0)
        """Model, quick and seed of the training."""
        self.digests: dict[str, str] = {}
        """Of what was saved, by directory."""
        self.filled: Training | None = None
        """The training that was loaded into, kept for the next load."""
        self.kept: dict[str, Any] = {}
        """What a suite keeps for its next orders."""
        self.at_end = ExitStack()
        self._training: Training | None = None

    @property
    def training(self) -> Training:
        if self._training is None:
            raise RuntimeError("nothing has been built")
        return self._training

    def build(self, model: str, quick: bool, seed: int) -> Training:
        self._training, self.built = self.framework.training(model, quick, seed), (model, quick, seed)
        self.filled = None
        return self._training

    def opened(
        self,
        mechanism: str,
        directory: str,
        *,
        durable: bool,
        weights_only: bool = False,
        slots: int = 1,
        training: Training | None = None,
    ) -> AbstractContextManager[Mechanism]:
        """A mechanism in a directory, closed at the end; of the training that was built, unless another is
        given.
        """
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        kind = self.mechanisms[mechanism]
        weights_only = weights_only or not kind.optimizer_possible
        return closing(
            kind(training or self.training, place, durable=durable, weights_only=weights_only, slots=slots)
        )


def hello(context: Context, module: str) -> dict[str, Any]:
    """Imports the module of a framework, and describes it; ``{"missing": WHY}`` if it is not installed."""
    try:
        framework: Framework = importlib.import_module(module).FRAMEWORK
    except ImportError as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    context.framework = framework
    context.mechanisms = {mechanism.key: mechanism for mechanism in framework.mechanisms}
    return {
        "versions": framework.versions(),
        "models": list(framework.models),
        "loop": framework.loop is not None,
        "mechanisms": [
            {**{name: getattr(each, name) for name in _SHOWN}, "missing": each.missing()}
            for each in framework.mechanisms
        ],
        "defaults": [
            {"key": each.key, "title": each.title, "ours": each.ours, "missing": each.missing()}
            for each in framework.defaults
        ],
    }


def prepare(context: Context, mechanism: str) -> dict[str, Any]:
    context.mechanisms[mechanism].prepare()
    return {}


def build(context: Context, model: str, quick: bool, seed: int) -> dict[str, float]:
    """Builds a model and takes steps until memory and thread pools are there."""
    training = context.build(model, quick, seed)
    for _ in range(2):
        training.step()
    seconds = wall_seconds(training.step)
    return {
        "weights_nbytes": nbytes_of(training.weights()),
        "optimizer_nbytes": nbytes_of(training.optimizer_arrays()),
        "step_seconds": seconds,
    }


def nbytes_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


def save(context: Context, mechanism: str, directory: str, weights_only: bool = False) -> dict[str, Any]:
    """One save, made durable after the clock has stopped. `load` and `part` compare with it."""
    with context.opened(mechanism, directory, durable=True, weights_only=weights_only) as opened:
        _, readings = cost_of(opened.save_and_wait)
        if not opened.always_durable:
            opened.sync()
        path = opened.path
    arrays = context.training.arrays(opened.weights_only)
    context.digests[directory] = digest(arrays)
    stored = sum(file.stat().st_size for file in files_below(path))
    return {
        "readings": {
            SECONDS: readings[SECONDS],
            PEAK_NBYTES: readings.get(PEAK_NBYTES, 0.0),
            "stored_nbytes": stored,
            "arrays_nbytes": nbytes_of(arrays),
        },
        "path": str(path),
        "digest": context.digests[directory],
    }


def load(
    context: Context, mechanism: str, directory: str, weights_only: bool = False, again: bool = False
) -> dict[str, Any]:
    """Loads into a training that was built from another seed; `equal` tells whether all came back.

    `again`: into the same one as before, after a step that changes all of it, and without looking at the
    cost: for many loads of a small checkpoint. Building and measuring take longer than such a load.
    """
    model, quick, seed = context.built
    fresh = _changed(context) if again else None
    if fresh is None:
        fresh = context.framework.training(model, quick, seed + 1)
    context.filled = fresh if again else None  # kept, it would count as memory of the next load
    with context.opened(
        mechanism, directory, durable=False, weights_only=weights_only, training=fresh
    ) as opened:
        readings = {}
        if again:
            opened.load()
        else:
            _, cost = cost_of(opened.load)
            readings = {SECONDS: cost[SECONDS], PEAK_NBYTES: cost.get(PEAK_NBYTES, 0.0)}
    found = digest(fresh.arrays(opened.weights_only))
    readings["equal"] = float(found == context.digests.get(directory))
    return {"readings": readings, "digest": found}


def _changed(context: Context) -> Training | None:
    """The training that was loaded into before, one step on; None if there is none that can step."""
    if context.filled is not None:
        try:
            context.filled.step()
        except Exception:  # a load that failed may have left anything in it
            context.filled = None
    return context.filled


def digest(arrays: Arrays) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
