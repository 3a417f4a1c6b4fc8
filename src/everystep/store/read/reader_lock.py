"""A reader's lock on a checkpoint: no writer overwrites it, and it stays readable if renamed or removed."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable

from everystep.engine import fs
from everystep.engine.fs import OpenDirectory
from everystep.errors import CheckpointClosed, CheckpointNotFound
from everystep.store.locks import LOCK_SECONDS, share_directory
from everystep.store.read.read_errors import read_failed, reading

_LEFT = 64
"""Descriptors to leave free. (A new descriptor gets the lowest free number.)"""


class ReaderLock:
    """Held from construction to `close`, or until it is garbage-collected.

    `uncommitted`: the writer itself reads what it wrote. It holds the lock already.
    """

    def __init__(self, path: str, *, uncommitted: bool = False) -> None:
        self.path = path
        self._files: dict[str, int] = {}
        self._held: OpenDirectory | None = None
        self._held = fs.open_directory(path) if uncommitted else _lock(path)

    @property
    def directory(self) -> str:
        """The directory to open files in: by descriptor, so reads go on after it was renamed."""
        if self._held is None:
            raise CheckpointClosed(f"the checkpoint {self.path} has been closed")
        return f"/proc/self/fd/{self._held.fileno()}"

    @property
    def current(self) -> bool:
        """Whether the path still leads here: nothing has been replaced, retired or removed so far."""
        if self._held is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._held.fileno()), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise read_failed(error, self.path) from error

    def require_current(self) -> None:
        """For a reader that misses a file: raises if the path now leads to another checkpoint, or to none."""
        if not self.current:
            raise CheckpointNotFound(
                f"{self.path} was replaced or removed while it was read: open what is there now"
            )

    def pin(self, names: Iterable[str]) -> bool:
        """Keeps these files within reach even when they are removed: replacing a checkpoint does that.

        Returns whether all of them could be opened. The reader finds out about the others when it needs them;
        for that, some descriptors stay free.
        """
        complete = True
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        for name in names:
            if name in self._files:
                continue
            try:
                opened = os.open(f"{self.directory}/{name}", os.O_PATH | os.O_CLOEXEC)
            except OSError:
                complete = False
                continue
            if limit != resource.RLIM_INFINITY and opened >= limit - _LEFT:
                os.close(opened)
                return False
            self._files[name] = opened
        return complete

    def file(self, name: str) -> str:
        """The path to open a file by."""
        return f"/proc/self/fd/{self._files[name]}" if name in self._files else f"{self.directory}/{name}"

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def __del__(self) -> None:
        self.close()


def _lock(path: str) -> OpenDirectory:
    with reading(path):
        try:
            held = share_directory(path, LOCK_SECONDS)
        except (FileNotFoundError, NotADirectoryError) as error:
            strange = ": this is not a directory" if os.path.exists(path) else ""
            raise CheckpointNotFound(f"there is no checkpoint at {path}{strange}") from error
    if held is None:
        raise CheckpointNotFound(f"{path} is being written by another process")
    return held
