"""One way to checkpoint: how to write, make durable and load. Both commands use the same classes.

A mechanism is opened for a `Subject`, the state that it saves, in a directory of its own. The harness decides
when to save and what to sync, and reads the clocks. The classes for one framework are in `frameworks`:
`plain` needs no framework, `torch_mechanisms` needs torch, and each ``*_worker`` has those of its framework.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from everystep_study.harness.files import missing_everystep, missing_modules, sync_tree

Mode = Literal["sync", "overlap", "snapshot"]
PATIENCE_SECONDS = 300.0
"""No save takes this long; one that does is reported as failed."""


class Subject:
    """What a mechanism saves: a training, or arrays that never change. Alone, or on one of several ranks."""

    rank = 0
    timeout = PATIENCE_SECONDS
    """How long a save or load may take that ranks do together."""

    def tree(self, weights_only: bool = False) -> Any:
        """The state in the containers of its framework, such as state dicts."""
        raise NotImplementedError

    def target(self, weights_only: bool = False) -> Any:
        """What a load that fills memory is given."""
        return self.tree(weights_only)

    def put(self, tree: Any) -> None:
        """Takes what was loaded."""
        raise NotImplementedError

    def everystep_state(self, weights_only: bool) -> Any:
        """What a `Checkpointer` is given."""
        return self.tree(weights_only)


class Mechanism(ABC):
    """Saves go to `slots` names in turns: two, so that the newest one is never overwritten, or one.

    A mechanism that keeps its own history of steps ignores `slots` and defines `path`. `start_over` says that
    older checkpoints in the directory belong to another training.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    suffix: ClassVar[str] = ""
    """Of a file's name; a mechanism that writes a directory has none."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Modules that must be installed."""
    ours: ClassVar[bool] = False
    background: ClassVar[bool] = False
    """Whether `save` may return before the state is written."""
    always_durable: ClassVar[bool] = False
    weights_only_possible: ClassVar[bool] = True
    optimizer_possible: ClassVar[bool] = True
    only_first_rank: ClassVar[bool] = False
    """Of several ranks only the first one writes."""
    cost_is_ours: ClassVar[bool] = True
    """False when the CPU time and memory of this process are not those of the transfer."""

    def __init__(
        self,
        subject: Any,
        directory: Path,
        *,
        durable: bool,
        weights_only: bool = False,
        slots: int = 2,
        start_over: bool = False,
    ) -> None:
        self.subject, self.directory = subject, directory
        self.durable, self.weights_only, self.slots = durable, weights_only, slots
        self.start_over = start_over
        self.saves = 0
        self.own_seconds: float | None = None
        """What a clock of the mechanism itself says of the last save or load, if it has one."""
        self._pending: Any = None
        """The save in the background, as a future."""
        self.open()

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed, or None."""
        return missing_modules(*cls.needs)

    @classmethod  # noqa: B027
    def prepare(cls) -> None:
        """What takes long and is done once per process, such as importing and compiling; not timed."""

    def open(self) -> None:  # noqa: B027  (most have nothing to prepare)
        """Prepare; not timed."""

    @property
    def target(self) -> Path:
        """Where the save that is under way goes."""
        return self.directory / f"{self.saves % self.slots}{self.suffix}"

    @property
    def path(self) -> Path:
        """The newest checkpoint, a file or a directory; without a save so far, the one that is there."""
        return self.directory / f"{max(0, self.saves - 1) % self.slots}{self.suffix}"

    @abstractmethod
    def write(self, target: Path) -> None:
        """Write the state to `target`, which an older checkpoint may occupy. Nothing is synced here, unless
        `always_durable`, or `background` and `self.durable`.
        """

    def save(self) -> None:
        if not (self.only_first_rank and self.subject.rank):
            self.write(self.target)
        self.saves += 1

    def save_and_wait(self) -> None:
        self.save()
        self.wait()

    def save_and_sync(self) -> None:
        """Saves; syncs if that is wanted, and left to the harness."""
        self.save()
        if self.durable and not self.always_durable and not self.background and not self.subject.rank:
            self.sync()

    def sync(self) -> None:
        """Make the newest one durable: its files and every directory entry that leads to them."""
        sync_tree(self.path)

    def wait(self) -> None:
        """Returns when what was saved in the background is written, and durable if `self.durable`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result(PATIENCE_SECONDS)
            except BaseException:
                self.saves -= 1
                raise

    @property
    def durable_saves(self) -> int:
        """How many of the saves since opening would survive a power cut now."""
        pending = self._pending
        under_way = pending is not None and (not pending.done() or pending.exception() is not None)
        return self.saves - under_way

    def own_sync_seconds(self) -> float:
        """How much of the last save was syncing, where the mechanism syncs by itself and can tell."""
        return 0.0

    @abstractmethod
    def load(self) -> None:
        """Load the newest checkpoint into the subject. It ends when every byte is in memory."""

    def resume(self) -> int:
        """In a new process: loads the newest checkpoint; the steps completed, 0 if there is none."""
        raise NotImplementedError(f"{self.title} is not measured in restarts")

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
    """An `everystep.Checkpointer` as a user would make it.

    A framework whose state is not changed in place replaces `make`, `write` and `resume`.
    """

    ours = True
    always_durable = True
    mode: ClassVar[Mode]
    prefix: ClassVar[str] = "model."
    """Of the names of weights in a checkpoint."""

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or missing_everystep()

    def options(self) -> dict[str, Any]:
        """Further arguments of the `Checkpointer`."""
        return {}

    def open(self) -> None:
        import everystep

        self.run = self.directory / "run"
        self._step = 0
        arguments: dict[str, Any] = {
            "mode": self.mode,
            "keep": everystep.Keep(last=self.slots),
            "preemption": False,  # a benchmark that is told to stop stops
            "start_over": self.start_over,
            "timeout": self.subject.timeout,
            **self.options(),
        }
        self._checkpointer = self.make(arguments)

    def make(self, arguments: dict[str, Any]) -> Any:
        import everystep

        made = everystep.Checkpointer(self.run, self.subject.everystep_state(self.weights_only), **arguments)
        if made.mode != self.mode and not self.weights_only:  # of weights alone, nothing is announced
            raise RuntimeError(f"asked for {self.mode!r}, the Checkpointer does {made.mode!r}")
        return made

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

    @property
    def durable_saves(self) -> int:
        return self._checkpointer.last_durable or 0

    def own_sync_seconds(self) -> float:
        events = map(json.loads, (self.run / "events.jsonl").read_text().splitlines())
        seconds: list[dict[str, float]] = [event["seconds"] for event in events if event["event"] == "saved"]
        return seconds[-1]["sync"] + seconds[-1]["commit"] if seconds else 0.0

    def resume(self) -> int:
        self._step = self._checkpointer.restore()
        return self._step

    def load(self) -> None:
        if not self.resume():
            raise FileNotFoundError(f"{self.run} has no checkpoint")

    def read_part(self, name: str) -> NDArray[Any]:
        import everystep

        with everystep.open(self.path) as checkpoint:
            return np.asarray(checkpoint[f"{self.prefix}{name}"][...])

    def close(self) -> None:
        self._checkpointer.close()


class EverystepSync(EverystepMechanism):
    key, title = "everystep-sync", "Everystep, sync"
    mode: ClassVar[Mode] = "sync"


class EverystepOverlap(EverystepMechanism):
    key, title = "everystep-overlap", "Everystep, overlap"
    mode: ClassVar[Mode] = "overlap"
    background = True


class EverystepSnapshot(EverystepMechanism):
    key, title = "everystep-snapshot", "Everystep, snapshot"
    mode: ClassVar[Mode] = "snapshot"
    background = True
