"""A file or a directory that appears whole or not at all, and durable.

For a target ``P/NAME``:

1. Make the directory ``P/.NAME.everystep-convert.partial`` and lock it. If it exists, a killed process left
   it: remove what is in it. If another process holds it, that is `Locked`.
2. The caller writes into it, and syncs every file.
3. Of a directory: sync it, and rename it to ``NAME``. Of a file: rename the file to ``NAME``.
4. Sync ``P``. Of a file: remove the empty directory.

A kill before step 3 leaves nothing that looks complete. The next conversion to the same target removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from everystep.engine import fs
from everystep.engine.fs import OpenDirectory
from everystep.errors import CheckpointExists, Locked
from everystep.store.api import make_parent
from everystep.store.locks import try_lock_directory
from everystep.store.names import PARTIAL
from everystep.store.save_errors import saving

_ATTEMPTS = 4


@contextmanager
def output_file(path: str, *, overwrite: bool) -> Iterator[str]:
    """Yields the path to write a file to. It gets its name when the block ends without an error."""
    with saving(path), _working_directory(path) as held:
        refuse_file(path, overwrite=overwrite)
        working = os.path.join(held.path, os.path.basename(path))
        yield working
        refuse_file(path, overwrite=overwrite)
        (fs.rename if overwrite else fs.rename_new)(working, path)
        fs.sync_dir(os.path.dirname(path))


@contextmanager
def output_directory(path: str) -> Iterator[str]:
    """Yields the directory to write files to. It gets its name when the block ends without an error."""
    with saving(path), _working_directory(path) as held:
        refuse_directory(path)
        yield held.path
        fs.sync_dir(held.path)
        if os.path.isdir(path):
            fs.rmdir(path)  # an empty one; fails if it no longer is
        fs.rename_new(held.path, path)
        fs.sync_dir(os.path.dirname(path))


def refuse_file(path: str, *, overwrite: bool) -> None:
    """`CheckpointExists` unless a file may be written there."""
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) or not os.path.isfile(path):
        raise CheckpointExists(f"{path} exists and is not a file: name another path")
    if not overwrite:
        raise CheckpointExists(
            f"{path} exists: choose another name, or overwrite=True (--force) to replace it"
        )


def refuse_directory(path: str) -> None:
    """`CheckpointExists` unless there is nothing, or an empty directory."""
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointExists(f"{path} exists: choose another path, or remove it")


def sweep(path: str) -> None:
    """Removes what a killed conversion to this path left. What another process holds stays."""
    working = _working_path(path)
    if os.path.isdir(working):
        held = try_lock_directory(working)
        if held is not None:
            _remove(held)


def _working_path(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.everystep-convert{PARTIAL}")


@contextmanager
def _working_directory(path: str) -> Iterator[OpenDirectory]:
    make_parent(path)
    held = _hold(_working_path(path), path)
    try:
        fs.remove_entries(held)
        yield held
    finally:
        _remove(held)


def _hold(working: str, path: str) -> OpenDirectory:
    for _ in range(_ATTEMPTS):
        try:
            fs.mkdir(working)
        except FileExistsError:
            if not os.path.isdir(working) or os.path.islink(working):
                raise
        try:
            held = try_lock_directory(working)
        except FileNotFoundError:
            continue  # its owner has just renamed or removed it
        if held is not None and held.is_current():
            return held
        if held is not None:
            held.release()
    raise Locked(f"{path} is being written by another process: wait for it, or choose another path")


def _remove(held: OpenDirectory) -> None:
    """Removes a working directory, unless it has become the target."""
    try:
        if held.is_current():
            fs.remove_entries(held)
            fs.rmdir(held.path)
    finally:
        held.release()
