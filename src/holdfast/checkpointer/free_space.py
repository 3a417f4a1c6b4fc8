"""Whether the device has room for the next checkpoint, and what goes when it has not.

A run needs room for the checkpoints that `Keep` wants and for the one being written. Where that is not there,
it is said once, with numbers, at the first save. Before each save the free room is looked at. When it does
not suffice, what safety does not need is given up: first the files of retired checkpoints, then the oldest
ones that only ``Keep(last=...)`` holds. The newest durable one stays, and so do those that ``every``,
``best`` and ``seconds`` keep for good. This happens before the save begins, so nothing of it has to be tried
again: once it has begun, training may go on to change what would have to be read a second time.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from holdfast.checkpointer.events import EventLog, GaveUp, ShortOfRoom, warn
from holdfast.checkpointer.keep import Keep
from holdfast.checkpointer.retention import Retention
from holdfast.errors import SaveFailed, StorageFull
from holdfast.store import WritableRun

_EXTRA_NBYTES = 8 << 10
"""Of a checkpoint whose size is not known yet: headers, manifest, the ends of blocks."""
_FEW_FILES = 64


class FreeSpace:
    """Of one run, on the process that writes to it."""

    def __init__(self, run: WritableRun, keep: Keep, retention: Retention, events: EventLog) -> None:
        self._run = run
        self._keep = keep
        self._retention = retention
        self._events = events
        self._nbytes: int | None = None
        self._refused: int | None = None
        self._told = False

    def make(self, step: int, nbytes: Callable[[], int]) -> None:
        """Before a save; `nbytes` is the size of its arrays, for when no checkpoint has told a better one."""
        try:
            free, files = self._run.free()
        except OSError:
            return  # the save is about to meet the same, and tells of it
        first = self._nbytes is None
        needed = nbytes() + _EXTRA_NBYTES if self._nbytes is None else self._nbytes
        if first:
            self._nbytes = needed
            self._tell_shortage(step, free, needed)
        refused, self._refused = self._refused, None
        # The ends of blocks, and what the file system notes down; more where that did not suffice.
        needed += (needed >> 6) + (16 << 10) if refused is None else (needed >> 3) + (1 << 20)
        # A quota is not in the numbers, but the device has said so.
        if free >= needed and files >= _FEW_FILES and refused != errno.EDQUOT:
            return
        self._give_up(step, needed, at_least=1 if refused == errno.EDQUOT or files < _FEW_FILES else 0)

    def took(self, stored_nbytes: int) -> None:
        """A checkpoint is durable, and takes so much."""
        self._nbytes = stored_nbytes

    def failed(self, error: BaseException) -> None:
        """A save has failed; the next one is told why."""
        self._refused = error.errno if isinstance(error, StorageFull) else None

    def _give_up(self, step: int, needed: int, *, at_least: int) -> None:
        gone: list[int] = []
        try:
            room = self._run.room()
            for candidate in self._retention.dispensable():
                if room >= needed and len(gone) >= at_least:
                    break
                self._retention.give_up(candidate)
                gone.append(candidate)
                room = self._run.room()
        except SaveFailed as error:
            warn(f"no room could be made for step {step}: {error}")
        if not gone:
            return
        self._events.add(GaveUp(step, time.time(), tuple(gone)))
        if not self._told:
            self._told = True
            last = self._keep.last
            some = f"step {gone[0]} was" if len(gone) == 1 else f"steps {', '.join(map(str, gone))} were"
            warn(
                f"no room for step {step} beside all that Keep(last={last}) wants in {self._run.path}: "
                f"{some} given up for it. From now on fewer than {last} are kept while a save is under way; "
                "the newest durable one always stays. Free space, or keep fewer. (This is said once; "
                "events.jsonl has every case)"
            )

    def _tell_shortage(self, step: int, free: int, needed: int) -> None:
        best = 0 if self._keep.best is None else self._keep.best[2]
        wanted = self._keep.last + best + 1
        there = self._retention.count
        missing = max(0, wanted - there) * needed
        if free >= missing:
            return
        fit = there + free // needed
        self._events.add(ShortOfRoom(step, time.time(), needed, free, wanted, fit))
        warn(
            f"the run {self._run.path} needs room for {wanted} checkpoints of about {_size(needed)}: "
            f"{wanted - 1} that Keep wants, and the one being written. There is room for {fit}: "
            f"{_size(missing)} more are needed, {_size(free)} are free. Free space, or keep fewer "
            "(Keep(last=...)). Otherwise the oldest are given up when the device is full, and fewer are kept"
        )


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"
