"""Holding a checkpoint's directory: writers alone, readers together, for as long as a descriptor is open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.engine import fs
from holdfast.engine.fs import HeldDirectory

LOCK_SECONDS = 60.0
"""A writer holds a checkpoint that is already visible only while it syncs the directory above: as long as the
device takes for that, be it a slow one, or a busy machine's."""


def try_lock_directory(path: str, *, shared: bool = False) -> HeldDirectory | None:
    """Holds a directory until it is released; None when somebody else does.

    None also when its holder has renamed or removed it just now. Writers hold a checkpoint's directory
    exclusively while they write into it, and a link is none to them; readers share it.
    """
    return fs.hold_directory(path, not shared)


def share_directory(path: str, timeout: float) -> HeldDirectory | None:
    """Shares a checkpoint's directory with its readers; None when a writer holds it for so long."""
    deadline = time.monotonic() + timeout
    while True:
        held = try_lock_directory(path, shared=True)
        if held is not None or time.monotonic() > deadline:
            return held
        time.sleep(0.002)


def make_directory(path: str) -> HeldDirectory | None:
    """Makes a directory that is held from its beginning, as by `try_lock_directory`."""
    return fs.make_directory(path)


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


os.register_at_fork(after_in_child=fs.leave_directories_to_the_parent)
