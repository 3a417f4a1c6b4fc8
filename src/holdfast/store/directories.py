"""Holding a checkpoint's directory: writers alone, readers together, for as long as a descriptor is open."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


def try_lock_directory(path: str, kind: int = fcntl.LOCK_EX) -> int | None:
    """Holds a directory until the descriptor is given to `unlock_directory`; None when somebody else does.

    Writers hold a checkpoint's directory exclusively while they write into it, readers share it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            if kind == fcntl.LOCK_EX:
                _exclusive.add(descriptor)
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or renamed or removed by its holder just now: not ours either way
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def unlock_directory(descriptor: int) -> None:
    """Said aloud: closing alone would leave the lock to a child forked meanwhile, for as long as it lives."""
    _exclusive.discard(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextmanager
def held_directory(path: str) -> Iterator[str]:
    """A directory by a name that leads to it, and to no other, whatever has its path meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    name = f"/proc/self/fd/{descriptor}"
    try:
        yield name
    except OSError as error:
        if error.filename is not None and os.fsdecode(error.filename).startswith(name):
            error.filename = path + os.fsdecode(error.filename)[len(name) :]
        raise
    finally:
        os.close(descriptor)


_exclusive: set[int] = set()


def _leave_locks_to_the_parent() -> None:
    """In a forked child: were the parent killed while it writes, the child would hold its directories."""
    while _exclusive:
        os.close(_exclusive.pop())


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)
