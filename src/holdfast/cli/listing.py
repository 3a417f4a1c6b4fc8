"""What a run's directory holds, damaged and unfinished things included. Reads manifests, never arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, ReadFailed
from holdfast.state import leaf_names
from holdfast.store import Checkpoint, is_checkpoint, list_steps, resolve, step_name

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
    """`CheckpointNotFound` when there is no such directory. A checkpoint's own path lists that one."""
    where = os.path.abspath(path)
    if is_checkpoint(where):
        return Listing(where, (_entry(where, None),), ())
    entries = []
    for step in list_steps(where):
        try:
            entries.append(_entry(os.path.join(where, step_name(step)), step))
        except CheckpointNotFound:
            continue  # retention took it away since the directory was listed
    return Listing(where, tuple(entries), leftovers(where))


def checkpoints_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The checkpoint at a path, or all of a run, oldest first."""
    where = os.path.abspath(path)
    if not is_checkpoint(where) and os.path.isdir(where):
        steps = list_steps(where)
        if steps:
            return tuple(os.path.join(where, step_name(step)) for step in steps)
    return (resolve(where),)


def leaf_order(checkpoint: Checkpoint) -> list[str]:
    """Names of all leaves in the order of the state; in files they are in the order of their alignment."""
    named = dict.fromkeys(name for name in leaf_names(checkpoint.tree) if name in checkpoint)
    return [*named, *(name for name in checkpoint if name not in named)]


def leftovers(run: str) -> tuple[Leftover, ...]:
    found = []
    for name in sorted(os.listdir(run)):
        match = _LEFTOVER.fullmatch(name)
        if match is not None:
            path = os.path.join(run, name)
            found.append(Leftover(path, match[1], directory_nbytes(path)))
    return tuple(found)


def directory_nbytes(path: str) -> int:
    """Bytes of the files in a checkpoint's directory; one that disappears meanwhile has none."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except FileNotFoundError:
        return 0


def _entry(path: str, step: int | None) -> Entry:
    nbytes = directory_nbytes(path)
    try:
        with Checkpoint(path) as checkpoint:
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
    except (CorruptCheckpoint, ReadFailed) as error:
        return Entry(path, step, nbytes, damage=getattr(error, "reason", str(error)))


def _contents(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """The number of leaves, and the bytes that lie on other volumes. None when a rank's part is damaged."""
    try:
        elsewhere = sum(file.nbytes for part in checkpoint.parts for file in part.files if file.volume)
        return len(checkpoint), elsewhere
    except (CorruptCheckpoint, ReadFailed):
        return None


def _visible_damage(checkpoint: Checkpoint) -> str | None:
    problem = checkpoint.visible_damage()
    return None if problem is None else f"{os.path.basename(problem.file)}: {problem.reason}"
