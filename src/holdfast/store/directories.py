"""Holding a checkpoint's directory: writers alone, readers together, for as long as a descriptor is open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.engine import fs


def try_lock_directory(path: str, *, shared: bool = False) -> int | None:
    """Holds a directory until the descriptor is given to `unlock_directory`; None when somebody else does.

    None also when its holder has renamed or removed it just now. Writers hold a checkpoint's directory
    exclusively while they write into it, readers share it.
    """
    descriptor = fs.hold_directory(path, not shared)
    if descriptor is not None and not shared:
        _exclusive.add(descriptor)
    return descriptor


def make_directory(path: str) -> int | None:
    """Makes a directory that is held from its beginning, as by `try_lock_directory`."""
    descriptor = fs.make_directory(path)
    if descriptor is not None:
        _exclusive.add(descriptor)
    return descriptor


def unlock_directory(descriptor: int) -> None:
    _exclusive.discard(descriptor)
    fs.release_directory(descriptor)


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
