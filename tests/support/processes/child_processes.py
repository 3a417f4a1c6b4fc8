"""Forked processes that do something and end, or are ended; and a parent that never waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""Far more than any child needs; a child that takes longer hangs."""


@dataclass(slots=True)
class Pipe:
    """Messages from a child. Each is written at once, so a kill leaves whole ones."""

    reader: int
    writer: int

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        assert len(data) < select.PIPE_BUF - 4  # atomic
        os.write(self.writer, len(data).to_bytes(4, "little") + data)

    def receive(self, seconds: float = SECONDS) -> Any:
        """The next message; EOFError when the child ended without another."""
        size = int.from_bytes(self._take(4, seconds), "little")
        return pickle.loads(self._take(size, seconds))  # from our own child

    def ready(self) -> bool:
        """Whether there is something to receive."""
        return bool(select.select([self.reader], [], [], 0)[0])

    def drain(self) -> list[Any]:
        """All messages that are there once all writers have closed."""
        found = []
        with contextlib.suppress(EOFError):
            while True:
                found.append(self.receive())
        return found

    def _take(self, nbytes: int, seconds: float) -> bytes:
        data = b""
        deadline = time.monotonic() + seconds
        while len(data) < nbytes:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the child says nothing")
            part = os.read(self.reader, nbytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@dataclass(slots=True)
class Child:
    pid: int
    pipe: Pipe
    status: int | None = None

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit code, negative for a signal. One that does not end is killed, and that fails the test."""
        deadline = time.monotonic() + seconds
        descriptor = os.pidfd_open(self.pid) if self.status is None else -1
        try:
            if self.status is None:
                ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.kill()
                    raise TimeoutError(f"child {self.pid} did not end within {seconds} s")
                self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def forked(work: Callable[..., None], *arguments: object) -> Iterator[Child]:
    """Runs `work` in a forked child, which never returns into the test; it is gone when the block ends."""
    pipe = Pipe(*os.pipe())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(pipe.reader)
            work(pipe, *arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(pipe.writer)
    child = Child(pid, pipe)
    try:
        yield child
    finally:
        child.kill()
        os.close(pipe.reader)


def run_forked(work: Callable[[Pipe], None]) -> list[Any]:
    """Runs `work` in a child to its good end, and returns what it said."""
    with forked(work) as child:
        said = child.pipe.drain()
        assert child.wait() == 0, f"the child failed after saying {said}"
        return said


# --- places that only a child can have ------------------------------------------------------------

_NEW_MOUNTS, _NEW_USERS = 0x0002_0000, 0x1000_0000
_PRIVATE, _READ_ONLY, _REMOUNT = (1 << 14) | (1 << 18), 1, 32


class NotPermitted(Exception):
    """This machine does not let us mount."""


def mount_small(where: Path, nbytes: int) -> None:
    """Gives this process, and no other, a file system of that size at `where`, for as long as it lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS if user == 0 else _NEW_MOUNTS | _NEW_USERS) != 0:
        raise NotPermitted(os.strerror(ctypes.get_errno()))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    target = os.fsencode(where)
    for source, place, kind, flags, options in (
        (None, b"/", None, _PRIVATE, None),
        (b"tmpfs", target, b"tmpfs", 0, b"size=%d" % nbytes),
    ):
        if libc.mount(source, place, kind, ctypes.c_ulong(flags), options) != 0:
            raise NotPermitted(os.strerror(ctypes.get_errno()))


def make_read_only(where: Path) -> None:
    """Of what `mount_small` has mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, os.fsencode(where), None, ctypes.c_ulong(_REMOUNT | _READ_ONLY), None) != 0:
        raise OSError(ctypes.get_errno(), "remount")


def become_nobody() -> None:
    """Gives up root, for whom permissions mean nothing."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
