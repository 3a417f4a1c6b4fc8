"""What goes wrong while a checkpoint is read: typed errors, retries, and files that are not plain files."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

from everystep.errors import (
    CorruptCheckpoint,
    EverystepError,
    IncompleteCheckpoint,
    OutOfResources,
    ReadDenied,
    ReadFailed,
)

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS}
_DEVICE = {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG}
"""Errors of a medium that cannot be read, or of a file system that is damaged itself."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
"""A file is missing, or something else is in its place."""

READ_ATTEMPTS = 3
"""A device may fail once and recover; an error that it repeats so many times counts."""
_PAUSE_SECONDS = 0.02

_T = TypeVar("_T")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns any `OSError` of the block into `ReadFailed` or one of its subclasses."""
    try:
        yield
    except EverystepError:
        raise
    except OSError as error:
        raise read_failed(error, path) from error


def read_failed(cause: OSError, path: str) -> ReadFailed:
    """The typed error for a read of `path` that failed with `cause`."""
    what = f"cannot read {path}: {cause.strerror or cause}"
    if cause.errno in _DENIED:
        what += f"; make it readable for user {os.geteuid()} (chown or chmod)"
    elif cause.errno in _LACKING:
        what += f". The checkpoint may be intact: {_remedy(cause.errno)}, and try again"
    return read_error(what, cause.errno, path)


def read_error(message: str, code: int | None, path: str | None) -> ReadFailed:
    """The typed error for a read that the system failed with this errno."""
    kind = OutOfResources if code in _LACKING else ReadDenied if code in _DENIED else ReadFailed
    failed = kind(message)
    failed.errno = code
    failed.filename = path
    return failed


def _remedy(code: int | None) -> str:
    if code in (errno.EMFILE, errno.ENFILE):
        return "close files that this process holds open, or raise the limit (ulimit -n)"
    return "free memory, or raise the limits of this process (ulimit -v, ulimit -u)"


def shows_damage(error: Exception) -> bool:
    """Whether this error means that the checkpoint is damaged. Otherwise it may be intact.

    Damage is a wrong checksum, a violation of the format, a missing file, or a device or file system that
    fails to read repeatedly (`patiently`). A file on a volume of a host that does not take part may exist.
    """
    if isinstance(error, IncompleteCheckpoint) and error.out_of_reach:
        return False
    if isinstance(error, ReadFailed):
        return error.errno in _DEVICE or error.errno in _ABSENT
    return isinstance(error, CorruptCheckpoint)


def patiently(read: Callable[[], _T]) -> _T:
    """Calls `read`, and retries after an error of the device. A repeated error is raised."""
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read()
        except ReadFailed as error:
            if error.errno not in _DEVICE:
                raise
        time.sleep(_PAUSE_SECONDS)
    return read()


def read_up_to(file: BinaryIO, nbytes: int) -> bytearray:
    """Reads at most `nbytes` of a file. The result is mutable: a manifest is checked without a copy."""
    data = bytearray(nbytes)
    del data[file.readinto(data) :]  # type: ignore[attr-defined]
    return data


def require_regular(path: str, shown: str) -> os.stat_result:
    """The `stat` of a plain file. Anything else at this path is damage."""
    return _regular(os.stat(path), shown)


def open_stored(path: str, shown: str) -> BinaryIO:
    """Opens a plain file of a checkpoint for reading. A pipe is refused: it could block.

    A link to a plain file is followed: some caches and archives use links, and checksums find wrong bytes.
    """

    def opener(path: str, flags: int) -> int:
        try:
            opened = os.open(path, flags | os.O_NONBLOCK)
        except BlockingIOError:  # another process, such as a file server, holds a lease on it: wait for it
            require_regular(path, shown)
            return os.open(path, flags)
        try:
            _regular(os.fstat(opened), shown)
        except BaseException:
            os.close(opened)
            raise
        return opened

    return open(path, "rb", opener=opener)


def _regular(info: os.stat_result, shown: str) -> os.stat_result:
    if not stat.S_ISREG(info.st_mode):
        raise CorruptCheckpoint("this is not a regular file", path=shown)
    return info
