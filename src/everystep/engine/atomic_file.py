"""A file that is replaced whole or not at all. All that replaces a file, or writes one aside, comes here."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from everystep.engine import fs
from everystep.engine.fs import NewFile, OpenDirectory, PathOrEntry

PARTIAL = ".partial"


def replace_file(
    name: str,
    data: bytes,
    *,
    within: OpenDirectory | None = None,
    overwrite: bool = True,
    synced: bool = True,
) -> None:
    """Writes `data` to the file `name`: a path, or a name in the directory `within`, which has one writer.

    Durable on return unless `synced` is false, for what may be lost. Without `overwrite`, a file that exists
    is a `FileExistsError`. A kill may leave a file ``NAME.partial`` in `within`, else ``NAME.HEX.partial``.
    """
    if within is None:
        aside = f"{name}.{secrets.token_hex(8)}{PARTIAL}"
        _replace(aside, name, _directory(name), data, overwrite=overwrite, synced=synced)
        return
    left, target = within.at(name + PARTIAL), within.at(name)
    try:
        _replace(left, target, within, data, overwrite=overwrite, synced=synced)
    except FileExistsError:
        if not overwrite and fs.exists(target):
            raise
        # A writer that was killed had left its file, which is gone now.
        _replace(left, target, within, data, overwrite=overwrite, synced=synced)


def _replace(
    aside: PathOrEntry,
    target: PathOrEntry,
    directory: PathOrEntry | OpenDirectory,
    data: bytes,
    *,
    overwrite: bool,
    synced: bool,
) -> None:
    try:
        with fs.write_file(aside, data) as written:
            if synced:
                fs.sync([written], directory)
        (fs.rename if overwrite else fs.rename_new)(aside, target)
        if synced:
            fs.sync_dir(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            fs.unlink(aside)
        raise


@contextmanager
def file_to_replace(path: str, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which gets its name, and is durable, when the block ends without an error."""
    aside = f"{path}.{secrets.token_hex(8)}{PARTIAL}"
    try:
        with synced_file(aside) as file:
            yield file
        (fs.rename if overwrite else fs.rename_new)(aside, path)
        fs.sync_dir(_directory(path))
    except BaseException:
        with contextlib.suppress(OSError):
            fs.unlink(aside)
        raise


@contextmanager
def synced_file(path: str) -> Iterator[BinaryIO]:
    """A new file to write. Its bytes are durable when the block ends. Its directory still needs a sync."""
    native = NewFile(path)
    try:
        with io.BufferedWriter(_Raw(native)) as file:
            yield file
            file.flush()
            native.sync()
    finally:
        native.close()


class _Raw(io.RawIOBase):
    """What Python's writers need of a file. The writes pass the seam, too."""

    def __init__(self, native: NewFile) -> None:
        self._native = native
        self._at = self._end = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        self._native.write(self._at, data)
        self._at += nbytes
        self._end = max(self._end, self._at)
        return nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at


def _directory(path: str) -> str:
    return os.path.dirname(os.path.abspath(path))
