"""From what the operating system said to what the caller should know."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import (
    CorruptCheckpoint,
    HoldfastError,
    ReadDenied,
    ReadFailed,
    SaveFailed,
    StorageDenied,
    StorageFull,
    StorageMissing,
)

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_BLOCKED = {errno.EEXIST, errno.ENOTDIR}


def save_failed(cause: OSError, target: str) -> SaveFailed:
    """The typed error for a save to `target` that failed with `cause`."""
    where = os.fsdecode(cause.filename) if cause.filename else target
    what = f"{cause.strerror or cause} at {where}"
    safe = "earlier checkpoints are untouched"
    error: SaveFailed
    if cause.errno in _FULL:
        error = StorageFull(
            f"no room to save {target}: {what}; {safe}. Free space or keep fewer checkpoints."
        )
    elif cause.errno in _DENIED:
        advice = (
            "the filesystem is mounted read-only: choose another directory"
            if cause.errno == errno.EROFS
            else f"make it writable for user {os.geteuid()} (chown or chmod), or choose another directory"
        )
        error = StorageDenied(f"cannot save {target}: {what}; {advice}")
    elif cause.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(target)):
        error = StorageMissing(
            f"cannot save {target}: the directory {os.path.dirname(target)} does not exist; "
            "create it, or check that its volume is mounted"
        )
    elif cause.errno in _BLOCKED and (blocker := _in_the_way(where)):
        error = SaveFailed(
            f"cannot save {target}: {blocker} is not a directory; move it away, or choose another path"
        )
    else:
        error = SaveFailed(f"the save of {target} failed and is not durable: {what}; {safe}")
    error.errno = cause.errno
    error.filename = where
    return error


def _in_the_way(path: str) -> str | None:
    """What stands on the way to `path`, or in its place, and is not a directory."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return None if os.path.isdir(path) else path


@contextmanager
def saving(target: str) -> Iterator[None]:
    """Turns any `OSError` of the block into the typed error for a failed save."""
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise save_failed(error, target) from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns any `OSError` of the block into `ReadFailed`, or its kind for what is not allowed."""
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise _read_failed(error, path) from error


def _read_failed(cause: OSError, path: str) -> ReadFailed:
    what = f"cannot read {path}: {cause.strerror or cause}"
    failed: ReadFailed
    if cause.errno in _DENIED:
        failed = ReadDenied(f"{what}; make it readable for user {os.geteuid()} (chown or chmod)")
    else:
        failed = ReadFailed(what)
    failed.errno = cause.errno
    failed.filename = path
    return failed


def require_regular(path: str, shown: str) -> os.stat_result:
    """What `stat` says of a plain file. Anything else in its place (a pipe would block) is damage."""
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise CorruptCheckpoint("this is not a regular file", path=shown)
    return info
