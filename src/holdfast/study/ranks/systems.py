"""Each way in which the ranks of a world save and load a replicated state, made equally durable.

Runs inside of a rank (`child`), which reads the clock around `save` and `load`. All ranks hold the same
state, as in data-parallel training; what is loaded goes into its memory.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.study import results
from holdfast.study.peers import sync_tree, tensors_of
from holdfast.study.states import State

if TYPE_CHECKING:
    from holdfast.plan.topology import Writers

WRITERS = "writers-"


@dataclass(frozen=True, slots=True)
class Rank:
    """Who saves: one of the ranks of a world."""

    rank: int
    state: State
    timeout: float

    @property
    def leads(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended; where the result is and how long it took, where the caller cannot know."""

    path: Path | None = None
    seconds: float | None = None


class System(ABC):
    """`save` and `load` are timed; everything else is not."""

    title: ClassVar[str]

    def __init__(self, me: Rank) -> None:
        self.me = me

    def prepare(self, directory: Path) -> None:  # noqa: B027  (most have nothing to prepare)
        """Import and set up, so that no round pays for it."""

    @abstractmethod
    def save(self, path: Path) -> Ended:
        """Save at `path`; on return it is durable, as far as this rank is concerned."""

    def load(self, path: Path) -> Ended:
        raise NotImplementedError(f"{self.title} is not measured in loading")

    def stop(self) -> None:  # noqa: B027
        """Let go of what `prepare` took."""


class Holdfast(System):
    """`holdfast.save` into a new directory, by all ranks: meeting, planning, comparing replicas."""

    title = "holdfast.save"

    def save(self, path: Path) -> Ended:
        import holdfast

        holdfast.save(path, dict(self.me.state.leaves), timeout=self.me.timeout)
        return Ended()

    def load(self, path: Path) -> Ended:
        import holdfast

        holdfast.load(path, dict(self.me.state.leaves), timeout=self.me.timeout)
        return Ended()


class Recycled(System):
    """The steady state of a training: a `Checkpointer` that overwrites the files of retired checkpoints."""

    title = "Checkpointer"
    writers: Writers = "all"

    def __init__(self, me: Rank) -> None:
        super().__init__(me)
        self._checkpointer: Any = None
        self._run = Path()
        self._step = 0

    def prepare(self, directory: Path) -> None:
        import holdfast

        self._run = directory / "run"
        self._checkpointer = holdfast.Checkpointer(
            self._run,
            dict(self.me.state.leaves),
            mode="sync",
            keep=holdfast.Keep(last=1),
            options=holdfast.Options(writers=self.writers),
            timeout=self.me.timeout,
            preemption=False,
        )
        # The first save has nothing to recycle; the second retires the first; from the third on it is steady.
        for _ in range(2):
            self._next()

    def save(self, path: Path) -> Ended:
        return self._next()

    def stop(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _next(self) -> Ended:
        self._step += 1
        self._checkpointer.save(self._step)
        return Ended(self._run / f"step-{self._step:012d}")


class DistributedCheckpoint(System):
    """`torch.distributed.checkpoint` with its own `sync_files`; the directories are synced by rank 0."""

    title = "dcp.save + fsync"

    def prepare(self, directory: Path) -> None:
        import torch.distributed.checkpoint  # noqa: F401  (about two seconds)

    def save(self, path: Path) -> Ended:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it remarks on its own internals
            save(tensors_of(self.me.state), storage_writer=FileSystemWriter(path, sync_files=True))
        if self.me.leads:
            sync_tree(path)
        return Ended()

    def load(self, path: Path) -> Ended:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tensors_of(self.me.state), storage_reader=FileSystemReader(path))
        return Ended()


class TorchSave(System):
    """`torch.save` by rank 0 while the others wait, as most data-parallel trainings do it."""

    title = "torch.save, rank 0"

    def save(self, path: Path) -> Ended:
        if self.me.leads:
            import torch

            torch.save(tensors_of(self.me.state), path)
            sync_tree(path)
        return Ended()


class RawDevice(System):
    """As many bytes from one aligned buffer of one process, by the engine's clock: the device's limit."""

    title = "raw device limit"

    def save(self, path: Path) -> Ended:
        from holdfast import engine

        if not self.me.leads:
            return Ended()
        return Ended(seconds=engine.raw_write(path, self.me.state.nbytes))

    def load(self, path: Path) -> Ended:
        from holdfast import engine

        return Ended(seconds=engine.raw_read(path, self.me.state.nbytes)) if self.me.leads else Ended()


SYSTEMS: dict[str, type[System]] = {
    results.RAW: RawDevice,
    results.RECYCLED: Recycled,
    results.HOLDFAST: Holdfast,
    results.DCP: DistributedCheckpoint,
    results.TORCH: TorchSave,
}
"""In the order of the table. The limit stands beside what is held against it, so that in every round the two
are measured within moments of each other."""

LOADING = (results.RAW, results.HOLDFAST, results.DCP)


def make(key: str, me: Rank) -> System:
    """A system by its key; ``writers-2`` is a `Checkpointer` of which two ranks write."""
    if key.startswith(WRITERS):
        system = Recycled(me)
        system.writers = int(key.removeprefix(WRITERS))
        return system
    return SYSTEMS[key](me)
