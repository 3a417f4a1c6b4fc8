"""A run as a page shows it, read again and again while a training goes on.

Checkpoints are immutable, so what was read of one is kept as long as its directory stays the same.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from everystep.checkpointer.events import EVENTS_NAME, OLDER_NAME, Event, read_events
from everystep.checkpointer.keep import recorded_rules
from everystep.errors import CheckpointNotFound, EverystepError
from everystep.inspect.event_summary import EventSummary, summarize_events
from everystep.inspect.run_listing import (
    Leftover,
    ListedCheckpoint,
    checkpoints_inside,
    entry_of,
    is_gone,
    leftovers,
    reason_of,
)
from everystep.store import VerifyReport, is_checkpoint, resolve
from everystep.store.names import is_step_name
from everystep.store.read.checkpoint import open_any
from everystep.view.budget import Budget
from everystep.view.contents import Contents, contents, samples_of
from everystep.view.disks import Disk, disks, volume_of
from everystep.view.leaf_changes import Changes, leaf_changes
from everystep.view.leaf_samples import LeafSample
from everystep.view.timeline import Timeline, timeline
from everystep.view.words import shown_path

MAX_CHECKPOINTS = 2_000


@dataclass(frozen=True, slots=True)
class Check:
    """A checkpoint of which every byte was read."""

    name: str
    nbytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment.

    Attributes:
        name: A short name that tells it from the other runs on the page.
        path: The run.
        now: Unix time of that moment.
        is_there: False if the run was there before and cannot be found any more.
        being_written: Whether a training has it open; None if that cannot be told from this machine.
        origin: Unix time of the first event. While it stays the same, events are only added at the end.
        first_event: The number of the first event in `timeline`.
        skipped_lines: Lines of the log that a crash has torn, or another version has written.
        summary: What the events add up to; None without events.
        timeline: The events from `first_event` on.
        checkpoints: The newest checkpoints.
        all_checkpoints: How many there are.
        leftovers: Unfinished saves and retired checkpoints.
        disks: The filesystems below the run and its volumes.
        checks: What a full check has found, if there was one.
        problems: What could not be read, and why.
        best: The metric by which the run keeps its best checkpoints, and whether low or high is good.
    """

    name: str
    path: str
    now: float
    is_there: bool
    being_written: bool | None
    origin: float | None
    first_event: int
    skipped_lines: int
    summary: EventSummary | None
    timeline: Timeline
    checkpoints: tuple[ListedCheckpoint, ...]
    all_checkpoints: int
    leftovers: tuple[Leftover, ...]
    disks: tuple[Disk, ...]
    checks: tuple[Check, ...]
    problems: tuple[str, ...]
    best: tuple[str, Literal["min", "max"]] | None = None


@dataclass(slots=True)
class _Log:
    signature: object
    timeline: Timeline
    summary: EventSummary | None
    origin: float | None
    skipped: int
    problem: str | None


@dataclass(slots=True)
class _Known:
    """A checkpoint as it was found. `volumes`: its bytes on each volume; None: not asked yet."""

    signature: object
    entry: ListedCheckpoint
    volumes: Mapping[str, int] | None = None


@dataclass(slots=True)
class RunReader:
    """Reads a run, or a single checkpoint of any system that can be read. For any thread."""

    path: str
    name: str
    checks: tuple[Check, ...] = ()
    _log: _Log | None = None
    _known: dict[str, _Known] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def view(self, *, origin: float | None = None, first_event: int = 0) -> RunView:
        """The run now. Events before `first_event` are left out if the log still has the same `origin`.

        Raises `everystep.CheckpointNotFound` if there never was such a directory. If it was removed
        meanwhile, the view has the events that were read before.
        """
        with self._lock:
            problems: list[str] = []
            is_there = True
            try:
                os.lstat(self.path)
                log = self._events()
            except OSError as error:
                if self._log is None:
                    raise self._unseen(error) from None
                log, is_there = self._log, False
                problems.append(
                    f"The run cannot be found any more: {error.strerror}. This is what was read before."
                )
            if log.problem is not None:
                problems.append(log.problem)
            found = self._checkpoints(problems)
            volumes = _volumes(found[-1]) if found else {}
        entries = [known.entry for known in found]
        thinned = log.timeline.all_saves > len(log.timeline.saves)
        if thinned or origin != log.origin or not 0 <= first_event <= log.timeline.events:
            first_event = 0
        shown = log.timeline.since(first_event) if first_event else log.timeline
        is_directory = os.path.isdir(self.path)
        own_nbytes = max(entries[-1].nbytes - sum(volumes.values()), 0) if entries else 0
        return RunView(
            name=self.name,
            path=shown_path(self.path),
            now=time.time(),
            is_there=is_there,
            being_written=_is_being_written(self.path, log.timeline),
            origin=log.origin,
            first_event=first_event,
            skipped_lines=log.skipped,
            summary=log.summary,
            timeline=shown,
            checkpoints=tuple(map(_shown, entries[-MAX_CHECKPOINTS:])),
            all_checkpoints=len(entries),
            leftovers=tuple(map(_shown, leftovers(self.path) if is_directory else ())),
            disks=disks(self.path, own_nbytes, volumes),
            checks=self.checks,
            problems=tuple(problems),
            best=_best(self.path),
        )

    def contents(self, name: str, *, budget: Budget | None = None) -> Contents:
        """What a checkpoint of this run holds, by the name that `view` gave it."""
        return contents(self._path_of(name), budget=budget)

    def samples(self, name: str, places: list[int], *, budget: Budget) -> dict[int, LeafSample | None]:
        return samples_of(self._path_of(name), places, budget=budget)

    def changes(self, a: str, b: str, *, budget: Budget) -> Changes:
        return leaf_changes(self._path_of(a), self._path_of(b), budget=budget)

    def note_reports(self, reports: tuple[VerifyReport, ...]) -> None:
        """Keeps what a full check has found, to show it."""
        self.checks = tuple(
            Check(
                _name(report.path),
                report.nbytes,
                tuple(f"{os.path.basename(problem.file)}: {problem.reason}" for problem in report.problems),
            )
            for report in reports
        )

    def _path_of(self, name: str) -> str:
        """Only names that were found lead to a file: no request reaches another part of the disk."""
        with self._lock:
            if name not in self._known:
                self._checkpoints([])
            known = self._known.get(name)
        if known is None or is_gone(known.entry.path):
            raise CheckpointNotFound(f"{name} is not a checkpoint of this run (any more)")
        return known.entry.path

    def _unseen(self, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            return CheckpointNotFound(f"there is no run at {self.path}")
        return error

    def _events(self) -> _Log:
        signature = tuple(_identity(os.path.join(self.path, name)) for name in (EVENTS_NAME, OLDER_NAME))
        if self._log is not None and self._log.signature == signature:
            return self._log
        events: list[Event] = []
        skipped, problem = 0, None
        if os.path.isdir(self.path):
            try:
                events, skipped = read_events(self.path)
            except (EverystepError, OSError) as error:
                problem = f"{EVENTS_NAME} cannot be read: {error}"
        self._log = _Log(
            signature,
            timeline(events),
            summarize_events(events) if events else None,
            events[0].time if events else None,
            skipped,
            problem,
        )
        return self._log

    def _checkpoints(self, problems: list[str]) -> list[_Known]:
        try:
            if is_checkpoint(self.path):
                paths = [resolve(self.path)]
            elif os.path.isdir(self.path):
                # The run's own checkpoints come last, so the newest one is the last of all.
                paths = sorted(checkpoints_inside(self.path), key=lambda path: is_step_name(_name(path)))
            else:
                paths = []
            paths = paths or self._foreign()
        except (EverystepError, OSError) as error:
            problems.append(f"the checkpoints cannot be listed: {reason_of(error)}")
            paths = []
        found: dict[str, _Known] = {}
        for path in paths:
            name = _name(path)
            signature, known = _identity(path), self._known.get(name)
            if signature is None:  # retention has removed it
                continue
            found[name] = known if known and known.signature == signature else _look(path, signature)
        self._known = found
        return list(found.values())

    def _foreign(self) -> list[str]:
        """This path, if another system's checkpoint is there."""
        if os.path.exists(os.path.join(self.path, EVENTS_NAME)):
            return []
        try:
            open_any(self.path).close()
        except (EverystepError, OSError):
            return []
        return [self.path]


def _best(run: str) -> tuple[str, Literal["min", "max"]] | None:
    rules = recorded_rules(run)
    return None if rules is None or rules.best is None else rules.best[:2]


def _look(path: str, signature: object) -> _Known:
    name = os.path.basename(path)
    entry = entry_of(path, int(name.removeprefix("step-")) if is_step_name(name) else None)
    if entry.leaves is None and entry.step is None:
        entry = _foreign_entry(path) or entry
    return _Known(signature, entry)


def _foreign_entry(path: str) -> ListedCheckpoint | None:
    try:
        with open_any(path) as checkpoint:
            nbytes, created = checkpoint.stored_nbytes, checkpoint.created
            return ListedCheckpoint(
                os.path.basename(path),
                path,
                checkpoint.step,
                nbytes,
                created,
                len(checkpoint),
                checkpoint.metrics,
            )
    except (EverystepError, OSError):
        return None


def _volumes(known: _Known) -> Mapping[str, int]:
    if known.volumes is None:
        found: dict[str, int] = {}
        try:
            with open_any(known.entry.path) as checkpoint:
                for part in checkpoint._parts:
                    for file in part.files:
                        if file.volume is not None:
                            volume = volume_of(file.volume, checkpoint.id)
                            found[volume] = found.get(volume, 0) + file.nbytes
        except (EverystepError, OSError):
            found = {}  # damaged, which its entry says, or removed meanwhile
        known.volumes = found
    return known.volumes


def _shown(found: ListedCheckpoint | Leftover) -> Any:
    """The same with text that a page can hold."""
    return replace(found, name=shown_path(found.name), path=shown_path(found.path))


def _name(path: str) -> str:
    return shown_path(os.path.basename(path))


def _identity(path: str) -> object:
    """Differs when a file at this path, or one in the directory there, has changed; None if there is none."""
    try:
        found = os.stat(path)
        inside: list[tuple[str, int, int]] = []
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(path) as entries:
                for entry in entries:
                    file = entry.stat(follow_symlinks=False)
                    inside.append((entry.name, file.st_size, file.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, tuple(sorted(inside))


def _is_being_written(run: str, known: Timeline) -> bool | None:
    """Whether the kernel lists a writer's lock on the run. Trying the lock could make a training fail."""
    try:
        directory = os.stat(run)
        with open("/proc/locks", encoding="ascii", errors="replace") as lines:
            for line in lines:
                # 1: FLOCK  ADVISORY  WRITE 4711 08:02:123456 0 EOF
                words = line.replace("->", "").split()
                is_writer = words[1:2] == ["FLOCK"] and words[3] == "WRITE"
                if is_writer and int(words[5].rpartition(":")[2]) == directory.st_ino:
                    return True
    except (OSError, ValueError, IndexError):
        return None
    return False if known.host is None or known.host == socket.gethostname() else None
