"""A run: a directory with the checkpoints of one training. Recovery, retirement, recycling.

Names in a run: ``step-000000000120`` is a checkpoint, ``….partial`` a save that did not finish, ``….retired``
a checkpoint that retention has removed; the next save may overwrite its files. Only the process that holds
the run's lock changes anything here. It works through the descriptor of the run's directory, and checks that
the run's path still leads there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from everystep.engine import fs
from everystep.engine.fs import Entry, OpenDirectory
from everystep.store.commit.info import CheckpointInfo
from everystep.store.commit.transaction import Spare, Transaction
from everystep.store.commit.volumes import Ledger
from everystep.store.locks import RunLock, remove_unlocked, require_current
from everystep.store.names import PARTIAL, RETIRED, is_leftover, step_name
from everystep.store.save_errors import save_failed, saving

SPARE_NOW_NBYTES = 4 << 20
"""A retired checkpoint of this size is worth a sync of its own to become a spare at once; a smaller one waits
for the next save's, since that sync would cost it more than the files it saves."""


class FollowedRun:
    """A run as the other ranks see it while the coordinator writes to it. They change nothing."""

    directory = None

    def __init__(self, path: str) -> None:
        self.path = path

    def path_of(self, step: int) -> str:
        return os.path.join(self.path, step_name(step))

    def begin(self, step: int, *, overwrite: bool = False) -> Transaction:
        """Where the checkpoint of that step goes."""
        return Transaction(self.path_of(step))

    def committed(self, step: int, transaction: Transaction, info: CheckpointInfo) -> None:
        """The coordinator keeps the record."""

    def failed(self, step: int, transaction: Transaction) -> None:
        """The coordinator cleans up."""

    def has(self, step: int) -> bool:
        return os.path.isdir(self.path_of(step))

    def require_current(self) -> None:
        """Only the coordinator does this."""

    def retire(
        self, steps: list[int], *, durable: bool = False, ids: Mapping[int, str | None] | None = None
    ) -> None:
        """Only the coordinator does this."""

    def close(self) -> None:
        """This rank holds no lock and no files."""


class WritableRun:
    """A run opened by its one writer. Opening it sweeps what a crashed writer left."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._spare: Spare | None = None
        self._unsynced: list[Spare] = []
        # Directories that could not be removed yet.
        self._stuck: list[str] = []
        # Step -> bytes of the checkpoints that were committed here: their directories are known to be synced.
        self._committed: dict[int, int] = {}
        self._open = True
        with saving(path):
            fs.make_directories(path)
            self._lock = RunLock(path)
            self.ledger = Ledger(self.directory)
            """Of checkpoints with shards on volumes; a run without such has none on disk."""
            try:
                self._sweep()
            except BaseException:
                self._lock.release()
                raise

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def directory(self) -> OpenDirectory:
        """The run's directory, open as long as the run is."""
        return self._lock.directory

    def require_current(self) -> None:
        """Raises `RunMoved` if the run's path now leads elsewhere."""
        require_current(self.directory)

    def has(self, step: int) -> bool:
        return fs.exists(self._at(step_name(step)))

    def _at(self, name: str) -> Entry:
        return self.directory.at(name)

    def close(self) -> None:
        """Releases the lock, and the disk space held for recycling."""
        try:
            if self._open:
                self._open = False
                with contextlib.suppress(OSError):  # then the next writer removes what is left here
                    self._settle_unsynced()
                if self._spare is not None:
                    self._stuck.append(self._spare.name)
                    self._spare = None
                self._remove_stuck()
        finally:
            self._lock.release()

    def path_of(self, step: int) -> str:
        return os.path.join(self.path, step_name(step))

    def begin(self, step: int, *, overwrite: bool = False) -> Transaction:
        """Where the checkpoint of that step goes, and the spare whose files it may overwrite.

        The caller commits it, and then calls `committed` or `failed` with the transaction.
        """
        spare, self._spare = self._spare, None
        return Transaction(self.path_of(step), self.directory, spare, overwrite=overwrite)

    def committed(self, step: int, transaction: Transaction, info: CheckpointInfo) -> None:
        """The checkpoint of that step is durable."""
        self._end(step, transaction.spare)
        self._committed[step] = info.stored_nbytes
        # The commit has synced the run's directory, and with it the new names of what was retired before.
        unsynced, self._unsynced = self._unsynced, []
        self._settle(unsynced)
        self._remove_stuck()

    def failed(self, step: int, transaction: Transaction) -> None:
        """No checkpoint of that step was committed."""
        self._end(step, transaction.spare)

    def _end(self, step: int, spare: Spare | None) -> None:
        """Remembers directories that the save did not use or could not remove. The next save removes them."""
        partial = step_name(step) + PARTIAL
        # Not used: it is being read, or the save failed. (Or another of that name was retired meanwhile.)
        if spare is not None and not self._is_retired(spare.name) and fs.exists(self._at(spare.name)):
            self._stuck.append(spare.name)
        # A rank that learned of the failure late has written into the directory while it was being removed.
        if fs.exists(self._at(partial)):
            self._stuck.append(partial)

    def retire(
        self, steps: list[int], *, durable: bool = False, ids: Mapping[int, str | None] | None = None
    ) -> None:
        """Removes checkpoints from the run. One becomes a spare, whose files a later save overwrites.

        Its new name must be durable before that. Otherwise a crash could lose the rename after the files were
        overwritten, and the run would show a checkpoint with another one's bytes. If one checkpoint cannot be
        retired, the others still are, and the error names it. `durable`: their removal survives a power cut.
        `ids`: the ids of checkpoints that may have shards on volumes, by step.
        """
        if not steps and not durable:
            return
        with saving(self.path):
            self.require_current()
        nbytes = 0
        resisted: tuple[str, OSError] | None = None
        for step in steps:
            try:
                nbytes = self._retire(step, (ids or {}).get(step))
            except OSError as error:
                resisted = resisted or (self.path_of(step), error)
        with saving(self.path):
            # Shards on volumes take space until they are noted, which only a durable name allows.
            noted = any(spare.id is not None for spare in self._unsynced)
            if durable or noted or (self._spare is None and nbytes >= SPARE_NOW_NBYTES):
                self._settle_unsynced(always=durable)
        if resisted is not None:
            path, cause = resisted
            failed = type(save_failed(cause, path))(
                f"could not remove {path} from the run: {cause.strerror or cause}"
            )
            failed.errno, failed.filename = cause.errno, path
            raise failed from cause

    def free(self) -> tuple[int, int]:
        """Bytes and files that the device has left for this user."""
        found = os.statvfs(self.directory.fileno())
        # Some file systems do not count files: there is no limit then.
        return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else 1 << 62

    def available_nbytes(self) -> int:
        """Bytes for the next checkpoint: free space, and the files of the spare that it overwrites."""
        with saving(self.path):
            self._settle_unsynced()
            self._remove_stuck()
            spare = 0 if self._spare is None else _nbytes(self._at(self._spare.name))
            return self.free()[0] + spare

    def _retire(self, step: int, id: str | None) -> int:
        """Renames a checkpoint to its retired name; returns its size."""
        name = step_name(step)
        retired = name + RETIRED
        self._make_way(retired)
        fs.rename(self._at(name), self._at(retired))
        known = self._committed.pop(step, None)
        self._unsynced.append(Spare(retired, known is not None, id))
        return _nbytes(self._at(retired)) if known is None else known

    def _is_retired(self, name: str) -> bool:
        return any(spare is not None and spare.name == name for spare in (self._spare, *self._unsynced))

    def _make_way(self, retired: str) -> None:
        """Removes an older retired directory of that name. Its readers keep the files that they have open."""
        if fs.exists(self._at(retired)):
            if self._spare is not None and retired == self._spare.name:
                self._spare = None
            self._unsynced = [spare for spare in self._unsynced if spare.name != retired]
            fs.remove_tree(self._at(retired))

    def _settle_unsynced(self, *, always: bool = False) -> None:
        """Makes the new names of retired checkpoints durable."""
        if self._unsynced or always:
            fs.sync_dir(self.directory)
            unsynced, self._unsynced = self._unsynced, []
            self._settle(unsynced)

    def _settle(self, retired: list[Spare]) -> None:
        """Of retired checkpoints whose names are durable, keeps one as the spare and removes the others.

        Their shards on volumes are noted as dead now: no crash can bring the old names back any more. After a
        crash before this, the next writer finds them under their new names (`Ledger.add_leftovers`).
        """
        dead = [spare.id for spare in retired if spare.id is not None]
        if dead:
            self.ledger.add(dead)
        for spare in reversed(retired):
            if self._spare is None:
                self._spare = spare
            else:
                self._stuck.append(spare.name)
        self._remove_stuck()

    def _remove_stuck(self) -> None:
        """Removes unneeded directories. Retries those that a reader or a failure kept, so that a long
        training does not collect them."""
        if self._stuck:
            self._stuck = [
                name for name in self._stuck if not self._remove(name) and fs.exists(self._at(name))
            ]

    def _sweep(self) -> None:
        leftovers = list(self._leftovers())
        if leftovers:
            # The process that left them may have been killed between a rename and its sync. If a power cut
            # now lost the names and not the removals, a checkpoint that should stay would lose its files.
            fs.sync_dir(self.directory)
            self.ledger.add_leftovers(leftovers)
        self.ledger.sweep()
        for name in leftovers:
            if not self._remove(name) and name.endswith(RETIRED):
                self._stuck.append(name)

    def _leftovers(self) -> Iterator[str]:
        for name in sorted(os.listdir(self.directory.fileno())):
            if is_leftover(name):
                yield name

    def _remove(self, name: str) -> bool:
        """Removes an unneeded directory; False if it is being read or cannot be removed now."""
        with contextlib.suppress(OSError):
            return remove_unlocked(self._at(name))
        return False


def _nbytes(entry: Entry) -> int:
    directory = fs.open_directory(entry)
    try:
        with os.scandir(directory.fileno()) as entries:
            return sum(found.stat(follow_symlinks=False).st_size for found in entries)
    finally:
        directory.release()
