"""Durable file-system operations, all through the native seam. Each raises `OSError` naming call and path."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast import _native
from holdfast._native import (
    HeldDirectory,
    PendingFile,
    exchange,
    exists,
    hold_directory,
    identity,
    leave_directories_to_the_parent,
    make_directory,
    mkdir,
    rename,
    rename_new,
    rmdir,
    sync_dir,
    unlink,
)
from holdfast.engine.transfer import WriteJob

__all__ = [
    "HeldDirectory",
    "PendingFile",
    "anchor",
    "exchange",
    "exists",
    "hold_directory",
    "identity",
    "leave_directories_to_the_parent",
    "make_directories",
    "make_directory",
    "mkdir",
    "remove_tree",
    "rename",
    "rename_new",
    "rmdir",
    "sync",
    "sync_dir",
    "unlink",
    "write_file",
]


def write_file(
    path: str | os.PathLike[str], data: bytes | bytearray, more: bytes = b"", *, recycle: bool = False
) -> PendingFile:
    """Writes a small file whole: `data`, and `more` behind it.

    It is durable after `sync` of the returned object and its directory.
    """
    return _native.PendingFile(path, data, recycle, more)


def sync(written: Sequence[WriteJob | PendingFile], directory: str | None = None) -> None:
    """Makes written files, and the directory that names them, durable in one go, and closes them.

    A failed sync is final: the kernel may have dropped the data, and a second sync would lie about it.
    """
    _native.sync([item.native if isinstance(item, WriteJob) else item for item in written], directory)


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

    Whoever made them may not have synced them, or was killed before: what is durable inside of a directory
    would be lost with its name.
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
            return  # where we may not even look, others have put us
        _anchored.add(known)
    _anchored.add(here)


# By name, and with the time it was made: it may be moved, and once removed it leaves its inode to the next.
_anchored: set[tuple[str, tuple[int, int, int]]] = set()


def remove_tree(path: str) -> None:
    """Removes a checkpoint directory: files and one level of directories is all there is in one.

    Of a link to one, only the link: what it leads to is somebody else's.
    """
    if os.path.islink(path):
        unlink(path)
        return
    with os.scandir(path) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(entry.path)
        else:
            unlink(entry.path)
    rmdir(path)
