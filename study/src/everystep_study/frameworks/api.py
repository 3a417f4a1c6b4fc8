"""What a framework brings to the study. Runs inside of the framework's own environment.

To add a framework:

1. Write ``NAME_worker.py`` beside this file, with ``FRAMEWORK = Framework(...)`` at its end. It may import
   its framework at the top: only its own process imports the module.
2. Write a subclass of `Training`: the models of `models` (the same layers and sizes), one training step.
3. Write a subclass of `Mechanism` for each way to checkpoint, used as its own documentation recommends. Those
   of Everystep are `EverystepSync` and `EverystepOverlap` of `mechanisms.mechanism`, or subclasses.
4. For the suite `determinism`, write a `Probe` and its `DefaultCheckpoint` classes.
5. Add a line to `everystep_study.frameworks.FRAMEWORKS`, and the pinned packages to
   `everystep_study.environments.ENVIRONMENTS`.

Try it: ``everystep study run --quick --suite cost --frameworks NAME --models mlp --out /tmp/try``.

Everything else (clocks, rounds, durability, damage, time limits, results, the report) is the harness's.
``tests/support/study/fake_framework.py`` is the smallest example; `torch_worker` is the largest.
"""

from __future__ import annotations

import importlib.metadata
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from everystep_study.frameworks.models import MODELS, Size
from everystep_study.mechanisms.mechanism import Mechanism, Subject

Arrays = Mapping[str, NDArray[Any]]


class Training(Subject, ABC):
    """One model, its optimizer and a batch of made-up data, all from one seed."""

    @abstractmethod
    def step(self) -> float:
        """One training step, ended: returns the loss."""

    @abstractmethod
    def weights(self) -> Arrays:
        """Every array of the model by name, buffers included; copies or views."""

    @abstractmethod
    def optimizer_arrays(self) -> Arrays:
        """Every array of the optimizer's state (momenta); step counts may be left out."""

    @abstractmethod
    def set_weights(self, arrays: Arrays) -> None:
        """Puts values into the model; names as in `weights`, perhaps only some of them."""

    def arrays(self, weights_only: bool) -> dict[str, NDArray[Any]]:
        found = {f"model.{name}": array for name, array in self.weights().items()}
        if not weights_only:
            found |= {f"optimizer.{name}": array for name, array in self.optimizer_arrays().items()}
        return found


class Images:
    """The data of a probe: shuffled, mirrored by Python's random numbers, with noise by numpy's.

    Has `state_dict` and `load_state_dict`, like any stateful loader.
    """

    SAMPLES, BATCH = 40, 8

    def __init__(self, seed: int, *, channels_first: bool) -> None:
        data = np.random.default_rng(1234)  # the data are the same for all
        shape = (3, 8, 8) if channels_first else (8, 8, 3)
        self._mirrored = -1 if channels_first else -2
        self.images = data.standard_normal((self.SAMPLES, *shape)).astype(np.float32)
        self.labels = data.integers(10, size=self.SAMPLES).astype(np.int32)
        self._draw = np.random.default_rng(seed)
        self._shuffle()

    def take(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The next batch."""
        if self._taken == self.SAMPLES:
            self._shuffle()
        taken = self._order[self._taken : self._taken + self.BATCH]
        self._taken += self.BATCH
        images = self.images[taken]
        if random.random() < 0.5:
            images = np.flip(images, self._mirrored)
        noisy = images + 0.1 * np.random.standard_normal(images.shape)
        return noisy.astype(np.float32), self.labels[taken]

    @property
    def seen(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """What is validated with."""
        return self.images[: self.BATCH], self.labels[: self.BATCH]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order.copy(), "taken": self._taken, "draw": self._draw.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order, self._taken = np.array(state["order"]), int(state["taken"])
        self._draw.bit_generator.state = state["draw"]

    def _shuffle(self) -> None:
        self._order, self._taken = self._draw.permutation(self.SAMPLES), 0


class Probe(ABC):
    """A small training that uses every kind of state that a resume can forget.

    `ingredients` names them: random number generators, the optimizer, the scheduler, the position in the
    data, the buffers of BatchNorm. Each must matter: a resume without it must differ.
    """

    ingredients: ClassVar[Mapping[str, str]]
    """Keys, and what they are called in the report."""

    @abstractmethod
    def step(self) -> float:
        """One step, with everything random in it; returns the loss."""

    @abstractmethod
    def weights(self) -> Arrays:
        """Copies."""

    @abstractmethod
    def capture(self) -> dict[str, Any]:
        """A copy of everything, by ingredient, and "weights"."""

    @abstractmethod
    def restore(self, captured: Mapping[str, Any]) -> None:
        """Puts back what is given, and nothing else."""


def capture_random() -> dict[str, Any]:
    """The states of numpy's and Python's random numbers, by ingredient."""
    return {"numpy_rng": np.random.get_state(), "python_rng": random.getstate()}


def restore_random(captured: Mapping[str, Any]) -> None:
    """Those of them that were captured."""
    if "numpy_rng" in captured:
        np.random.set_state(captured["numpy_rng"])
    if "python_rng" in captured:
        random.setstate(captured["python_rng"])


class DefaultCheckpoint(ABC):
    """What a framework's documentation shows as *the* checkpoint, of a `Probe`."""

    key: ClassVar[str]
    title: ClassVar[str]
    ours: ClassVar[bool] = False

    @classmethod
    def missing(cls) -> str | None:
        return None

    @abstractmethod
    def save(self, probe: Any, directory: Path) -> None: ...

    @abstractmethod
    def load(self, probe: Any, directory: Path) -> None: ...


class EverystepDefault(DefaultCheckpoint):
    """A `Checkpointer` of what Everystep's documentation shows for the framework, which `state` returns."""

    key, title, ours = "everystep", "Everystep, as in its documentation", True
    mode: ClassVar[str] = "overlap"

    @abstractmethod
    def state(self, probe: Any) -> Any: ...

    def save(self, probe: Any, directory: Path) -> None:
        with self._checkpointer(probe, directory) as checkpointer:
            checkpointer.save(1)

    def load(self, probe: Any, directory: Path) -> None:
        with self._checkpointer(probe, directory) as checkpointer:
            checkpointer.restore()

    def _checkpointer(self, probe: Any, directory: Path) -> Any:
        import everystep

        mode: Any = self.mode
        return everystep.Checkpointer(directory / "run", self.state(probe), mode=mode, preemption=False)


class LoopMechanism(Mechanism):
    """A way to checkpoint that a trainer's own loop drives: only its name and kind, it is never opened."""

    def write(self, target: Path) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError


class LoopSync(LoopMechanism):
    key, title = "everystep-sync", "Everystep, sync"
    ours = always_durable = True


class LoopOverlap(LoopMechanism):
    key, title = "everystep-overlap", "Everystep, overlap"
    ours = always_durable = background = True


@dataclass(frozen=True)
class Framework:
    """Everything that the study knows of one framework."""

    packages: Mapping[str, str]
    """Those whose versions matter here, by the names that the report has for them."""
    training: Callable[[str, bool, int], Training]
    """Of a model, quick or not, and a seed; with its optimizer's state made (perhaps by one step)."""
    mechanisms: tuple[type[Mechanism], ...]
    probe: Callable[[int], Probe] | None = None
    """Of a seed, for ``determinism``."""
    defaults: tuple[type[DefaultCheckpoint], ...] = ()
    models: tuple[str, ...] = MODELS
    loop: Callable[[Size, str, bool, int, int, Path], float] | None = None
    """Of a trainer that owns its loop, so that whole loops are measured. It takes part in ``cost`` only.

    Gets the size of the model, the key of a mechanism ("" for no checkpoints), whether saves must be durable,
    after how many steps each is due, the number of steps and a directory. It takes two steps more, and
    returns the seconds from the beginning of the second step to the beginning of the last one.
    """

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(package) for name, package in self.packages.items()}
