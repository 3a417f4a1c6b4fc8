"""A save between DCP's calls: where it writes, and what happens if DCP does not call again.

When a rank fails, DCP raises on all ranks without telling the storage. The coordinator then aborts its save
when its writer is used again or garbage-collected, or when another save to the same path begins. If its
process dies first, the next save to that path removes the leftovers.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from everystep import engine
from everystep.engine import Tuning, fs
from everystep.engine.fs import OpenDirectory
from everystep.errors import Locked, SaveFailed
from everystep.format.records import Part
from everystep.store.commit.driver import Commit
from everystep.store.commit.transaction import Transaction
from everystep.store.locks import require_current
from everystep.store.names import PARTIAL


class DcpSave:
    """One save of this process. The coordinator's has the directory; other ranks know where it must be."""

    def __init__(self, target: str, *, overwrite: bool, is_coordinator: bool) -> None:
        self.target = target
        self.overwrite = overwrite
        self.is_coordinator = is_coordinator
        self.parent: OpenDirectory | None = None
        """The one that the checkpoint goes to, from when this process has first seen it."""
        self.part: Part | None = None
        """What the coordinator itself has written."""
        self.transaction: Transaction | None = None
        self.commit: Commit | None = None
        self.thread = threading.get_ident()
        """DCP makes all calls of one save in one thread."""
        self._forks = engine.forks()
        self._at_work = False
        with _lock:
            other = _saves.get(target)
            if other is not None and other._forks == self._forks and other._at_work:
                raise Locked(f"this process is already saving to {target}; wait for that save")
            _saves[target] = self
        if other is not None:
            other.abort()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the coordinator will make it
            self.parent = fs.open_directory(os.path.dirname(target))

    @property
    def is_at_work(self) -> bool:
        return self._at_work

    def make(self, step: int, metrics: Mapping[str, float], tuning: Tuning, id: str) -> None:
        """Makes the directory, as the coordinator."""
        parent = os.path.dirname(self.target)
        if self.parent is None:
            if not os.path.isdir(parent):
                fs.make_directories(parent)
            self.parent = fs.open_directory(parent)
        transaction = Transaction(self.target, self.parent, overwrite=self.overwrite, allow_other_files=True)
        transaction.refuse_existing()
        transaction.open()
        self.transaction = transaction
        self.commit = Commit(transaction, step, metrics, tuning, id=id)
        self.commit.begin()

    @contextmanager
    def opened(self) -> Iterator[OpenDirectory]:
        """The directory to write into. The coordinator has it; other ranks find what it has made."""
        if self.transaction is not None:
            yield self.transaction.directory
            return
        partial = self.target + PARTIAL
        try:
            if self.parent is None:
                self.parent = fs.open_directory(os.path.dirname(self.target))
            require_current(self.parent)
            directory = fs.open_directory(self.parent.at(os.path.basename(partial)), False)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SaveFailed(
                f"this rank does not see {partial}, which the coordinator created. All ranks must save to "
                "the same path in a shared file system"
            ) from error
        try:
            yield directory
        finally:
            directory.release()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While it lasts, no other save of this process may have the directory."""
        with _lock:
            if _saves.get(self.target) is not self:
                raise SaveFailed(f"another save to {self.target} has started, so this one was abandoned")
            self._at_work = True
        try:
            yield
        finally:
            self._at_work = False

    def abort(self) -> None:
        """Removes what there is, of a save that can no longer be committed. A second time does nothing."""
        self._leave(remove=True)

    def close(self) -> None:
        """After the commit."""
        self._leave(remove=False)

    def _leave(self, *, remove: bool) -> None:
        with _lock:
            if _saves.get(self.target) is self:
                del _saves[self.target]
            transaction, self.transaction = self.transaction, None
            parent, self.parent = self.parent, None
        if (
            transaction is not None and self._forks == engine.forks()
        ):  # a forked child leaves it to its parent
            if remove:
                transaction.abort()
            transaction.release()
        if parent is not None:
            parent.release()

    def belongs_to(self, owner: object) -> weakref.finalize:  # type: ignore[type-arg]
        """Aborts it when its owner goes, unless it has ended before."""
        return weakref.finalize(owner, self.abort)


_lock = threading.Lock()
_saves: dict[str, DcpSave] = {}
