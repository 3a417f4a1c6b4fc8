"""Holding directories by their descriptors: a checkpoint's, by writers alone or readers together, and the one
that a writer saves into, so that its path leads no writer elsewhere."""

from __future__ import annotations

import os
import time

from holdfast.engine import fs
from holdfast.engine.fs import HeldDirectory
from holdfast.errors import RunMoved, StorageMissing

LOCK_SECONDS = 60.0
"""A writer holds a checkpoint that is already visible only while it syncs the directory above: as long as the
device takes for that, be it a slow one, or a busy machine's."""


def try_lock_directory(path: fs.Place, *, shared: bool = False) -> HeldDirectory | None:
    """Holds a directory until it is released; None when somebody else does.

    None also when its holder has renamed or removed it just now. Writers hold a checkpoint's directory
    exclusively while they write into it, and a link is none to them; readers share it.
    """
    return fs.hold_directory(path, not shared)


def share_directory(path: fs.Place, timeout: float) -> HeldDirectory | None:
    """Shares a checkpoint's directory with its readers; None when a writer holds it for so long."""
    deadline = time.monotonic() + timeout
    while True:
        held = try_lock_directory(path, shared=True)
        if held is not None or time.monotonic() > deadline:
            return held
        time.sleep(0.002)


def require_current(directory: HeldDirectory) -> None:
    """Raises `RunMoved` unless the path by which a directory was opened still leads to it.

    For writers, before they change names in it: all they do happens in the directory that they hold, and a
    checkpoint that is not where its path says would be reported durable and not be found.
    """
    if directory.is_current():
        return
    path = directory.path
    if os.fstat(directory.fileno()).st_nlink == 0:
        raise StorageMissing(
            f"the directory {path} was removed since it was opened for writing: create it, or check that its "
            "volume is mounted, and open it again"
        )
    now = os.readlink(f"/proc/self/fd/{directory.fileno()}")
    there = "leads to another directory" if os.path.lexists(path) else "does not exist any more"
    raise RunMoved(
        f"{path} {there} since it was opened for writing. Nothing was changed at that path. What was opened "
        f"is now at {now}, and what was saved there is untouched. Let the path lead back, or close this "
        "run and open it by a path that stays"
    )


def path_to_read(directory: HeldDirectory, name: str = "") -> str:
    """A path to what has that name in a directory, whatever the directory's own path leads to by now."""
    return os.path.join(f"/proc/self/fd/{directory.fileno()}", name)


os.register_at_fork(after_in_child=fs.leave_directories_to_the_parent)
