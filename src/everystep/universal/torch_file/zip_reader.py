"""Where the records of a zip archive lie, as `torch.save` writes them, and whether their bytes are right.

Python's `zipfile` parses the archive's directory, zip64 included. This module trusts no number in it: every
record lies inside of the archive, or the archive is reported as corrupt. An archive may be a part of a file
(torch DCP stores many in one). A record's own header is read when that record is asked for. Bytes are
compared with their CRCs only where that is asked for (`everystep.universal.checking`).
"""

from __future__ import annotations

import errno
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from zipfile import ZipInfo

from everystep.errors import CorruptCheckpoint, UnsupportedSource

_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_DIRECTORY_NBYTES = 1 << 30
_BLOCK_NBYTES = 1 << 20
_ENCRYPTED = 1
_DAMAGE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    NotImplementedError,
    UnicodeDecodeError,
    ValueError,
    OverflowError,
    struct.error,
)

LOCAL_MAGIC = b"PK\x03\x04"
LOCAL_NBYTES = _LOCAL.size
"""The length of a record's own header, without its name."""


Place = tuple[str, int, int]
"""An archive: the path of its file, where it begins there, and its size."""
_opened: ContextVar[dict[Place, None] | None] = ContextVar("opened", default=None)


@contextmanager
def noting_archives() -> Iterator[dict[Place, None]]:
    """Collects the archives that readers open in the block, each once."""
    found: dict[Place, None] = {}
    token = _opened.set(found)
    try:
        yield found
    finally:
        _opened.reset(token)


class OpenFile:
    """A file, or a part of one, that is read at positions; reads outside of it are corruption, not short."""

    def __init__(self, path: str, start: int = 0, nbytes: int | None = None) -> None:
        self.path = path
        self.start = start
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._descriptor).st_size
            self.nbytes = size - start if nbytes is None else nbytes
            if not 0 <= start <= start + self.nbytes <= size:
                raise CorruptCheckpoint(
                    f"bytes {start} to {start + self.nbytes} are needed, but the file has {size}", path=path
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from `offset` on, which counts from the start of the part."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise CorruptCheckpoint(
                f"bytes {offset} to {offset + nbytes} are needed, but there are {self.nbytes}: "
                "the file was cut short or damaged",
                path=self.path,
            )
        pieces: list[bytes] = []
        at = self.start + offset
        while nbytes:
            piece = os.pread(self._descriptor, nbytes, at)
            if not piece:
                raise CorruptCheckpoint("the file became shorter while it was read", path=self.path)
            pieces.append(piece)
            at += len(piece)
            nbytes -= len(piece)
        return b"".join(pieces)


class Window(io.RawIOBase):
    """A part of an open file, as libraries that read files take one."""

    def __init__(self, file: OpenFile, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "a position before the start", self._file.path)
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        nbytes = left if size is None or size < 0 else min(size, left)
        if nbytes > _MAX_DIRECTORY_NBYTES:
            raise UnsupportedSource(f"{self._file.path}: {nbytes} bytes would be read at once")
        data = self._file.read(self._start + self._at, nbytes)
        self._at += nbytes
        return data

    def readinto(self, into: Any) -> int:
        data = self.read(len(into))
        into[: len(data)] = data
        return len(data)


class ZipRecords:
    """The records of one archive, by name."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._records: dict[str, ZipInfo] = {}
        try:
            with zipfile.ZipFile(Window(file, 0, file.nbytes)) as archive:
                self._directory_start = archive.start_dir
                infos = archive.infolist()
        except (CorruptCheckpoint, UnsupportedSource):
            raise
        except (*_DAMAGE, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise self._corrupt(f"the archive's directory is missing or damaged: {error}") from None
        for info in infos:
            self._add(info)
        if min((info.header_offset for info in infos), default=0):
            raise self._corrupt("there are other bytes before the first record")  # zipfile passes over them
        noted = _opened.get()
        if noted is not None:
            noted[file.path, file.start, file.nbytes] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._records)

    @property
    def nbytes(self) -> int:
        """What all records take together, not compressed."""
        return sum(record.file_size for record in self._records.values())

    @property
    def have_crcs(self) -> bool:
        """Whether all records with bytes have one; `torch.save` writes 0 if told to compute none."""
        return all(record.CRC or not record.file_size for record in self._records.values())

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def range_of(self, name: str) -> tuple[int, int]:
        """Where the bytes of a record begin, from the start of the file, and how many there are."""
        record = self._records.get(name)
        if record is None:
            raise self._corrupt(f"the archive has no record {name!r}")
        if record.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedSource(
                f"{self._file.path}: record {name!r} is compressed; torch.save does not compress. "
                "Save the file again with torch.save"
            )
        return self._file.start + self._begin(record), record.file_size

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a record of at most `limit` bytes."""
        begin, nbytes = self.range_of(name)
        if nbytes > limit:
            raise UnsupportedSource(
                f"{self._file.path}: record {name!r} has {nbytes} bytes; the limit is {limit}"
            )
        return self._file.read(begin - self._file.start, nbytes)

    def wrong(self, name: str) -> str | None:
        """What is wrong with the bytes of a record; None if they match their CRC, or none was written."""
        record = self._records[name]
        if record.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return None
        crc, nbytes = 0, 0
        try:
            for made in self._blocks(record):
                crc, nbytes = zlib.crc32(made, crc), nbytes + len(made)
                if nbytes > record.file_size:
                    return f"record {name!r} has more than the {record.file_size} bytes that it says"
        except zlib.error as error:
            return f"record {name!r} cannot be inflated: {error}"
        if nbytes != record.file_size:
            return f"record {name!r} has {nbytes} bytes, and says {record.file_size}"
        return f"the bytes of record {name!r} do not match their CRC" if record.CRC not in (0, crc) else None

    def _blocks(self, record: ZipInfo) -> Iterator[bytes]:
        """The bytes of a record, inflated, a block at a time."""
        inflate = zlib.decompressobj(-15) if record.compress_type == zipfile.ZIP_DEFLATED else None
        begin = self._begin(record)
        for start in range(0, record.compress_size, _BLOCK_NBYTES):
            data = self._file.read(begin + start, min(_BLOCK_NBYTES, record.compress_size - start))
            if inflate is None:
                yield data
                continue
            # A full block may leave more inside of the decompressor, also when all input was taken.
            while made := inflate.decompress(data, _BLOCK_NBYTES):
                yield made
                data = inflate.unconsumed_tail

    def _begin(self, record: ZipInfo) -> int:
        """Where the bytes of a record begin in the archive."""
        begin = data_start(self._file.read(record.header_offset, LOCAL_NBYTES), record.header_offset)
        if begin is None:
            raise self._corrupt(f"record {record.filename!r} does not begin where the archive says")
        if begin + record.compress_size > self._directory_start:
            raise self._corrupt(f"record {record.filename!r} reaches past the records of the archive")
        return begin

    def _add(self, info: ZipInfo) -> None:
        name, nbytes = info.filename, info.compress_size
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedSource(f"{self._file.path}: record {name!r} is encrypted")
        if info.compress_type == zipfile.ZIP_STORED and nbytes != info.file_size:
            raise self._corrupt(f"record {name!r} has two sizes, {nbytes} and {info.file_size}")
        if info.header_offset < 0 or info.header_offset + LOCAL_NBYTES + nbytes > self._directory_start:
            raise self._corrupt(f"record {name!r} reaches past the records of the archive")
        if name in self._records:
            raise self._corrupt(f"the archive has two records {name!r}")
        self._records[name] = info

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self._file.path)


def data_start(header: bytes, at: int) -> int | None:
    """Where a record's bytes begin, which only its own header at `at` knows; None if that is no header."""
    if len(header) < LOCAL_NBYTES or not header.startswith(LOCAL_MAGIC):
        return None
    *_, name_nbytes, extra_nbytes = _LOCAL.unpack(header)
    return int(at + LOCAL_NBYTES + name_nbytes + extra_nbytes)
