"""The commit protocol: how a checkpoint becomes durable, all or nothing.

For a checkpoint that is to appear at ``D`` in directory ``P`` (held open, and reached by its descriptor):

1. `make`: make ``D.partial`` in ``P``, or rename a retired checkpoint to it to write over its files. Readers
   ignore names that end in ``.partial``, so nothing before step 5 can be taken for a checkpoint.
2. The driver writes the shards. Their bytes come from the caller's memory; checksums are computed on the way.
3. `seal`: write the manifest, which holds the checksums. (A small state is copied first, so that its
   checksums are known; then its manifest is in the shard's header, and this step is part of step 2.)
4. `seal`: sync the shards, the manifest, and the directory ``D.partial``: the whole checkpoint is durable.
   (The directory's entries may be durable already: those of a checkpoint that this process committed and
   retired, in which no file was made or removed since.)
5. `publish`: rename ``D.partial`` to ``D``. **This is the commit.** It fails if ``D`` exists by now. It also
   fails if the path of ``P`` leads elsewhere by now: readers would not find the checkpoint.
   (To replace an old checkpoint, exchange the two names. The old one is locked against other writers until it
   is removed. `everystep.store.commit.existing_directory` is about directories that exist already.)
6. `publish`: sync ``P``. Now, and only now, the save is reported durable.

A crash before the rename reached the disk leaves ``D.partial``, which the next writer sweeps away; after it,
a whole checkpoint. The rename cannot reach the disk before what step 4 synced. ``D.partial`` itself needs no
sync of ``P``: nothing relies on it until step 6 syncs the same directory.

A sync that fails is final: the kernel may have dropped the dirty pages, and a second sync would lie. The save
fails, `abort` removes what it left, and what was there before has not been touched.

`everystep.store.commit.driver` feeds it with shards, parts and messages. Whatever else appears whole as a
directory goes this way, too: a tag of DeepSpeed, and what a conversion writes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from everystep.engine import WriteJob, fs
from everystep.engine.fs import Entry, OpenDirectory, PendingFile
from everystep.errors import CheckpointExists, Locked
from everystep.store.commit.existing_directory import Found, carry_over, found_at, link_into, take_back
from everystep.store.locks import LOCK_SECONDS, require_current, share_directory, try_lock_directory
from everystep.store.names import MANIFEST, PARTIAL, is_checkpoint_file
from everystep.store.save_errors import as_failed_save

_ATTEMPTS = 4
"""To make a directory whose name others take and give back meanwhile."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A retired checkpoint whose files may be written over.

    `synced`: their names are known to be durable. `id`: of a checkpoint that may have shards on volumes.
    """

    name: str
    synced: bool
    id: str | None = None


class Transaction:
    """A directory on its way to ``D``, beside which a retired one may lie whose files it may write over.

    `open`, `make`, `seal`, `publish`; or `abort`; and `release` in the end. A ``with`` block opens it, aborts
    when an error leaves it, which it turns into the typed error of a save, and releases.
    """

    parent: OpenDirectory
    """The directory that both names are in, from `open` on."""
    entry: Entry
    target_entry: Entry
    directory: OpenDirectory
    """The directory itself, which files are made in, from `make` on."""

    def __init__(
        self,
        target: str,
        parent: OpenDirectory | None = None,
        spare: Spare | None = None,
        *,
        partial: str | None = None,
        overwrite: bool = False,
        allow_other_files: bool = False,
    ) -> None:
        """`parent`: the directory that ``D`` is in, if the caller has it open. `partial`: another path there
        than ``D.partial``.

        `overwrite`: whether a checkpoint at ``D`` is replaced. `allow_other_files`: whether ``D`` may be a
        directory with other files, not only an empty one.
        """
        self.target = target
        self.path = partial or target + PARTIAL
        self.spare = spare
        self.overwrite = overwrite
        self.names_certain = True
        """False while ``D`` and ``D.partial`` may have exchanged names, and it is uncertain which name each
        has on disk. Then neither may be removed: it could be the checkpoint that is being replaced."""
        self.published = False
        """Whether the directory has the name ``D`` for good: no later failure removes anything in it."""
        self.recycle = False
        """Whether there are files to write over."""
        self._allow_other_files = allow_other_files
        self._parent = parent
        self._names: frozenset[str] = frozenset()
        """Those of the files to write over."""
        self._lock: OpenDirectory | None = None
        self._closes_parent = parent is None

    def owns(self, name: str) -> bool:
        """Whether what has this name in ``D`` is part of a checkpoint, which a new one replaces."""
        return is_checkpoint_file(name)

    def found(self) -> Found:
        """What is at ``D``."""
        return found_at(self.target, self.path)

    def open(self) -> None:
        """Opens the directory above, unless the caller has, and makes its name durable.

        `RunMoved` if the path of that directory leads elsewhere since it was opened.
        """
        parent = self._parent
        if parent is None:
            parent = self._parent = fs.open_directory(os.path.dirname(self.target))
        else:
            require_current(parent)
        fs.anchor(parent.path, once=True)
        self.parent = parent
        self.entry = parent.at(os.path.basename(self.path))
        self.target_entry = parent.at(os.path.basename(self.target))

    def __enter__(self) -> Transaction:
        try:
            self.open()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if error is not None:
                    self.abort()
            finally:
                self.release()
        except BaseException:
            self.release()  # an interrupt may have struck before the other call had done anything
            raise
        if error is not None:
            failed = as_failed_save(error, self.target)
            try:
                if failed is not error:
                    raise failed from error
            finally:
                del failed  # else its traceback, which has this frame, would keep itself alive

    def refuse_existing(self) -> None:
        """Raises the error of `publish` early, before anything large is written."""
        if not self.overwrite and fs.exists(self.target) and self.found() in ("checkpoint", "something else"):
            raise _exists(self.target)

    def make(self) -> None:
        """Step 1. From here on it is held against others."""
        if self.spare is not None:
            self.recycle = self._take_spare(self.spare)
            if self.recycle:
                assert self._lock is not None
                self.directory = self._lock
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
        self.directory = self._lock

    def keep_only(self, names: Collection[str]) -> None:
        """Removes the files of a retired checkpoint that the new one does not write over."""
        for name in self._names.difference(names):
            fs.unlink(self.directory.at(name))

    def seal(
        self,
        manifest: bytes | bytearray | None,
        written: Sequence[WriteJob | PendingFile] = (),
        *,
        names: Collection[str] | None = None,
        unneeded: Iterable[str] = (),
    ) -> None:
        """Steps 3 and 4, for the files that this process has `written` and not synced.

        `names`: all files of the checkpoint in this directory, if this process wrote them all.
        `unneeded`: further files, which are removed when the manifest is there.
        """
        if manifest is None:
            durable = self.recycle and self._are_durable(names, written)
            fs.sync(written, None if durable else self.directory)
            return
        with fs.write_file(self.directory.at(MANIFEST), manifest, recycle=self.recycle) as file:
            for name in unneeded:
                fs.unlink(self.directory.at(name))
            files = [*written, file]
            durable = self.recycle and self._are_durable(names, files)
            fs.sync(files, None if durable else self.directory)

    def _are_durable(self, names: Collection[str] | None, files: Sequence[WriteJob | PendingFile]) -> bool:
        """Whether all are names of a spare that are known to be on the disk, with no file made or removed."""
        assert self.spare is not None
        if names is None or not self.spare.synced or self._names != set(names):
            return False
        return not any(file.fresh() for file in files)

    def publish(self, replaced: Callable[[], None] | None = None) -> None:
        """Steps 5 and 6. After a failed sync it takes the name back: readers must not find a failed save.

        `replaced` is called when the new checkpoint is durable and an old one is about to be removed.
        """
        require_current(self.parent)
        if not (self.overwrite and fs.exists(self.target_entry)):
            with contextlib.suppress(FileExistsError):
                self._change_names(fs.rename_new)
                return
        found = self.found()
        if found == "empty" or (found == "others" and self._allow_other_files):
            self._settle_in()
            return
        if found != "checkpoint" or not self.overwrite:
            raise _exists(self.target)
        # Shared with its readers, but not with the next writer: to that one, what is replaced would look like
        # the leftover of a crash, to be swept away. Then this one would remove what the next one makes there.
        old = share_directory(self.target_entry, LOCK_SECONDS)
        if old is None:
            raise self._locked()
        try:
            carry_over(old, self.directory, self.owns)
            self._change_names(fs.exchange)
            if replaced is not None:
                replaced()
            with contextlib.suppress(OSError):  # durable already; the next save to this path sweeps it
                carry_over(old, self.directory, self.owns)
                fs.remove_tree(self.entry)
        finally:
            old.release()

    def abort(self) -> None:
        """Cleans up after a failure. If files cannot be removed now, the next writer removes them."""
        if self._lock is not None and self.names_certain and not self.published:
            self._remove(self._lock)

    def _remove(self, directory: OpenDirectory) -> None:
        with contextlib.suppress(OSError):  # if there is a failure to report, it is the one before
            fs.remove_entries(directory)
            fs.rmdir(self.entry)

    def release(self) -> None:
        """A second time does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._closes_parent and self._parent is not None:
            self._parent.release()

    def _settle_in(self) -> None:
        """Steps 5 and 6 where a directory without a checkpoint is. Its lock keeps readers waiting."""
        into = try_lock_directory(self.target_entry)
        if into is None:
            raise self._locked()
        self.names_certain = False  # the next writer needs it to take back what could not be
        try:
            link_into(self.directory, into, self.parent)
            self.published = self.names_certain = True
        except FileExistsError:
            self.names_certain = True
            raise _exists(self.target) from None
        except OSError:
            self.names_certain = not any(map(is_checkpoint_file, os.listdir(into.fileno())))
            raise
        finally:
            into.release()
        self._remove(self.directory)  # every file has its second name by now

    def _change_names(self, move: Callable[[Entry, Entry], None]) -> None:
        self.names_certain = False
        try:
            move(self.entry, self.target_entry)
        except OSError:
            self.names_certain = True
            raise
        try:
            fs.sync_dir(self.parent)
        except OSError:
            move(self.target_entry, self.entry)
            fs.sync_dir(self.parent)  # no second try of the first: the names have changed again
            self.names_certain = True
            raise
        self.published = True
        self.names_certain = True

    def _take_spare(self, retired: Spare) -> bool:
        """Renames the spare to ``D.partial``. False: there is none, or others read it or share its files.

        What holds it is kept here from the first moment on: an interrupt may strike at any later one.
        """
        spare = self.parent.at(retired.name)
        try:
            self._lock = try_lock_directory(spare)
        except (FileNotFoundError, NotADirectoryError):
            return False  # it has been removed meanwhile
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
                self._lock.release()  # it is still the spare, and not to be removed
                self._lock = None
        return True

    def _remove_leftover(self) -> None:
        """Removes the leftover of a failed or crashed save. A live save would hold the lock."""
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

    def _take_back(self, leftover: OpenDirectory) -> None:
        """Removes the names that a killed save gave to its files in an existing directory."""
        try:
            into = fs.open_directory(self.target_entry, False)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            take_back(leftover, into)
        finally:
            into.release()

    def _locked(self) -> Locked:
        return Locked(f"another process is saving to {self.target}: wait for it, or choose another path")


def _files_of_our_own(directory: OpenDirectory) -> frozenset[str] | None:
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


def _exists(target: str) -> CheckpointExists:
    return CheckpointExists(
        f"Checkpoint already exists: {target}. Choose another path, or pass overwrite=True to replace it "
        "in one step"
    )
