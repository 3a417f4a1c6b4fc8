"""Durable file-system operations, all through the native seam. Each raises `OSError` naming call and path.

A place is a path, or an `Entry`: a name in an open directory (`OpenDirectory.at`). What acts on an entry acts
in that very directory, whatever its path leads to by then.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from everystep import _native
from everystep._native import (
    Entry,
    NewFile,
    OpenDirectory,
    PendingFile,
    close_exclusive_directories,
    exchange,
    exists,
    identity,
    is_link,
    link,
    lock_directory,
    make_directory,
    mkdir,
    open_directory,
    rename,
    rename_new,
    rmdir,
    sync_dir,
    sync_file,
    unlink,
)
from everystep.engine.probe import choose_backend
from everystep.engine.transfer import WriteJob, WritePiece, write
from everystep.engine.tuning import ALIGNMENT, SAVING

__all__ = [
    "Entry",
    "NewFile",
    "OpenDirectory",
    "PathOrEntry",
    "PendingFile",
    "anchor",
    "close_exclusive_directories",
    "exchange",
    "exists",
    "identity",
    "is_link",
    "link",
    "lock_directory",
    "make_directories",
    "make_directory",
    "mkdir",
    "open_directory",
    "open_regular",
    "remove_entries",
    "remove_tree",
    "rename",
    "rename_new",
    "rmdir",
    "sync",
    "sync_dir",
    "sync_file",
    "unlink",
    "write_file",
    "write_synced",
]

PathOrEntry: TypeAlias = str | os.PathLike[str] | Entry


def write_file(
    path: PathOrEntry, data: bytes | bytearray | memoryview, more: bytes = b"", *, recycle: bool = False
) -> PendingFile:
    """Writes a small file whole: `data`, and `more` behind it.

    It is durable after `sync` of the returned object and its directory, which closes it. Use it in a `with`
    block: an error or interrupt before the sync then closes it, too. Others who open a recycled file wait as
    long as it is open, and a traceback that is kept would keep it open. With `recycle` an existing file is
    overwritten in place, unless others have it open or mapped: then a new one takes its name (`fresh`).
    """
    return _native.PendingFile(path, data, recycle, more)


def open_regular(name: str, directory: int | None = None, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file: of no pipe, which would be waited for, and never through a link.

    Anything else in its place is an `OSError`. `directory`: the descriptor of the one that it is in.
    """
    opened = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(f"{name} is not a regular file")
    except BaseException:
        os.close(opened)
        raise
    return opened


def sync(
    written: Sequence[WriteJob | PendingFile], directory: PathOrEntry | OpenDirectory | None = None
) -> None:
    """Makes written files, and the directory that names them, durable in one go, and closes them.

    A failed sync is final: the kernel may have dropped the data, and a second sync would lie about it.
    """
    _native.sync([item.native if isinstance(item, WriteJob) else item for item in written], directory)


def write_synced(
    path: str, nbytes: int, pieces: Sequence[WritePiece], progress: Callable[[int], None] | None = None
) -> None:
    """Writes and syncs a file of exactly `nbytes`, by the backend that suits its directory.

    `progress` is called as by `WriteJob.wait`. The directory is left to the caller to sync.
    """
    tuning = replace(SAVING, backend=choose_backend(os.path.dirname(path)))
    # Direct I/O wants whole blocks, and readers the exact size: the end is cut off again.
    with write(path, -(-nbytes // ALIGNMENT) * ALIGNMENT, pieces, tuning=tuning) as job:
        job.wait(progress=progress)
        job.truncate(nbytes)
        sync([job])


def make_directories(path: str) -> None:
    """``mkdir -p``, after which every name on the way is durable."""
    missing = []
    at = path
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at) or os.curdir
    for directory in reversed(missing):
        try:
            mkdir(directory)
        except FileExistsError:
            # Another process made it meanwhile, which serves as well; anything else in its place does not.
            if not os.path.isdir(directory):
                raise
    anchor(path)


def anchor(directory: str, *, once: bool = False) -> None:
    """Makes the names on the way to a directory durable; with `once`, only when this process first asks.

    The process that made them may not have synced them. What is durable inside of a directory would be lost
    with its name.
    """
    here = directory, identity(directory)
    if once and here in _anchored:
        return
    at = os.path.realpath(directory)
    while not os.path.ismount(at):
        known = at, identity(at)
        if once and known in _anchored:
            break
        at = os.path.dirname(at)
        try:
            sync_dir(at)
        except PermissionError:
            return  # directories above that we may not read were there before
        _anchored.add(known)
    _anchored.add(here)


# By name, and with the time it was made: it may be moved, and once removed it leaves its inode to the next.
_anchored: set[tuple[str, tuple[int, int, int]]] = set()


def remove_tree(path: PathOrEntry) -> None:
    """Removes a checkpoint directory: files and one level of directories is all there is in one.

    Of a link to one, it removes only the link.
    """
    if is_link(path):
        unlink(path)
        return
    directory = open_directory(path, False)
    try:
        remove_entries(directory)
    finally:
        directory.release()
    rmdir(path)


def remove_entries(directory: OpenDirectory) -> None:
    """Removes all there is in a directory."""
    with os.scandir(directory.fileno()) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        (remove_tree if is_directory else unlink)(directory.at(name))
