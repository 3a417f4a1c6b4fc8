"""The checkpoints and leftovers in a run's directory, damaged ones included. Reads no arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, ReadFailed
from holdfast.store import is_checkpoint, resolve
from holdfast.store.names import is_step_name
from holdfast.store.os_errors import reading
from holdfast.store.read.open import require_reachable
from holdfast.store.read.stored_checkpoint import StoredCheckpoint

_LEFTOVER = re.compile(r"step-\d{12}\.(partial|retired)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One committed checkpoint. `damage`: why it cannot be used, as far as sizes and manifest tell."""

    path: str
    step: int | None
    nbytes: int
    created: float | None = None
    leaves: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory that is no checkpoint: an unfinished save, or what a writer keeps to recycle."""

    path: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A run's checkpoints in order of step."""

    path: str
    checkpoints: tuple[Entry, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def damaged(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.checkpoints if entry.damage is not None)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.checkpoints)


def list_run(path: str | os.PathLike[str]) -> Listing:
    """Lists the checkpoints of a run, damaged ones included. The path of a checkpoint lists that one.

    Reads manifests and sizes only. `holdfast.CheckpointNotFound` if the directory does not exist.
    """
    where = os.path.abspath(path)
    if is_checkpoint(where):
        return Listing(where, (entry_of(resolve(where), None),), ())
    entries = [entry_of(path, step) for step, path in _steps(where).items()]
    # Without those that retention took away since the directory was listed.
    return Listing(where, tuple(entry for entry in entries if not is_gone(entry.path)), leftovers(where))


def checkpoints_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The checkpoint at a path, or all of a run, oldest first."""
    where = os.path.abspath(path)
    if not is_checkpoint(where) and os.path.isdir(where):
        steps = _steps(where)
        if steps:
            return tuple(steps.values())
    return (resolve(where),)


def _steps(run: str) -> dict[int, str]:
    """Everything that has the name of a checkpoint, oldest first, even if it is something else."""
    require_reachable(run)
    with reading(run):
        try:
            names = os.listdir(run)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(f"there is no run at {run}") from error
    return {
        int(name.removeprefix("step-")): os.path.join(run, name)
        for name in sorted(names)
        if is_step_name(name)
    }


def leftovers(run: str) -> tuple[Leftover, ...]:
    found = []
    for name in sorted(os.listdir(run)):
        match = _LEFTOVER.fullmatch(name)
        if match is not None:
            path = os.path.join(run, name)
            found.append(Leftover(path, match[1], directory_nbytes(path)))
    return tuple(found)


def directory_nbytes(path: str) -> int:
    """Bytes of the files in a checkpoint's directory; 0 if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0


def entry_of(path: str, step: int | None) -> Entry:
    """The checkpoint at a path, or what shall be one. `step` is the one that its name says."""
    nbytes = directory_nbytes(path)
    try:
        with StoredCheckpoint(path) as checkpoint:
            damage = _visible_damage(checkpoint)
            known = _contents(checkpoint)
            return Entry(
                path,
                checkpoint.step,
                nbytes + (known[1] if known else 0),
                checkpoint.created,
                known[0] if known else None,
                checkpoint.metrics,
                damage,
            )
    except (CorruptCheckpoint, ReadFailed, CheckpointNotFound) as error:
        return Entry(path, step, nbytes, damage=reason_of(error))


def is_gone(path: str) -> bool:
    """Whether the path certainly does not exist. (`lexists` is also False where it may not look.)"""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def reason_of(error: Exception) -> str:
    """What is wrong with a checkpoint, without its path."""
    return getattr(error, "reason", None) or str(error)


def _contents(checkpoint: StoredCheckpoint) -> tuple[int, int] | None:
    """The number of leaves, and the bytes that lie on other volumes. None when a rank's part is damaged."""
    try:
        elsewhere = sum(file.nbytes for part in checkpoint.parts for file in part.files if file.volume)
        return len(checkpoint), elsewhere
    except (CorruptCheckpoint, ReadFailed):
        return None


def _visible_damage(checkpoint: StoredCheckpoint) -> str | None:
    problem = checkpoint.visible_damage()
    return None if problem is None else f"{os.path.basename(problem.file)}: {problem.reason}"
