"""The directory in which a checkpoint comes to be, before it has its name: made or taken, held, cleaned up.

Owns step 1 of the commit protocol (`holdfast.store.commit`), and what becomes of ``D.partial`` when a later
one fails.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.engine import WriteJob, fs
from holdfast.engine.fs import Entry, HeldDirectory, PendingFile
from holdfast.errors import RunLocked
from holdfast.store.beside import take_back
from holdfast.store.directories import require_current, try_lock_directory

PARTIAL = ".partial"
_ATTEMPTS = 4
"""To make a directory whose name others take and give back meanwhile."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A retired checkpoint whose files may be written over. `synced`: their names are known to be durable."""

    name: str
    synced: bool


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint shall appear, and a retired one beside it whose files it may write over.

    `directory`: the open one that it goes to. None: whoever writes the checkpoint opens it for that.
    """

    path: str
    directory: HeldDirectory | None = None
    spare: Spare | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[HeldDirectory]:
        """The directory, open. `RunMoved` when its path has come to lead elsewhere since it was opened."""
        if self.directory is not None:
            require_current(self.directory)
            yield self.directory
            return
        directory = fs.open_directory(os.path.dirname(self.path))
        try:
            yield directory
        finally:
            directory.release()


@dataclass(slots=True)
class Partial:
    """``D.partial`` while it is ours: from `make` to `release`.

    Not `settled`: ``D`` and ``D.partial`` have changed names, and which has which on the disk is not certain.
    Then neither may be removed: it could be the checkpoint that is to be replaced.
    """

    parent: HeldDirectory
    """The one that both are in."""
    target: str
    spare: Spare | None
    settled: bool = True
    published: bool = False
    """Whether the directory has the name ``D`` for good: from then on no failure removes anything in it."""
    recycle: bool = False
    """Whether there are files to write over."""
    _names: frozenset[str] = frozenset()
    """Those of the files to write over."""
    _lock: HeldDirectory | None = None

    @property
    def path(self) -> str:
        return self.target + PARTIAL

    @property
    def entry(self) -> Entry:
        return self.parent.at(os.path.basename(self.path))

    @property
    def target_entry(self) -> Entry:
        return self.parent.at(os.path.basename(self.target))

    @property
    def directory(self) -> HeldDirectory:
        """The directory itself, which files are made in."""
        assert self._lock is not None
        return self._lock

    def make(self) -> None:
        """Step 1. From here on it is held against others."""
        self.recycle = self._take_spare()
        if self.recycle:
            return
        for _ in range(_ATTEMPTS):
            try:
                self._lock = fs.make_directory(self.entry)
            except FileExistsError:
                self._remove_leftover()
            else:
                break
        if self._lock is None:
            raise self._locked()

    def clear(self, ours: set[str]) -> None:
        """Removes what is not `ours` from files to write over."""
        if self.recycle:
            for name in self._names - ours:
                fs.unlink(self.directory.at(name))

    def directory_to_sync(
        self, ours: set[str], written: Sequence[WriteJob | PendingFile]
    ) -> HeldDirectory | None:
        """The directory, unless its names are durable: all of a spare's, with no file made or removed."""
        if not self.recycle:
            return self.directory
        assert self.spare is not None
        same = self._names == ours and not any(file.fresh() for file in written)
        return None if same and self.spare.synced else self.directory

    def remove(self) -> None:
        """After a failure. What cannot be removed now is swept by the next writer."""
        if self._lock is not None and self.settled and not self.published:
            with contextlib.suppress(OSError):  # the failure to report is the one before
                fs.remove_entries(self._lock)
                fs.rmdir(self.entry)

    def release(self) -> None:
        """A second time does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take_spare(self) -> bool:
        """Renames the spare to ``D.partial``. False: there is none, or others read it or share its files.

        What holds it is kept here from the first moment on: an interrupt may strike at any later one.
        """
        if self.spare is None:
            return False
        spare = self.parent.at(self.spare.name)
        try:
            self._lock = try_lock_directory(spare)
        except (FileNotFoundError, NotADirectoryError):
            return False  # somebody has taken it away
        if self._lock is None:
            return False
        taken = False
        try:
            names = _files_of_our_own(self._lock)
            if names is None:
                return False
            if fs.exists(self.entry):
                self._remove_leftover()
            taken = True
            fs.rename(spare, self.entry)
            self._lock.renamed(self.path)
            self._names = names
        except OSError:
            taken = False
            raise
        finally:
            if not taken:
                self.release()  # it is still the spare, and not to be removed
        return True

    def _remove_leftover(self) -> None:
        """Removes what a failed or crashed save left. A live one may be at work there: the lock tells."""
        try:
            leftover = try_lock_directory(self.entry)
        except FileNotFoundError:
            return  # its owner has removed it meanwhile
        except NotADirectoryError:
            if not fs.is_link(self.entry):
                raise
            fs.unlink(self.entry)  # the link only, wherever it leads
            return
        if leftover is None:
            raise self._locked()
        try:
            # It may be what such a save has replaced: its names must be durable before its files go.
            fs.sync_dir(self.parent)
            self._take_back(leftover)
            fs.remove_entries(leftover)
            fs.rmdir(self.entry)
        finally:
            leftover.release()

    def _take_back(self, leftover: HeldDirectory) -> None:
        """Should it have been killed while it settled in a directory that is there."""
        try:
            into = fs.open_directory(self.target_entry, False)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            take_back(leftover, into)
        finally:
            into.release()

    def _locked(self) -> RunLocked:
        return RunLocked(f"another process is saving to {self.target}; one writer per checkpoint")


def _files_of_our_own(directory: HeldDirectory) -> frozenset[str] | None:
    """The files of a directory, if writing over them changes nothing that has another name. Else None.

    A backup made with ``cp -al`` or ``rsync --link-dest`` shares its files with the checkpoint it is of.
    """
    try:
        number = directory.fileno()
        names = frozenset(os.listdir(number))
        found = [os.stat(name, dir_fd=number, follow_symlinks=False) for name in names]
    except OSError:
        return None  # what cannot be looked at is not written over
    alone = all(stat.S_ISREG(info.st_mode) and info.st_nlink == 1 for info in found)
    return names if alone else None
