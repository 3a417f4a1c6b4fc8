"""A reader's hold on a checkpoint: nobody writes over it, and renaming or removing it takes nothing away."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from holdfast.errors import CheckpointNotFound
from holdfast.store.directories import try_lock_directory, unlock_directory
from holdfast.store.failures import reading

_LOCK_SECONDS = 60.0
"""A writer holds a checkpoint that is already visible only while it syncs the directory above: as long as the
device takes for that, be it a slow one, or a busy machine's."""


class Hold:
    """Held from construction to `close`, or until nothing refers to it any more."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._owner = os.getpid()
        self._files: dict[str, int] = {}
        self._descriptor: int | None = None
        self._descriptor = _lock(path)

    @property
    def directory(self) -> str:
        """The directory to open files in. By descriptor, so that a rename by retention takes nothing away."""
        if self._descriptor is None:
            raise ValueError(f"the checkpoint {self.path} has been closed")
        return f"/proc/self/fd/{self._descriptor}"

    @property
    def current(self) -> bool:
        """Whether the path still leads here: nothing has been replaced, retired or removed so far."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def pin(self, names: Iterable[str]) -> bool:
        """Keeps these files within reach even when they are removed: replacing a checkpoint does that.

        Returns whether all of them were there. What is missing is for the reader to find out, who knows what
        it was needed for.
        """
        complete = True
        for name in names:
            try:
                self._files[name] = os.open(f"{self.directory}/{name}", os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                complete = False
        return complete

    def file(self, name: str) -> str:
        """The path to open a file by."""
        return f"/proc/self/fd/{self._files[name]}" if name in self._files else f"{self.directory}/{name}"

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._owner == os.getpid():
            unlock_directory(descriptor)
        else:
            # A forked child shares the lock with its parent, who goes on reading.
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _lock(path: str) -> int:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            lock = try_lock_directory(path, shared=True)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(f"there is no checkpoint at {path}") from error
        except PermissionError as error:
            with reading(path):
                raise error
        if lock is not None:
            return lock
        if time.monotonic() > deadline:
            raise CheckpointNotFound(f"{path} is being written by another process")
        time.sleep(0.002)
