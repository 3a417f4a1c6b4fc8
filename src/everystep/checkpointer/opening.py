"""Opening a run for a Checkpointer: its arguments, its ranks, the run itself, and what the run holds.

The coordinator opens the run and tells the other ranks where it is and what it holds. All ranks open it, or
none does. A `RunContext` is what the saves and restores of a Checkpointer share afterwards.
"""

from __future__ import annotations

import gc
import operator
import os
import socket
import time
import weakref
from dataclasses import dataclass
from typing import Literal, get_args

from everystep.checkpointer import drilling
from everystep.checkpointer.announced_changes import AnnouncedChanges
from everystep.checkpointer.events import EventLog, Opened
from everystep.checkpointer.free_space import FreeSpace
from everystep.checkpointer.guard import ObservedChanges
from everystep.checkpointer.keep import Keep, Kept
from everystep.checkpointer.retention import Retention, history
from everystep.checkpointer.run_observer import Opening, RunObservers
from everystep.checkpointer.schedule import Schedule, make_schedule
from everystep.checkpointer.staging import Staging
from everystep.engine import forks
from everystep.errors import CheckpointExists, Locked
from everystep.paths import local_path
from everystep.store import (
    FollowedRun,
    Options,
    RankGroup,
    WritableRun,
    checked_options,
    is_checkpoint,
    list_steps,
)
from everystep.store.api import refuse_reference
from everystep.store.commit.volumes import Ledger
from everystep.store.locks import path_to_read
from everystep.store.ranks.group import ProcessGroup

Mode = Literal["overlap", "snapshot", "sync"]
OnError = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the user gave a Checkpointer, checked; `Checkpointer` says what each means."""

    run: str | os.PathLike[str]
    every: int | str
    keep: Keep | None
    mode: Mode
    options: Options | None
    budget: float
    mtbf: float | str | None
    on_error: OnError
    timeout: float
    start_over: bool
    process_group: ProcessGroup

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {self.mode!r}")
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error must be 'raise' or 'warn', not {self.on_error!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive seconds, not {self.timeout!r}")
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise TypeError(f"keep must be a Keep, such as everystep.Keep(last=3), not {self.keep!r}")
        checked_options(self.options)

    def schedule(self) -> Schedule:
        return make_schedule(self.every, budget=self.budget, mtbf=self.mtbf)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Lives as long as its Checkpointer."""

    group: RankGroup
    run: WritableRun | FollowedRun
    ledger: Ledger | None
    """Only for a run whose shards go to volumes, on the coordinator."""
    retention: Retention
    free_space: FreeSpace | None
    """None on ranks other than the coordinator, and for runs whose shards go to volumes."""
    staging: Staging
    announced: AnnouncedChanges
    observed: ObservedChanges
    schedule: Schedule
    observers: RunObservers
    events: EventLog
    """It is one of the observers."""


def open_context(given: Arguments, state: object, announced: AnnouncedChanges) -> RunContext:
    """Joins the other ranks and opens the run. Leaves nothing open when that fails."""
    options = given.options or Options()
    schedule = given.schedule()
    observers = RunObservers()
    path = local_path(given.run)
    settings = drilling.without_volumes(options.write_settings())
    group = RankGroup.gather(f"Checkpointer of {path}", given.process_group, settings, given.timeout)
    run: WritableRun | FollowedRun = FollowedRun(path)
    try:
        known: list[Kept] = []
        held: list[int] = []
        drill = drilling.join(path) if group.is_coordinator else None
        if drill is not None:
            observers.add(drill)
        with group.all_or_none():
            if group.is_coordinator:
                observers.tell(Opening())
                run = open_run(drill.path if drill else path)
                inside = path_to_read(run.directory)
                held, known = list_steps(inside), history(inside)
            if given.mode == "overlap" and state is not None:
                announced.attach(state)
        where, known, held, start_over = group.broadcast(
            (os.fsencode(run.path), known, held, given.start_over),
            tuple[bytes, list[Kept], list[int], bool],
        )
        if not group.is_coordinator:
            run = FollowedRun(os.fsdecode(where))
        keep, directory = given.keep or Keep(), run.directory
        ledger = run.ledger if isinstance(run, WritableRun) and group.has_volumes else None
        retention = Retention(run, keep, known, ledger, found=held, start_over=start_over)
        events = EventLog(run.path if group.is_coordinator else None, directory)
        observers.add(events)
        free_space = None
        if isinstance(run, WritableRun) and not group.has_volumes:
            free_space = FreeSpace(run, keep, retention, observers)
        every = given.every if isinstance(given.every, str) else operator.index(given.every)
        observers.tell(Opened(time.time(), os.getpid(), socket.gethostname(), given.mode, every))
    except BaseException:
        run.close()
        group.close()
        raise
    return RunContext(
        group=group,
        run=run,
        ledger=ledger,
        retention=retention,
        free_space=free_space,
        staging=Staging(options.snapshot_nbytes),
        announced=announced,
        observed=ObservedChanges(),
        schedule=schedule,
        observers=observers,
        events=events,
    )


_open: weakref.WeakKeyDictionary[object, tuple[WritableRun, int]] = weakref.WeakKeyDictionary()
"""Checkpointer -> its run, and `forks` at that time: a forked child holds none of its parent's."""


def open_run(path: str) -> WritableRun:
    """Opens a run for writing. `Locked` names the Checkpointer of this process that has it open."""
    refuse_reference(path)
    if is_checkpoint(path):
        # Steps inside a checkpoint would never be found: readers of that path mean the checkpoint.
        raise CheckpointExists(
            f"{path} is a checkpoint, not a run of them: give the Checkpointer a directory of its own. "
            "(everystep.load restores from a single checkpoint)"
        )
    try:
        return WritableRun(path)
    except Locked as error:
        if not _holders(path):
            raise
        gc.collect()  # a Checkpointer that nothing but a cycle refers to gives its lock back
        holders = _holders(path)
        if holders:
            raise Locked(
                f"run {path} is open for writing in this process already, by {holders[0]!r}. Close that one "
                "first. In a notebook whose cell ran before: call close() on the old Checkpointer, as in "
                "`ckpt.close()`, before you make a new one; or use `with everystep.Checkpointer(...) as "
                "ckpt:`, which closes it by itself"
            ) from error
    return WritableRun(path)


def register(checkpointer: object, run: WritableRun) -> None:
    """Notes that the Checkpointer holds the run, until it closes it."""
    _open[checkpointer] = run, forks()


def _holders(path: str) -> list[object]:
    real, here = os.path.realpath(path), forks()
    return [
        holder
        for holder, (run, forked) in _open.items()
        if forked == here and run.is_open and os.path.realpath(run.path) == real
    ]
