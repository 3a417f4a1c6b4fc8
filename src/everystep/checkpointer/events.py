"""What happened in a run, as records: a JSON line each in ``run/events.jsonl``, and a call of subscribers.

Owns the records, the file they are appended to, and reading it back. The file is a diary, not part of any
checkpoint: nothing syncs it, and no failure to write it fails a save.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, BinaryIO, TypeAlias, overload

import msgspec
from msgspec import Meta, Struct

from everystep.caller import stack_level
from everystep.engine import forks, fs
from everystep.engine.fs import OpenDirectory
from everystep.format.manifest import spell_metrics
from everystep.paths import local_path
from everystep.store.read.listing import no_run
from everystep.store.read.read_errors import reading

EVENTS_NAME = "events.jsonl"
OLDER_NAME = "events.1.jsonl"
MAX_LOG_NBYTES = 64 << 20
"""A log of this size makes way for a new one; one older generation stays beside it."""
MAX_LINE_NBYTES = 64 << 10
_MAX_TEXT = 4000
_RECENT = 1000


Seconds: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Bounds for what is read: a line beyond them is no event, and no sum of events overflows."""


class Phases(Struct, frozen=True):
    """Seconds of one save.

    `stage`: taking the state apart and copying what must not be read in place, on the training's thread.
    `write`: bytes to the device. `sync`: until they are durable. `commit`: manifest, rename, the directory's
    sync, retention.
    """

    stage: Seconds
    write: Seconds
    sync: Seconds
    commit: Seconds

    @property
    def total(self) -> float:
        return self.stage + self.write + self.sync + self.commit


class _Record(Struct, frozen=True, tag_field="event"):
    """`time` is that of the wall clock, in seconds since 1970."""


class Opened(_Record, frozen=True, tag="opened"):
    """A training opened the run for writing."""

    time: Seconds
    pid: int
    host: str
    mode: str
    every: int | str


class Saved(_Record, frozen=True, tag="saved"):
    """A checkpoint became durable.

    `nbytes` is the state's size, `stored_nbytes` what the files take. Of the state, `in_place_nbytes` were
    read where they lie and `copied_nbytes` were copied first. `stall_seconds`: how long training waited.
    `metrics`: as given to `save`. They stay here when the checkpoint is removed.
    """

    step: Count
    time: Seconds
    mode: str
    nbytes: Count
    stored_nbytes: Count
    leaves: Count
    seconds: Phases
    stall_seconds: Seconds
    in_place_nbytes: Count = 0
    copied_nbytes: Count = 0
    metrics: dict[str, float] = {}

    @property
    def gb_per_second(self) -> float:
        """Decimal gigabytes of state made durable per second, all phases counted; 0 when no time passed."""
        return self.nbytes / self.seconds.total / 1e9 if self.seconds.total > 0 else 0.0


class Failed(_Record, frozen=True, tag="failed"):
    """A save did not become durable. `error` is the name of the exception's type."""

    step: Count
    time: Seconds
    mode: str
    error: str
    message: str
    stall_seconds: Seconds = 0.0


class Restored(_Record, frozen=True, tag="restored"):
    """Training resumed from a checkpoint."""

    step: Count
    time: Seconds
    nbytes: Count
    seconds: Seconds


class PassedOver(_Record, frozen=True, tag="passed_over"):
    """A damaged checkpoint that restoring left aside for an older one."""

    step: Count
    time: Seconds
    reason: str


class Preempted(_Record, frozen=True, tag="preempted"):
    """A signal asked the training to end; its last step is saved. `signal` is its name."""

    step: Count
    time: Seconds
    signal: str


class ShortOfSpace(_Record, frozen=True, tag="short_of_room"):
    """The device has not enough space for all checkpoints that `Keep` wants and the one being written.

    These are `wanted` checkpoints of about `needed_nbytes` each, of which `fit` fit. `free_nbytes` are free.
    """

    step: Count
    time: Seconds
    needed_nbytes: Count
    free_nbytes: Count
    wanted: Count
    fit: Count


class RemovedEarly(_Record, frozen=True, tag="gave_up"):
    """Checkpoints that `Keep` wanted were removed, so that there is space for the one of `step`."""

    step: Count
    time: Seconds
    steps: tuple[Count, ...]


Event: TypeAlias = Opened | Saved | Failed | Restored | PassedOver | Preempted | ShortOfSpace | RemovedEarly
Callback: TypeAlias = Callable[[Event], object]

_encoder = msgspec.json.Encoder()
# Not strict: a metric that is not finite is spelled out, as in manifests.
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event, strict=False)


class _Subscription:
    """Equal to itself only: a function subscribed twice is called twice, and each can be ended."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.name = getattr(callback, "__qualname__", None) or repr(callback)


class EventLog:
    """Appends events to a run's log, keeps the latest 1000, and calls subscribers. For any thread.

    With None for a run there is no file. `broken` is the last failure to write: lines are missing since. A
    forked child inherits what is remembered, and adds nothing.

    >>> log = EventLog(None)
    >>> unsubscribe = log.subscribe(lambda event: print(event.step))
    >>> log.add(Restored(step=7, time=0.0, nbytes=1000, seconds=0.5))
    7
    >>> len(log), log[-1].seconds
    (1, 0.5)
    """

    def __init__(self, run: str | os.PathLike[str] | None, directory: OpenDirectory | None = None) -> None:
        """`directory`: the run's, where its writer holds it open."""
        self.path = None if run is None else os.path.join(os.fspath(run), EVENTS_NAME)
        self._directory = directory
        self.broken: Exception | None = None
        self._forks = forks()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=_RECENT)
        self._subscriptions: list[_Subscription] = []
        self._file: int | None = None
        self._nbytes = 0
        self._torn = False
        self._closed = False

    def add(self, event: Event) -> None:
        """Never raises because of the file or of a subscriber."""
        if forks() != self._forks:
            return  # before the lock: another thread may have held it at the fork
        first_failure = None
        with self._lock:
            self._events.append(event)
            subscriptions = tuple(self._subscriptions)
            if self.path is not None and not self._closed:
                try:
                    self._write(_line(event))
                except Exception as error:  # whatever it is, the save that the event reports has happened
                    first_failure = error if self.broken is None else None
                    self.broken = error
        # Outside the lock: a subscriber may use the log.
        if first_failure is not None:
            warn(f"events are not written to {self.path}: {first_failure}. Saves go on; this is said once")
        for subscription in subscriptions:
            try:
                subscription.callback(event)
            except Exception as error:
                who, what = subscription.name, f"{type(error).__name__}: {error}"
                warn(f"the subscriber {who} failed on {type(event).__name__}, {what}. Saves go on")

    def observe(self, moment: object) -> None:
        """Adds a moment of the run if it is an event (`run_observer`)."""
        if isinstance(moment, Event):
            self.add(moment)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback` with every event from now on, in the thread that adds it.

        Returns:
            A function that ends the subscription.
        """
        subscription = _Subscription(callback)
        with self._guard():
            self._subscriptions.append(subscription)

        def unsubscribe() -> None:
            with self._guard():
                if subscription in self._subscriptions:
                    self._subscriptions.remove(subscription)

        return unsubscribe

    def close(self) -> None:
        """Closes the file. Events stay in memory, and subscribers are still called."""
        with self._guard():
            self._closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._recent())

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return self._recent()[index]

    def _recent(self) -> list[Event]:
        with self._guard():
            return list(self._events)

    def _guard(self) -> AbstractContextManager[object]:
        # In a forked child only one thread is left, and the lock may be one that another held at the fork.
        return self._lock if forks() == self._forks else nullcontext()

    def _write(self, line: bytes) -> None:
        file = self._open()
        if self._nbytes >= MAX_LOG_NBYTES:
            file = self._rotate(file)
        if self._torn:
            line = b"\n" + line
        written = os.write(file, line)
        self._nbytes += written
        # What a full disk cut short is ended by the next line's first byte.
        self._torn = written < len(line)
        if self._torn:
            raise OSError(f"only {written} of {len(line)} bytes were written; is the disk full?")

    def _open(self) -> int:
        if self._file is None:
            assert self.path is not None
            # Also for reading: the last byte shows whether a crash left half a line.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            file = fs.open_regular(self._place(EVENTS_NAME), self._number(), flags)
            try:
                found = os.fstat(file)
                self._torn = found.st_size > 0 and os.pread(file, 1, found.st_size - 1) != b"\n"
            except BaseException:
                os.close(file)
                raise
            self._nbytes = found.st_size
            self._file = file
        return self._file

    def _rotate(self, file: int) -> int:
        at = self._place if self._directory is None else self._directory.at
        fs.rename(at(EVENTS_NAME), at(OLDER_NAME))
        self._file = None
        os.close(file)
        return self._open()

    def _place(self, name: str) -> str:
        """The path of a file, or its name in the directory that is held."""
        assert self.path is not None
        return os.path.join(os.path.dirname(self.path), name) if self._directory is None else name

    def _number(self) -> int | None:
        return None if self._directory is None else self._directory.fileno()


def read_events(run: str | os.PathLike[str]) -> tuple[list[Event], int]:
    """All events of a run, oldest first, and how many lines were passed over.

    Passed over is what is no event of this version: lines torn by a crash, of another program, too long.
    """
    run = local_path(run)
    if not os.path.isdir(run):
        raise no_run(run)
    events: list[Event] = []
    skipped = 0
    # The newer one first: were the log rotated in between, it would be the older one, not be missed.
    with _opened(run, EVENTS_NAME) as newer, _opened(run, OLDER_NAME) as older:
        same = os.path.sameopenfile(newer.fileno(), older.fileno())
        for file in (newer,) if same else (older, newer):
            for line in _lines(file):
                try:
                    if line is None:
                        raise ValueError("too long")
                    events.append(_decoder.decode(line))
                except (ValueError, RecursionError):
                    skipped += 1
    return events, skipped


def _opened(run: str | os.PathLike[str], name: str) -> BinaryIO:
    path = os.path.join(run, name)
    with reading(path):
        try:
            return open(path, "rb", opener=lambda name, flags: fs.open_regular(name, None, flags))
        except FileNotFoundError:
            return open(os.devnull, "rb")


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines that are not empty; None in the place of one that is too long to be an event."""
    while piece := file.readline(MAX_LINE_NBYTES + 1):
        if len(piece) <= MAX_LINE_NBYTES or piece.endswith(b"\n"):
            if piece.strip():
                yield piece
            continue
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE_NBYTES)
        yield None


def _line(event: Event) -> bytes:
    if isinstance(event, Saved) and not all(map(math.isfinite, event.metrics.values())):
        event = msgspec.structs.replace(event, metrics=spell_metrics(event.metrics))
    try:
        line = _encoder.encode(event)
    except UnicodeEncodeError:
        line = b""  # a path that is not UTF-8 in an error's message
    if not line or len(line) >= MAX_LINE_NBYTES:
        texts = {
            name: value.encode("utf-8", "backslashreplace").decode()[:_MAX_TEXT]
            for name in event.__struct_fields__
            if isinstance(value := getattr(event, name), str)
        }
        short = msgspec.structs.replace(event, **texts)
        if isinstance(short, Saved):
            short = msgspec.structs.replace(short, metrics={})
        line = _encoder.encode(short)
    return line + b"\n"


def warn(message: str) -> None:
    """Warns of something that must not fail a save."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=stack_level())
    except RuntimeWarning:
        # Warnings are errors in this process; here that would fail a save that has succeeded.
        print(f"everystep: {message}", file=sys.stderr)
