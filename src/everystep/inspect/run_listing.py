"""The checkpoints and leftovers in a directory, damaged ones included, or the runs below. Reads no arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from everystep.checkpointer.events import EVENTS_NAME
from everystep.errors import CheckpointNotFound, CorruptCheckpoint, ReadFailed
from everystep.store import is_checkpoint, list_steps, locate, resolve, step_name
from everystep.store.names import is_step_name
from everystep.store.read import foreign
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint
from everystep.store.read.listing import inner_checkpoints, natural_order, no_run
from everystep.store.read.open import require_reachable
from everystep.store.read.read_errors import reading
from everystep.store.read.verify import visible_damage

_LEFTOVER = re.compile(r"step-\d{12}\.(partial|retired)")
_MAX_DEPTH = 4
_MAX_VISITED = 10_000
"""How many directories are searched for runs: a user may name the root of a file system."""

_OF_THE_FILESYSTEM = "lost+found"
"""Every ext4 file system has it, for root only. No training writes there."""


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One committed checkpoint of a listing.

    Attributes:
        name: The name of its directory.
        path: Its path.
        step: Its step; None if that cannot be read.
        nbytes: Bytes of its files.
        created: Unix time of the save.
        leaves: How many leaves it has.
        metrics: The metrics that were given to the save.
        damage: Why it cannot be used, as far as sizes and manifest tell.
    """

    name: str
    path: str
    step: int | None
    nbytes: int
    created: float | None = None
    leaves: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    damage: str | None = None

    @property
    def named_by_step(self) -> bool:
        """Whether it belongs to the run it is in: a Checkpointer finds it, and retention counts it."""
        return is_step_name(self.name)


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run below the directory that was listed.

    Attributes:
        path: Its path.
        checkpoints: How many checkpoints it has.
        nbytes: Bytes of their files.
        newest: Its newest checkpoint; None while it has none.
    """

    path: str
    checkpoints: int
    nbytes: int
    newest: ListedCheckpoint | None


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory of a run that is not a checkpoint.

    Attributes:
        name: The name of the directory.
        path: Its path.
        kind: ``"partial"``: a save that did not finish. ``"retired"``: a checkpoint that retention removed.
        nbytes: Bytes of its files.
    """

    name: str
    path: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory's checkpoints.

    Attributes:
        path: The directory.
        checkpoints: The checkpoints of the run by step, and then those with other names.
        leftovers: Unfinished saves and retired checkpoints.
        runs: The runs below, unless the directory is a run itself.
        foreign: Whether the directory is a checkpoint of another system.
        others: Names of such checkpoints inside it.
        unreadable: Directories below that may hold runs, but could not be listed.
    """

    path: str
    checkpoints: tuple[ListedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]
    runs: tuple[ListedRun, ...] = ()
    foreign: bool = False
    others: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def damaged(self) -> tuple[ListedCheckpoint, ...]:
        newest = (run.newest for run in self.runs)
        entries = (*self.checkpoints, *(entry for entry in newest if entry is not None))
        return tuple(entry for entry in entries if entry.damage is not None)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.checkpoints) + sum(run.nbytes for run in self.runs)


def list_run(path: str | os.PathLike[str]) -> Listing:
    """List the checkpoints in a directory, damaged ones included. Reads manifests and sizes only.

    If the directory is not a run itself, the runs below it are listed, too. Raises
    `everystep.CheckpointNotFound` if it does not exist.

    Args:
        path: The directory. The path of a checkpoint lists that one.
    """
    where = locate(path)
    if is_checkpoint(where):
        return Listing(where, (entry_of(resolve(where), None),), ())
    steps = _steps(where)
    entries = [entry_of(path, step) for step, path in steps.items()]
    entries += [entry_of(os.path.join(where, name), None) for name in inner_checkpoints(where)]
    # Without those that retention has removed since the directory was listed.
    present = tuple(entry for entry in entries if not is_gone(entry.path))
    left = leftovers(where)
    if steps or left:  # a run: directories below it are not searched
        return Listing(where, present, left)
    unreadable: list[str] = []
    runs = tuple(map(_run_entry, runs_below(where, unreadable)))
    nothing = not present and not runs
    is_foreign = nothing and foreign.recognises(where)
    others = foreign.checkpoints_in(where) if nothing and not is_foreign else ()
    return Listing(
        where,
        present,
        (),
        runs,
        foreign=is_foreign,
        others=tuple(others),
        unreadable=tuple(unreadable),
    )


def checkpoints_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The checkpoint at a path; or all in a directory, oldest step first, and if it is no run, below it."""
    where = locate(path)
    if not is_checkpoint(where) and os.path.isdir(where):
        found = [*checkpoints_inside(where)]
        if not _steps(where):
            unreadable: list[str] = []
            found += [inner for run in runs_below(where, unreadable) for inner in checkpoints_inside(run)]
            found += unreadable  # may hold checkpoints, so they must not be left out silently
        if found:
            return tuple(found)
    return (resolve(where),)


def checkpoints_inside(directory: str) -> tuple[str, ...]:
    """Those of the run in order of step, then those of other names."""
    named = (os.path.join(directory, name) for name in inner_checkpoints(directory))
    return (*_steps(directory).values(), *named)


def runs_below(where: str, unreadable: list[str] | None = None) -> Iterator[str]:
    """The directories below that hold checkpoints, or the events of a training; in the order of names.

    Those that cannot be listed are added to `unreadable`.
    """
    visited = 0

    def look(directory: str, depth: int) -> Iterator[str]:
        nonlocal visited
        try:
            with os.scandir(directory) as entries:
                inner = [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
        except FileNotFoundError:
            return  # removed since it was listed
        except OSError:
            if unreadable is not None and os.path.basename(directory) != _OF_THE_FILESYSTEM:
                unreadable.append(directory)
            return
        for name in sorted(inner, key=natural_order):
            visited += 1
            if visited > _MAX_VISITED:
                return
            path = os.path.join(directory, name)
            if is_checkpoint(path):
                continue  # of another program: ours were listed before
            if is_run(path):
                yield path
            elif depth < _MAX_DEPTH:
                yield from look(path, depth + 1)

    return look(where, 1)


def is_run(directory: str) -> bool:
    """Whether a directory holds checkpoints, or the events of a training."""
    try:
        return bool(
            list_steps(directory)
            or os.path.exists(os.path.join(directory, EVENTS_NAME))
            or inner_checkpoints(directory)
        )
    except (OSError, CheckpointNotFound):
        return False


def _run_entry(path: str) -> ListedRun:
    inside = checkpoints_inside(path)
    steps = list_steps(path)
    entries = [entry_of(found, None) for found in inside if not is_step_name(os.path.basename(found))]
    newest: ListedCheckpoint | None
    if steps:
        newest = entry_of(os.path.join(path, step_name(steps[-1])), steps[-1])
    else:
        newest = max(entries, key=lambda entry: entry.created or 0.0, default=None)
    return ListedRun(path, len(inside), sum(map(directory_nbytes, inside)), newest)


def _steps(run: str) -> dict[int, str]:
    """Every entry with the name of a checkpoint, oldest first, even if it is not one."""
    require_reachable(run)
    with reading(run):
        try:
            names = os.listdir(run)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise no_run(run) from error
    return {
        int(name.removeprefix("step-")): os.path.join(run, name)
        for name in sorted(names)
        if is_step_name(name)
    }


def leftovers(run: str) -> tuple[Leftover, ...]:
    found = []
    with reading(run):
        names = sorted(os.listdir(run))
    for name in names:
        match = _LEFTOVER.fullmatch(name)
        if match is not None:
            path = os.path.join(run, name)
            found.append(Leftover(name, path, match[1], directory_nbytes(path)))
    return tuple(found)


def directory_nbytes(path: str) -> int:
    """Bytes of the files in a checkpoint's directory; 0 if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0


def entry_of(path: str, step: int | None) -> ListedCheckpoint:
    """The checkpoint at a path, even a damaged one. `step` is the one in its name."""
    nbytes = directory_nbytes(path)
    try:
        with open_checkpoint(path) as checkpoint:
            damage = _visible_damage(checkpoint)
            known = _contents(checkpoint)
            return ListedCheckpoint(
                os.path.basename(path),
                path,
                checkpoint.step,
                nbytes + (known[1] if known else 0),
                checkpoint.created,
                known[0] if known else None,
                checkpoint.metrics,
                damage,
            )
    except (CorruptCheckpoint, ReadFailed, CheckpointNotFound) as error:
        return ListedCheckpoint(os.path.basename(path), path, step, nbytes, damage=reason_of(error))


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


def _contents(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """The number of leaves, and the bytes that lie on other volumes. None when a rank's part is damaged."""
    try:
        elsewhere = sum(file.nbytes for part in checkpoint._parts for file in part.files if file.volume)
        return len(checkpoint), elsewhere
    except (CorruptCheckpoint, ReadFailed):
        return None


def _visible_damage(checkpoint: Checkpoint) -> str | None:
    problem = visible_damage(checkpoint)
    return None if problem is None else f"{os.path.basename(problem.file)}: {problem.reason}"
