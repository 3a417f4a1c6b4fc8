"""Locks on directories: a run has one writer; a checkpoint has one writer or many readers.

A writer holds a directory by its descriptor, so a path that leads elsewhere later does not mislead it. A dead
process cannot keep the lock of a run, and a live one cannot lose it.

A run has two locks. The first is a ``flock`` on the run's directory: no second writer gets it, even if
the path or the files inside change. On network file systems it holds on one host only. So there is a
second lock on the file ``.lock`` in that directory, of the kind that belongs to an open file
(``F_OFD_SETLK``): code of this process that opens and closes the file does not drop it. That file also says
who holds the run.

Both exclude a second writer in the same process, too. The kernel drops them with the last descriptor, so a
forked child closes its own at once: data-loader workers that outlive their parent do not hold the run.
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

from everystep.engine import fs
from everystep.engine.fs import OpenDirectory
from everystep.errors import Locked, RunMoved, StorageMissing
from everystep.store.names import LOCK_FILE

LOCK_SECONDS = 60.0
"""A writer holds a checkpoint that is already visible only while it syncs the directory above: as long as a
slow device, or a busy machine, takes for that."""
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class RunLock:
    """Held from construction to `release`, or until it is garbage-collected.

    `directory` is the run's directory, open for the same time. The path may be a link to it.
    """

    def __init__(self, run: str) -> None:
        self._file = -1
        self._directory: OpenDirectory | None = None
        held = fs.lock_directory(run, True, True)
        if held is None:
            raise Locked(f"run {run} is {_holder_of(run)}; a run has one writer at a time")
        self._directory = held
        try:
            self._file = self._open()
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BaseException as error:
            self.release()
            if (
                not isinstance(error, OSError)
                or error.errno not in (errno.EAGAIN, errno.EACCES)
                or error.filename is not None
            ):
                raise
            raise Locked(f"run {run} is {_holder_of(run)}; a run has one writer at a time") from error
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        # On a full disk the lock holds without a name. A restore must still be possible.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(me).encode(), 0)

    def _open(self) -> int:
        # Through a link we would overwrite another file.
        try:
            file = fs.open_regular(LOCK_FILE, self.directory.fileno(), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            error.filename = os.path.join(self.directory.path, LOCK_FILE)
            raise
        _held.add(self)
        return file

    @property
    def directory(self) -> OpenDirectory:
        assert self._directory is not None
        return self._directory

    def release(self) -> None:
        self._leave_file()
        if self._directory is not None:
            self._directory.release()

    def _leave_file(self) -> None:
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
        lock._leave_file()  # of this process' own descriptor; the parent has another, and the lock with it


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _holder_of(run: str) -> str:
    """Who holds a run, according to its lock file."""
    try:
        file = fs.open_regular(os.path.join(run, LOCK_FILE))
        try:
            found = json.loads(os.pread(file, 4096, 0))
        finally:
            os.close(file)
        pid, host = int(found["pid"]), found["host"]
        if (pid, host) == (os.getpid(), socket.gethostname()):
            return "already open for writing in this process: close that Checkpointer first"
        return f"being written by process {pid} on {host} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "being written by another process"


def try_lock_directory(path: fs.PathOrEntry, *, shared: bool = False) -> OpenDirectory | None:
    """Holds a directory until it is released; None if another process holds it.

    None also if its holder has just renamed or removed it. Writers hold a checkpoint's directory exclusively
    while they write into it, and follow no link; readers share it.
    """
    return fs.lock_directory(path, not shared)


def share_directory(path: fs.PathOrEntry, timeout: float) -> OpenDirectory | None:
    """Shares a checkpoint's directory with its readers; None if a writer holds it longer than `timeout`."""
    deadline = time.monotonic() + timeout
    while True:
        held = try_lock_directory(path, shared=True)
        if held is not None or time.monotonic() > deadline:
            return held
        time.sleep(0.002)


def remove_unlocked(place: fs.PathOrEntry) -> bool:
    """Removes a directory and all in it; of a link, only the link. False if another process holds it.

    None of what it has replaced may be lost with it: sync the directory above before.
    """
    if fs.is_link(place):
        fs.unlink(place)
        return True
    held = try_lock_directory(place)
    if held is None:
        return False
    try:
        fs.remove_entries(held)
        fs.rmdir(place)
    finally:
        held.release()
    return True


def require_current(directory: OpenDirectory) -> None:
    """Raises `RunMoved` unless the path by which a directory was opened still leads to it.

    Writers call this before they change names in it. They work in the directory that they hold; if its path
    led elsewhere, a checkpoint would be reported durable and readers would not find it.
    """
    if directory.is_current():
        return
    path = directory.path
    if os.fstat(directory.fileno()).st_nlink == 0:
        raise StorageMissing(
            f"the directory {path} was removed after it was opened for writing: create it, or check that its "
            "volume is mounted, and open it again"
        )
    now = os.readlink(f"/proc/self/fd/{directory.fileno()}")
    there = "now leads to another directory" if os.path.lexists(path) else "no longer exists"
    raise RunMoved(
        f"{path} was opened for writing, but it {there}. Nothing was changed at that path. The directory "
        f"that was opened is now at {now}, and its checkpoints are untouched. Restore the path, or close "
        "this run and open it by another path"
    )


def path_to_read(directory: OpenDirectory, name: str = "") -> str:
    """A path to an entry of a held directory, even if the directory's own path now leads elsewhere."""
    return os.path.join(f"/proc/self/fd/{directory.fileno()}", name)


os.register_at_fork(after_in_child=fs.close_exclusive_directories)
