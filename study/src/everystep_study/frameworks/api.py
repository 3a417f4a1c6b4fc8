"""What a framework brings to the study. Runs inside of the framework's own environment.

To add a framework:

1. Write ``NAME_worker.py`` beside this file, with a subclass of `Framework` and ``FRAMEWORK = TheSubclass()``
   at its end. It may import its framework at the top: only its own process imports the module.
2. Write a subclass of `Training`: the models of `models` (the same layers and sizes), one training step.
3. Write a subclass of `Mechanism` for each way to checkpoint, used as its own documentation recommends, and
   one of `EverystepMechanism` for sync and one for overlap.
4. For the suite `determinism`, write a `Probe` and its `DefaultCheckpoint` classes.
5. Add a line to `everystep_study.frameworks.FRAMEWORKS`, and the pinned packages to
   `everystep_study.environments.ENVIRONMENTS`.

Try it: ``everystep study run --quick --suite cost --frameworks NAME --models mlp --out /tmp/try``.

Everything else (clocks, rounds, durability, damage, time limits, results, the report) is the harness's.
``tests/support/study/fake_framework.py`` is the smallest example; `torch_worker` is the largest.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from everystep_study.peers.base import sync_tree

Arrays = Mapping[str, NDArray[Any]]
PATIENCE_SECONDS = 300.0


class Training(ABC):
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

    def everystep_state(self, weights_only: bool) -> object:
        """What `EverystepMechanism` gives to an `everystep.Checkpointer`."""
        raise NotImplementedError

    def arrays(self, weights_only: bool) -> dict[str, NDArray[Any]]:
        found = {f"model.{name}": array for name, array in self.weights().items()}
        if not weights_only:
            found |= {f"optimizer.{name}": array for name, array in self.optimizer_arrays().items()}
        return found


class Mechanism(ABC):
    """One way to checkpoint a `Training`, opened in a directory of its own.

    Saves go to `slots` names in turns: two, so that the newest one is never overwritten, or one. A mechanism
    that keeps its own history of steps ignores `slots` and defines `path`.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    suffix: ClassVar[str] = ""
    """Of a file's name; a mechanism that writes a directory has none."""
    ours: ClassVar[bool] = False
    background: ClassVar[bool] = False
    """Whether `save` may return before the state is written."""
    always_durable: ClassVar[bool] = False
    weights_only_possible: ClassVar[bool] = True
    optimizer_possible: ClassVar[bool] = True

    def __init__(
        self,
        training: Training,
        directory: Path,
        *,
        durable: bool,
        weights_only: bool = False,
        slots: int = 2,
    ) -> None:
        self.training, self.directory = training, directory
        self.durable, self.weights_only, self.slots = durable, weights_only, slots
        self.saves = 0
        self.open()

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed, or None."""
        return None

    @classmethod  # noqa: B027
    def prepare(cls) -> None:
        """What takes long and is done once per process, such as compiling; not timed."""

    def open(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Prepare; not timed."""

    @property
    def target(self) -> Path:
        """Where the save that is under way goes."""
        return self.directory / f"{self.saves % self.slots}{self.suffix}"

    @property
    def path(self) -> Path:
        """The newest checkpoint, a file or a directory; of a directory with no save yet, the one that is
        there.
        """
        if self.saves:
            return self.directory / f"{(self.saves - 1) % self.slots}{self.suffix}"
        return self.directory / f"0{self.suffix}"

    @abstractmethod
    def write(self, target: Path) -> None:
        """Write the training's state to `target`, which an older checkpoint may occupy. Nothing is synced
        here, unless `always_durable`, or `background` and `self.durable`.
        """

    def save(self) -> None:
        self.write(self.target)
        self.saves += 1

    def save_and_wait(self) -> None:
        self.save()
        self.wait()

    def save_and_sync(self) -> None:
        """Saves; syncs if that is wanted, and left to the harness."""
        self.save()
        if self.durable and not self.always_durable and not self.background:
            self.sync()

    def sync(self) -> None:
        """Make the newest one durable: its files and every directory entry that leads to them."""
        sync_tree(self.path)

    def wait(self) -> None:  # noqa: B027
        """Returns when what was saved in the background is written, and durable if `self.durable`."""

    def own_sync_seconds(self) -> float:
        """How much of the last save was syncing, where the mechanism syncs by itself and can tell."""
        return 0.0

    @abstractmethod
    def load(self) -> None:
        """Load the newest checkpoint into the training."""

    def read_part(self, name: str) -> NDArray[Any]:
        """Read one weight, and no more of the files than needed; NotImplementedError if there is no way."""
        raise NotImplementedError

    def plant(self, marker: Path) -> bool:
        """Change the newest checkpoint so that loading it makes the directory `marker`, in a way of this
        format's own.

        False if there is none. Pickles in place of files, and inside of zip archives, are tried for all.
        """
        return False

    def close(self) -> None:  # noqa: B027
        """Let go of memory and threads."""


class EverystepMechanism(Mechanism):
    """An `everystep.Checkpointer` as a user would make it. Subclasses may replace `make` and `write`."""

    ours = True
    always_durable = True
    mode: ClassVar[Literal["sync", "overlap", "snapshot"]]

    def make(self) -> Any:
        import everystep

        return everystep.Checkpointer(
            self.run,
            self.training.everystep_state(self.weights_only),
            mode=self.mode,
            keep=everystep.Keep(last=self.slots),
            preemption=False,
        )

    def open(self) -> None:
        self.run = self.directory / "run"
        self._step = 0
        self._checkpointer = self.make()

    def write(self, target: Path) -> None:
        self._step += 1
        self._checkpointer.save(self._step)

    @property
    def path(self) -> Path:
        found = sorted(self.run.glob("step-*"))
        return found[-1] if found else self.run

    def sync(self) -> None:
        """Its save has done that."""

    def wait(self) -> None:
        self._checkpointer.wait(PATIENCE_SECONDS)

    def own_sync_seconds(self) -> float:
        events = map(json.loads, (self.run / "events.jsonl").read_text().splitlines())
        seconds: list[dict[str, float]] = [event["seconds"] for event in events if event["event"] == "saved"]
        return seconds[-1]["sync"] + seconds[-1]["commit"] if seconds else 0.0

    def load(self) -> None:
        if not self._checkpointer.restore():
            raise FileNotFoundError(f"{self.run} has no checkpoint")
        self._step = max(self._step, self._checkpointer.last_durable)

    def read_part(self, name: str) -> NDArray[Any]:
        import everystep

        with everystep.open(self.path) as checkpoint:
            return np.asarray(checkpoint[f"model.{name}"][...])

    def close(self) -> None:
        self._checkpointer.close()


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


class Framework(ABC):
    """Everything that the study knows of one framework."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = ()
    defaults: ClassVar[tuple[type[DefaultCheckpoint], ...]] = ()
    models: ClassVar[tuple[str, ...]] = ("mlp", "resnet50", "vgg16", "gpt2")

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of the packages that matter here."""

    @abstractmethod
    def build(self, model: str, quick: bool, seed: int) -> Training:
        """The model of `models.size_of`, with its optimizer's state made (perhaps by one step)."""

    def probe(self, seed: int) -> Probe:
        raise NotImplementedError("this framework has no probe for determinism")


class LoopMechanism(Mechanism):
    """A way to checkpoint that a trainer's own loop drives: only its name and kind, it is never opened."""

    def write(self, target: Path) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError


class LoopFramework(Framework):
    """A trainer that owns its loop, so that whole loops are measured. It takes part in ``cost`` only."""

    @abstractmethod
    def loop(self, mechanism: str, durable: bool, every: int, steps: int, directory: Path) -> float:
        """Trains the model that was built last for ``steps + 2`` steps; no checkpoints if `mechanism` is "".

        Returns the seconds from the beginning of the second step to the beginning of the last one.
        """
