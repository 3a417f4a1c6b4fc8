"""What every system that saves and loads a state must offer, and what they share."""

from __future__ import annotations

import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from everystep_study.states import State

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Done:
    """An operation that has ended. Where the system read its own clocks, those readings count."""

    path: Path
    leaves: Mapping[str, Any] | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """Which of how many processes saves; alone unless said otherwise."""

    rank: int = 0
    world: int = 1
    timeout: float = 300.0


class Peer(ABC):
    """A system that saves and loads. `save` and `load` are timed; everything else is not.

    A save ends when its files, and every directory entry that leads to them, have been synced. A load ends
    when every byte is in memory that the caller may use, none still to be read. Peers write names in place,
    without the temporary name and rename that would make them atomic: Everystep bears that cost.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    cost_is_ours: ClassVar[bool] = True
    """False when the CPU time and memory of this process are not those of the transfer."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Modules that must be installed."""

    def __init__(self, member: Member | None = None) -> None:
        self.member = member or Member()

    def missing(self) -> str | None:
        """What has to be installed before this system can be measured, or None."""
        return missing_modules(*self.needs)

    def start(self, directory: Path, state: State) -> None:  # noqa: B027  (most have nothing to prepare)
        """Import and prepare, so that no round pays for it."""

    @abstractmethod
    def save(self, path: Path, state: State) -> Done:
        """Save durably at `path`, which does not exist yet; `Done.path` says where it really is."""

    @abstractmethod
    def load(self, path: Path, into: State | None = None) -> Done:
        """Load what was saved at `path`, completely: into fresh memory, or in place."""

    def remove(self, saved: Done) -> None:
        """Delete what `save` wrote."""
        remove(saved.path)

    def stop(self) -> None:  # noqa: B027
        """Let go of what `start` took."""


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    if state.tensors is None:
        raise RuntimeError("the state was built without torch; peers that need it report themselves missing")
    return dict(state.tensors)


def missing_modules(*names: str) -> str | None:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(absent)}" if absent else None


def missing_everystep() -> str | None:
    """Why Everystep itself cannot run: a checkout whose native engine was never built."""
    try:
        from everystep import Checkpointer, Keep, load, save  # noqa: F401
    except ImportError as error:
        return f"the engine is not built ({error})"
    return None


def sync_tree(path: Path) -> None:
    """Make `path` durable: every file below it, every directory, and the entry that names it."""
    if path.is_dir():
        for parent, _, files in os.walk(path, topdown=False):
            for name in files:
                sync(Path(parent, name))
            sync(Path(parent))
    else:
        sync(path)
    sync(path.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_below(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return [Path(parent, name) for parent, _, files in os.walk(path) for name in files]
    return [path] if path.exists() else []


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """How two sets of arrays or tensors differ, bit for bit, or None when they are equal."""
    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        return f"leaves missing or made up: {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}"
    for name, leaf in expected.items():
        array, other = _array(leaf), _array(found[name])
        if array.dtype != other.dtype or array.shape != other.shape:
            return f"{name}: {array.dtype}{array.shape} became {other.dtype}{other.shape}"
        if not np.array_equal(_bytes(array), _bytes(other)):
            return f"{name} differs"
    return None


def _array(leaf: Any) -> np.ndarray[Any, Any]:
    return np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf)


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
