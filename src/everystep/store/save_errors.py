"""Typed errors for saves whose system calls failed. They say what happened and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from everystep.errors import (
    EverystepError,
    SaveFailed,
    StorageDenied,
    StorageFull,
    StorageMissing,
    as_save_failure,
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
            f"no space to save {target}: {what}; {safe}. Free space or keep fewer checkpoints."
        )
    elif cause.errno in _DENIED:
        advice = (
            "the filesystem is read-only: choose another directory"
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
    """The part of `path`, or `path` itself, that exists and is not a directory."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return None if os.path.isdir(path) else path


def as_failed_save(error: BaseException, target: str) -> BaseException:
    """The typed error for what ended a save to `target`: the same, unless the system or a rank raised it."""
    if isinstance(error, OSError) and not isinstance(error, EverystepError):
        return save_failed(error, target)
    return as_save_failure(error)


@contextmanager
def saving(target: str) -> Iterator[None]:
    """Turns any `OSError` of the block, and any error of ranks, into the typed error for a failed save."""
    try:
        yield
    except Exception as error:
        failed = as_failed_save(error, target)
        try:
            if failed is error:
                raise
            raise failed from error
        finally:
            del failed  # else its traceback, which has this frame, would keep itself alive
