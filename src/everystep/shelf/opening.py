"""Opening a shelf: a new file if there is none, and typed errors.

A new shelf is complete under its path, or not there at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

from everystep import engine
from everystep.engine import fs
from everystep.engine.atomic_file import replace_file
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
from everystep.store.save_errors import save_failed

DEFAULT_SIZE = 64 << 20


def open_core(path: str, writable: bool, limit: int | None, medium: str) -> engine.NativeShelf:
    """The native side of a shelf. To write, a file is made if there is none, of at most `limit` bytes."""
    if writable and not os.path.lexists(path):
        try:
            _create(path, DEFAULT_SIZE if limit is None else limit)
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


def _create(path: str, limit_nbytes: int) -> None:
    """Makes an empty shelf. If another process makes one at the same time, either serves."""
    with contextlib.suppress(FileExistsError):
        replace_file(path, engine.empty_shelf(secrets.randbits(64), limit_nbytes), overwrite=False)
    directory = os.path.dirname(os.path.abspath(path))
    fs.sync_dir(directory)  # also if another process made it
    fs.anchor(directory, once=True)


def medium_of_directory(directory: str) -> str:
    """The medium that a shelf in a directory would have, found by trying it.

    With the instruction that writes processor caches back, where that is what commits do.
    """
    trial = os.path.join(directory, f".everystep-{secrets.token_hex(8)}.partial")
    try:
        with fs.write_file(trial, bytes(4096)):
            pass
        medium = engine.shelf_medium(trial)
    except OSError as error:
        return f"unknown: {error.strerror or error}"
    finally:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(trial)
    if medium == "persistent memory":
        return f"{medium} (MAP_SYNC, {engine.write_back_instruction()})"
    return f"{medium} ({'not durable' if medium == 'memory' else 'written and synced'})"
