"""Opening a shelf: a new file if there is none, and typed errors."""

from __future__ import annotations

import errno
import os

from everystep import engine
from everystep.errors import (
    CorruptShelf,
    Locked,
    ReadDenied,
    ReadFailed,
    SaveFailed,
    ShelfNotFound,
    StorageDenied,
    StorageFull,
    UnsupportedShelf,
)
from everystep.shelf import creation
from everystep.store.save_errors import save_failed

DEFAULT_SIZE = 64 << 20


def open_core(path: str, writable: bool, limit: int | None, medium: str) -> engine.NativeShelf:
    """The native side of a shelf. To write, a file is made if there is none, of at most `limit` bytes."""
    if writable and not os.path.lexists(path):
        try:
            creation.create(path, DEFAULT_SIZE if limit is None else limit)
        except SaveFailed:
            raise
        except OSError as error:
            raise save_failed(error, os.path.abspath(path)) from error
    try:
        core = engine.NativeShelf(path, writable, medium)
    except FileNotFoundError:
        raise ShelfNotFound(f"there is no shelf at {path}") from None
    except IsADirectoryError:
        raise ShelfNotFound(f"there is no shelf at {path}: it is a directory") from None
    except PermissionError as error:
        kind = StorageDenied if writable else ReadDenied
        raise kind(f"cannot open the shelf {path}: {error.strerror}; change its owner or mode") from error
    except OSError as error:
        raise _failed(error, path, writable) from error
    except engine.NativeShelfForeign as error:
        raise UnsupportedShelf(f"{path} is not a shelf: {error}") from None
    except engine.NativeShelfNewer as error:
        raise UnsupportedShelf(f"{path} cannot be read: {error}") from None
    except engine.NativeShelfDamaged as error:
        raise CorruptShelf(str(error), path=path) from None
    if core.locked_by_another:
        raise Locked(
            f"the shelf {path} is open for writing elsewhere; it has one writer at a time. "
            "Readers open it with mode='r'"
        )
    return core


def _failed(cause: OSError, path: str, writable: bool) -> SaveFailed | ReadFailed:
    """The typed error of a call that failed while a shelf was opened."""
    full = writable and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    failed = (StorageFull if full else SaveFailed if writable else ReadFailed)(
        f"cannot open the shelf {path}: {cause.strerror or cause}. The last commit is as it was"
        + ("; free space, and open it again" if full else "")
    )
    failed.errno = cause.errno
    return failed
