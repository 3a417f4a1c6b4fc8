"""The directory in which a checkpoint comes to be, before it has its name: made or taken, held, cleaned up.

Owns step 1 of the commit protocol (`holdfast.store.commit`), and what becomes of ``D.partial`` when a later
one fails.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

from holdfast.engine import fs
from holdfast.engine.fs import HeldDirectory
from holdfast.errors import RunLocked
from holdfast.store.directories import make_directory, try_lock_directory

PARTIAL = ".partial"
_ATTEMPTS = 4
"""To make a directory whose name others take and give back meanwhile."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A retired checkpoint whose files may be written over. `synced`: their names are known to be durable."""

    path: str
    synced: bool


@dataclass(slots=True)
class Partial:
    """``D.partial`` while it is ours: from `make` to `release`.

    Not `settled`: ``D`` and ``D.partial`` have changed names, and which has which on the disk is not certain.
    Then neither may be removed: it could be the checkpoint that is to be replaced.
    """

    target: str
    spare: Spare | None
    path: str
    settled: bool = True
    recycle: bool = False
    """Whether there are files to write over."""
    _names: frozenset[str] = frozenset()
    """Those of the files to write over."""
    _lock: HeldDirectory | None = None

    def make(self) -> None:
        """Step 1. From here on it is held against others."""
        self._lock = self._take_spare()
        self.recycle = self._lock is not None
        if self._lock is not None:
            return
        for _ in range(_ATTEMPTS):
            try:
                self._lock = make_directory(self.path)
            except FileExistsError:
                self._remove_leftover()
            else:
                break
        if self._lock is None:
            raise self._locked()

    def directory_to_sync(self, ours: set[str]) -> str | None:
        """Removes what is not `ours` from files to write over. None when the names of these are durable."""
        if not self.recycle:
            return self.path
        for name in self._names - ours:
            fs.unlink(os.path.join(self.path, name))
        assert self.spare is not None
        return None if self._names == ours and self.spare.synced else self.path

    def remove(self) -> None:
        """After a failure. What cannot be removed now is swept by the next writer."""
        if self._lock is not None and self.settled:
            with contextlib.suppress(OSError):  # the failure to report is the one before
                fs.remove_tree(self.path)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_spare(self) -> HeldDirectory | None:
        """Renames the spare to ``D.partial``. None: there is none, or others read it or share its files."""
        if self.spare is None:
            return None
        names = _files_of_our_own(self.spare.path)
        if names is None:
            return None
        try:
            lock = try_lock_directory(self.spare.path)
        except (FileNotFoundError, NotADirectoryError):
            return None  # somebody has taken it away
        if lock is None:
            return None
        try:
            if fs.exists(self.path):
                self._remove_leftover()
            fs.rename(self.spare.path, self.path)
        except BaseException:
            lock.release()
            raise
        self._names = names
        return lock

    def _remove_leftover(self) -> None:
        """Removes what a failed or crashed save left. A live one may be at work there: the lock tells."""
        try:
            leftover = try_lock_directory(self.path)
        except FileNotFoundError:
            return  # its owner has removed it meanwhile
        except NotADirectoryError:
            if not os.path.islink(self.path):
                raise
            fs.unlink(self.path)  # the link only, wherever it leads
            return
        if leftover is None:
            raise self._locked()
        try:
            # It may be what such a save has replaced: its names must be durable before its files go.
            fs.sync_dir(os.path.dirname(self.path))
            fs.remove_tree(self.path)
        finally:
            leftover.release()

    def _locked(self) -> RunLocked:
        return RunLocked(f"another process is saving to {self.target}; one writer per checkpoint")


def _files_of_our_own(directory: str) -> frozenset[str] | None:
    """The files of a directory, if writing over them changes nothing that has another name. Else None.

    A backup made with ``cp -al`` or ``rsync --link-dest`` shares its files with the checkpoint it is of.
    """
    try:
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            return None
        names = frozenset(os.listdir(directory))
        found = [os.lstat(f"{directory}/{name}") for name in names]
    except OSError:
        return None  # what cannot be looked at is not written over
    alone = all(stat.S_ISREG(info.st_mode) and info.st_nlink == 1 for info in found)
    return names if alone else None
