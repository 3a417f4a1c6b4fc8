"""What can be done about checkpoints while a training runs: nothing, or Holdfast in its three modes.

Every arm makes the state durable after every step, as `peers` understands it: files and the directories that
name them are synced. None has more than one save in flight, and none falls behind: a save that is due waits
for the one before it. What an arm must wait for before the weights change, it waits for in a hook on the
optimizer, so that one clock around the hooks sees all of them alike (`measure`).

The others are in `peers`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.study.peers import missing_holdfast, missing_modules
from holdfast.study.training.model import Trainer
from holdfast.study.training.results import NONE, OVERLAP, SNAPSHOT, SYNC

if TYPE_CHECKING:
    import torch

PATIENCE_SECONDS = 300.0
"""No save of a benchmark takes this long; one that does is reported as failed instead of waited for."""


class Arm(ABC):
    """One way to train. It is opened before a block of steps and closed after it; its files stay between."""

    key: ClassVar[str]
    title: ClassVar[str]

    def __init__(self) -> None:
        self.durable: int | None = None
        """The newest step that survives a power cut now; None while there is none."""

    @abstractmethod
    def missing(self) -> str | None:
        """Why this arm cannot be measured here, or None when it can."""

    @abstractmethod
    def open(self, directory: Path, trainer: Trainer) -> None: ...

    @abstractmethod
    def save(self, step: int) -> None:
        """What the training loop calls after each step; returns when training may go on."""

    def newest(self) -> int | None:
        return self.durable

    def drain(self) -> None:  # noqa: B027  (nothing is in flight where a save ends durable)
        """Wait until everything is durable; raises what went wrong in the background."""

    def close(self) -> None:  # noqa: B027
        """Let go of memory, threads and hooks."""

    def differs(self, trainer: Trainer) -> str | None:
        """How the newest checkpoint differs from the state as it is now, or None. Only after `drain`."""
        return None


class Nothing(Arm):
    """Training without checkpoints: what all others are compared with."""

    key = NONE
    title = "no checkpoints"

    def missing(self) -> str | None:
        return missing_modules("torch")

    def open(self, directory: Path, trainer: Trainer) -> None: ...

    def save(self, step: int) -> None: ...


class HoldfastArm(Arm):
    """A `Checkpointer` as a user would make it."""

    mode: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._checkpointer: Any = None

    def missing(self) -> str | None:
        return missing_modules("torch") or missing_holdfast()

    def open(self, directory: Path, trainer: Trainer) -> None:
        import holdfast

        self._checkpointer = holdfast.Checkpointer(
            directory / "run",
            trainer.state,
            mode=self.mode,  # type: ignore[arg-type]
            keep=holdfast.Keep(last=2),
            preemption=False,  # a benchmark that is told to stop stops
            start_over=True,  # each round goes on with the trainer as it is, not as the last round saved it
        )
        if self._checkpointer.mode != self.mode:
            raise RuntimeError(f"asked for {self.mode!r}, the Checkpointer does {self._checkpointer.mode!r}")

    def save(self, step: int) -> None:
        self._checkpointer.save(step)

    def newest(self) -> int | None:
        durable: int | None = self._checkpointer.last_durable
        return durable

    def drain(self) -> None:
        self._checkpointer.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def differs(self, trainer: Trainer) -> str | None:
        before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
        for tensor in trainer.tensors.values():
            tensor.zero_()  # a restore that does nothing must not pass
        self._checkpointer.restore()
        return difference(before, trainer.tensors)


class Overlap(HoldfastArm):
    key = OVERLAP
    title = "Holdfast, overlap"
    mode = "overlap"


class Snapshot(HoldfastArm):
    key = SNAPSHOT
    title = "Holdfast, snapshot"
    mode = "snapshot"


class Sync(HoldfastArm):
    key = SYNC
    title = "Holdfast, sync"
    mode = "sync"


def state_dicts(trainer: Trainer) -> dict[str, Any]:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def snapshot(
    tree: Mapping[Any, Any], buffers: Mapping[str, torch.Tensor], prefix: str = ""
) -> dict[Any, Any]:
    """The same tree with every tensor copied into the buffer of its path, and values copied as they are."""
    import torch

    taken: dict[Any, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            taken[key] = buffers[name].copy_(value)
        elif isinstance(value, Mapping):
            taken[key] = snapshot(value, buffers, f"{name}.")
        else:
            taken[key] = copy.deepcopy(value)
    return taken


def difference(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str | None:
    """What distinguishes two sets of tensors, bit for bit, or None when they are equal."""
    import torch

    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        return f"tensors missing or made up: {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}"
    for name, tensor in expected.items():
        other = found[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            return f"{name}: {tensor.dtype}{tuple(tensor.shape)} became {other.dtype}{tuple(other.shape)}"
        if not torch.equal(_bits(tensor), _bits(other)):
            return f"{name} differs"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
