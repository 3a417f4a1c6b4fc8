"""One writer per run: the lock that a dead process cannot keep.

A POSIX record lock on ``.lock`` in the run's directory. The kernel drops it when its process ends, however
that happens, and does not hand it to forked children, so data-loader workers that outlive their parent do not
hold it. The file says who the holder is. Such locks do not exclude two writers in the same process; a table
here does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from types import TracebackType

from holdfast.errors import RunLocked

LOCK_FILE = ".lock"
# (device, inode) of every run this process holds, and the process that took it: a forked child has none.
_held: dict[tuple[int, int], int] = {}


class RunLock:
    """Held from construction to `release`."""

    def __init__(self, run: str) -> None:
        path = os.path.join(run, LOCK_FILE)
        info = os.stat(run)
        self._key = (info.st_dev, info.st_ino)
        # Opening and closing the file again in this process would drop the kernel's lock: look here first.
        if _held.get(self._key) == os.getpid():
            raise RunLocked(
                f"run {run} is open for writing in this process already; close that Checkpointer first"
            )
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._file)
            os.close(self._file)
            raise RunLocked(f"run {run} is being written by {holder}; one writer per run") from error
        _held[self._key] = os.getpid()
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        # On a full disk the lock holds all the same, only nameless; and a restore must still be possible.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(me).encode(), 0)

    def release(self) -> None:
        if self._file >= 0 and _held.get(self._key) == os.getpid():
            del _held[self._key]
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _holder(file: int) -> str:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {int(found['pid'])} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
