"""A run: a directory holding the checkpoints of one training. Listing, recovery, retention, recycling.

Names in a run: ``step-000000000120`` is a checkpoint, ``….partial`` a save that did not finish, ``….retired``
a checkpoint that retention has given up and whose files the next save may write over. Only the process that
holds the run's lock changes anything here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from holdfast.engine import Tuning, fs
from holdfast.errors import CheckpointNotFound
from holdfast.state import Flat, LeafSource
from holdfast.store.commit import (
    PARTIAL,
    CheckpointInfo,
    Commit,
    Watch,
    try_lock_directory,
    unlock_directory,
)
from holdfast.store.failures import saving
from holdfast.store.lock import RunLock

RETIRED = ".retired"
SPARE_NOW_NBYTES = 4 << 20
"""A retired checkpoint of this size is worth a sync of its own to become a spare at once; a smaller one waits
for the next save's, since that sync would cost it more than the files it saves."""
_STEP = re.compile(r"step-([0-9]{12})")


def step_name(step: int) -> str:
    return f"step-{step:012d}"


def list_steps(run: str) -> list[int]:
    """Steps of the committed checkpoints, oldest first. Needs no lock."""
    try:
        with os.scandir(run) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFound(f"there is no run at {run}") from error
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


class WritableRun:
    """A run opened by its one writer. Opening it sweeps what a crashed writer left."""

    def __init__(self, path: str, tuning: Tuning) -> None:
        self.path = path
        self.tuning = tuning
        with saving(path):
            fs.make_directories(path)
            self._lock = RunLock(path)
            try:
                self._sweep()
            except BaseException:
                self._lock.release()
                raise
        self._spare: str | None = None
        self._unsynced: list[str] = []

    def close(self) -> None:
        """Gives up the lock and the disk space held for recycling."""
        for path in [*self._unsynced, self._spare]:
            if path is not None:
                self._remove(path)
        self._spare, self._unsynced = None, []
        self._lock.release()

    def path_of(self, step: int) -> str:
        return os.path.join(self.path, step_name(step))

    def save(
        self,
        step: int,
        metrics: Mapping[str, float],
        flat: Flat,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        watch: Watch | None = None,
    ) -> CheckpointInfo:
        """Commits one checkpoint. One of the same step is replaced: it was damaged, or training went back."""
        spare, self._spare = self._spare, None
        if spare is not None and not os.path.isdir(spare):
            spare = None
        commit = Commit(self.path_of(step), step, metrics, self.tuning, spare, overwrite=True)
        info = commit.run(flat, groups, watch)
        # The commit has synced the run's directory, and with it the new names of what was retired before.
        self._settle(self._unsynced)
        self._unsynced = []
        self._remove_stuck()
        return info

    def retire(self, steps: list[int]) -> None:
        """Takes checkpoints out of the run. One becomes a spare, whose files a later save writes over.

        Its new name must be durable before that: were the rename lost in a crash after the files were written
        over, the run would show a checkpoint with another one's bytes.
        """
        with saving(self.path):
            retired = []
            for step in steps:
                path = self.path_of(step)
                self._make_way(path + RETIRED)
                fs.rename(path, path + RETIRED)
                retired.append(path + RETIRED)
            if retired and self._spare is None and _nbytes(retired[-1]) >= SPARE_NOW_NBYTES:
                fs.sync_dir(self.path)
                self._settle(retired)
            else:
                self._unsynced += retired

    def _make_way(self, retired: str) -> None:
        """Removes a namesake that somebody has been reading since: what readers opened, they keep."""
        if os.path.lexists(retired):
            if retired == self._spare:
                self._spare = None
            self._unsynced = [path for path in self._unsynced if path != retired]
            fs.remove_tree(retired)

    def _settle(self, retired: list[str]) -> None:
        """Of retired checkpoints whose names are durable, keeps one as the spare and removes the others."""
        for path in reversed(retired):
            if self._spare is None:
                self._spare = path
            else:
                self._remove(path)

    def _remove_stuck(self) -> None:
        """Tries again what a reader prevented when its turn came: a long training must not collect it."""
        for path in self._leftovers():
            if path.endswith(RETIRED) and path != self._spare:
                self._remove(path)

    def _sweep(self) -> None:
        leftovers = list(self._leftovers())
        if leftovers:
            # Whoever left them may have been killed between a rename and its sync. Were the names lost in a
            # power cut now, and the removals not, a checkpoint that is to stay would be without its files.
            fs.sync_dir(self.path)
        for path in leftovers:
            self._remove(path)

    def _leftovers(self) -> Iterator[str]:
        for name in sorted(os.listdir(self.path)):
            stem, dot, suffix = name.partition(".")
            if dot and f".{suffix}" in (PARTIAL, RETIRED) and _STEP.fullmatch(stem):
                yield os.path.join(self.path, name)

    @staticmethod
    def _remove(path: str) -> None:
        """Removes a directory nobody needs. One that is read, or that resists, is left for the next time."""
        with contextlib.suppress(OSError):
            lock = try_lock_directory(path)
            if lock is not None:
                try:
                    fs.remove_tree(path)
                finally:
                    unlock_directory(lock)


def _nbytes(path: str) -> int:
    with os.scandir(path) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
