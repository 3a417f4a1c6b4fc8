"""Whether the device has space for the next checkpoint, and which old ones are removed when it has not.

A run needs space for the checkpoints that `Keep` wants and for the one being written. If the device has less,
the first save warns once, with numbers. Every save looks at the free space before it begins. If that does not
suffice, it removes what safety does not need: first the files of retired checkpoints, then the oldest ones
that only ``Keep(last=...)`` wants. The newest durable one stays, and so do those that ``every``, ``best`` and
``seconds`` keep for good. This happens before the save begins, because a save cannot be tried again: once it
has begun, training may change what would have to be read a second time.
"""

from __future__ import annotations

import errno
import time

from everystep.checkpointer.events import RemovedEarly, ShortOfSpace, warn
from everystep.checkpointer.keep import Keep
from everystep.checkpointer.retention import Retention
from everystep.checkpointer.run_observer import RunObservers
from everystep.errors import SaveFailed, StorageFull
from everystep.store import WritableRun

_EXTRA_NBYTES = 8 << 10
"""Of a checkpoint whose size is not known yet: headers, manifest, the ends of blocks."""
_FEW_FILES = 64


class FreeSpace:
    """The free space for one run, on the process that writes to it."""

    def __init__(self, run: WritableRun, keep: Keep, retention: Retention, observers: RunObservers) -> None:
        self._run = run
        self._keep = keep
        self._retention = retention
        self._observers = observers
        self._nbytes: int | None = None
        self._refused: int | None = None
        self._warned = False

    @property
    def knows_size(self) -> bool:
        """Whether an earlier save has shown how large a checkpoint is."""
        return self._nbytes is not None

    def make(self, step: int, nbytes: int) -> None:
        """Makes space for a save. `nbytes`: the size of its arrays, unless `knows_size`."""
        try:
            free, files = self._run.free()
        except OSError:
            return  # the save is about to meet the same error, and raises it
        first = self._nbytes is None
        needed = nbytes + _EXTRA_NBYTES if self._nbytes is None else self._nbytes
        if first:
            self._nbytes = needed
            self._warn_of_shortage(step, free, needed)
        refused, self._refused = self._refused, None
        # The ends of blocks, and what the file system notes down; more where that did not suffice.
        needed += (needed >> 6) + (16 << 10) if refused is None else (needed >> 3) + (1 << 20)
        # A quota is not in the numbers, but the device has said so.
        if free >= needed and files >= _FEW_FILES and refused != errno.EDQUOT:
            return
        self._remove_some(step, needed, at_least=1 if refused == errno.EDQUOT or files < _FEW_FILES else 0)

    def used(self, stored_nbytes: int) -> None:
        """A checkpoint is durable; its files have `stored_nbytes` bytes."""
        self._nbytes = stored_nbytes

    def failed(self, error: BaseException) -> None:
        """A save has failed; the next one makes more space if it failed for lack of it."""
        self._refused = error.errno if isinstance(error, StorageFull) else None

    def _remove_some(self, step: int, needed: int, *, at_least: int) -> None:
        gone: list[int] = []
        try:
            available = self._run.available_nbytes()
            for candidate in self._retention.dispensable():
                if available >= needed and len(gone) >= at_least:
                    break
                self._retention.remove_early(candidate)
                gone.append(candidate)
                available = self._run.available_nbytes()
        except SaveFailed as error:
            warn(f"could not make space for step {step}: {error}")
        if not gone:
            return
        self._observers.tell(RemovedEarly(step, time.time(), tuple(gone)))
        if not self._warned:
            self._warned = True
            last = self._keep.last
            some = f"step {gone[0]} was" if len(gone) == 1 else f"steps {', '.join(map(str, gone))} were"
            warn(
                f"the device has no space for step {step} beside all that Keep(last={last}) wants in "
                f"{self._run.path}: {some} removed for it. From now on fewer than {last} are kept while a "
                "save is under way; the newest durable one always stays. Free space, or keep fewer. (This "
                "warning comes once; events.jsonl has every case)"
            )

    def _warn_of_shortage(self, step: int, free: int, needed: int) -> None:
        best = 0 if self._keep.best is None else self._keep.best[2]
        wanted = self._keep.last + best + 1
        there = self._retention.count
        missing = max(0, wanted - there) * needed
        if free >= missing:
            return
        fit = there + free // needed
        self._observers.tell(ShortOfSpace(step, time.time(), needed, free, wanted, fit))
        warn(
            f"the run {self._run.path} needs space for {wanted} checkpoints of about {_size(needed)}: "
            f"{wanted - 1} that Keep wants, and the one being written. There is space for {fit}: "
            f"{_size(missing)} more are needed, {_size(free)} are free. Free space, or keep fewer "
            "(Keep(last=...)). Otherwise the oldest are removed when the device is full, and fewer are kept"
        )


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"
