"""One writer per run: the lock that a dead process cannot keep.

A lock on ``.lock`` in the run's directory, of the kind that belongs to an open file (``F_OFD_SETLK``): it
also excludes a second writer in the same process, and somebody else in that process who opens and closes the
file, to copy it say, does not drop it. The kernel drops it when the last descriptor goes, so a forked child
closes its own at once: data-loader workers that outlive their parent do not hold the run. The file says who
does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import time
import weakref
from types import TracebackType

from holdfast.errors import RunLocked

LOCK_FILE = ".lock"
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class RunLock:
    """Held from construction to `release`, or until nothing refers to it any more."""

    def __init__(self, run: str) -> None:
        self._file = -1
        path = os.path.join(run, LOCK_FILE)
        # A link would have us write over whatever it leads to.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        _held.add(self)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except OSError as error:
            holder = _holder(self._file)
            self.release()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise RunLocked(f"run {run} is {holder}; one writer per run") from error
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        # On a full disk the lock holds all the same, only nameless; and a restore must still be possible.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(me).encode(), 0)

    def release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        _held.discard(self)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for lock in list(_held):
        lock.release()  # of this process' own descriptor; the parent has another, and the lock with it


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _holder(file: int) -> str:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        pid, host = int(found["pid"]), found["host"]
        if (pid, host) == (os.getpid(), socket.gethostname()):
            return "open for writing in this process already: close that Checkpointer first"
        return f"being written by process {pid} on {host} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "being written by another process"
