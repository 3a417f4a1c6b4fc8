"""Where the records of a zip archive lie, as `torch.save` writes them, and whether their bytes are right.

Owns the zip format, zip64 included, and trusts no number in it: every record lies inside of the archive, or
the archive is reported as corrupt. An archive may be a part of a file (torch DCP stores many in one). Reads
the central directory at once, and a record's local header when that record is asked for. Bytes are compared
with their CRCs only where that is asked for (`everystep.universal.checking`).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from everystep.errors import CorruptCheckpoint, UnsupportedSource

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 65535
_MAX_DIRECTORY_NBYTES = 1 << 30
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_STORED, _DEFLATED = 0, 8
_BLOCK_NBYTES = 1 << 20

LOCAL_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class _Record:
    header: int
    nbytes: int
    stored_nbytes: int
    method: int
    crc: int


Place = tuple[str, int, int]
"""An archive: the path of its file, where it begins there, and its size."""
_opened: ContextVar[dict[Place, None] | None] = ContextVar("opened", default=None)


@contextmanager
def noting_archives() -> Iterator[dict[Place, None]]:
    """Inside of this, the archives that readers open are noted, each once."""
    found: dict[Place, None] = {}
    token = _opened.set(found)
    try:
        yield found
    finally:
        _opened.reset(token)


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file."""

    offset: int
    nbytes: int


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


class ZipRecords:
    """The records of one archive, by name."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        begin, nbytes, count = self._find_directory()
        self._directory_start = begin
        self._records = self._parse_directory(file.read(begin, nbytes), count)
        noted = _opened.get()
        if noted is not None:
            noted[file.path, file.start, file.nbytes] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._records)

    @property
    def nbytes(self) -> int:
        """What all records take together, not compressed."""
        return sum(record.nbytes for record in self._records.values())

    @property
    def have_crcs(self) -> bool:
        """Whether all records with bytes have one; `torch.save` writes 0 if told to compute none."""
        return all(record.crc or not record.nbytes for record in self._records.values())

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def extent(self, name: str) -> Extent:
        """Where the bytes of a record lie in the file (from the start of the file, not of the archive)."""
        record = self._records.get(name)
        if record is None:
            raise self._corrupt(f"the archive has no record {name!r}")
        if record.method != _STORED:
            raise UnsupportedSource(
                f"{self._file.path}: record {name!r} is compressed; torch.save does not compress. "
                "Save the file again with torch.save"
            )
        return Extent(self._file.start + self._begin(name, record), record.nbytes)

    def wrong(self, name: str) -> str | None:
        """What is wrong with the bytes of a record; None if they match their CRC, or none was written."""
        record = self._records[name]
        if record.method not in (_STORED, _DEFLATED):
            return None
        crc, nbytes = 0, 0
        try:
            for made in self._blocks(name, record):
                crc, nbytes = zlib.crc32(made, crc), nbytes + len(made)
                if nbytes > record.nbytes:
                    return f"record {name!r} has more than the {record.nbytes} bytes that it says"
        except zlib.error as error:
            return f"record {name!r} cannot be inflated: {error}"
        if nbytes != record.nbytes:
            return f"record {name!r} has {nbytes} bytes, and says {record.nbytes}"
        return f"the bytes of record {name!r} do not match their CRC" if record.crc not in (0, crc) else None

    def _blocks(self, name: str, record: _Record) -> Iterator[bytes]:
        """The bytes of a record, inflated, a block at a time."""
        inflate = zlib.decompressobj(-15) if record.method == _DEFLATED else None
        begin = self._begin(name, record)
        for start in range(0, record.stored_nbytes, _BLOCK_NBYTES):
            data = self._file.read(begin + start, min(_BLOCK_NBYTES, record.stored_nbytes - start))
            if inflate is None:
                yield data
                continue
            # A full block may leave more inside of the decompressor, also when all input was taken.
            while made := inflate.decompress(data, _BLOCK_NBYTES):
                yield made
                data = inflate.unconsumed_tail

    def _begin(self, name: str, record: _Record) -> int:
        """Where the bytes of a record begin in the archive, behind a header of their own."""
        header = self._file.read(record.header, _LOCAL.size)
        magic, _, _, _, _, _, _, _, _, name_nbytes, extra_nbytes = _LOCAL.unpack(header)
        if magic != LOCAL_MAGIC:
            raise self._corrupt(f"record {name!r} does not begin where the archive says")
        begin = record.header + _LOCAL.size + name_nbytes + extra_nbytes
        if begin + record.stored_nbytes > self._directory_start:
            raise self._corrupt(f"record {name!r} reaches past the records of the archive")
        return int(begin)

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a record of at most `limit` bytes."""
        extent = self.extent(name)
        if extent.nbytes > limit:
            raise UnsupportedSource(
                f"{self._file.path}: record {name!r} has {extent.nbytes} bytes; the limit is {limit}"
            )
        return self._file.read(extent.offset - self._file.start, extent.nbytes)

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self._file.path)

    def _find_directory(self) -> tuple[int, int, int]:
        file = self._file
        tail_nbytes = min(file.nbytes, _END.size + _MAX_COMMENT)
        tail_start = file.nbytes - tail_nbytes
        # Without a comment, which is how torch writes archives, the end record is the last 22 bytes.
        tail = file.read(file.nbytes - min(_END.size, tail_nbytes), min(_END.size, tail_nbytes))
        found = self._end_record(tail)
        if found is None:
            tail = file.read(tail_start, tail_nbytes)
            found = self._end_record(tail)
        if found is None:
            raise self._corrupt("the archive's directory is missing at the end: the file was cut short")
        at = file.nbytes - len(tail) + found
        _, disk, start_disk, _, count, nbytes, begin, _ = _END.unpack_from(tail, found)
        if disk not in (0, _FULL16) or start_disk not in (0, _FULL16):
            raise self._corrupt("the archive has several volumes")
        if _FULL32 in (nbytes, begin) or count == _FULL16:
            begin, nbytes, count, at = self._zip64(at, begin, nbytes, count)
        if begin + nbytes > at:
            raise self._corrupt("the archive's directory does not lie inside of the archive")
        if nbytes > _MAX_DIRECTORY_NBYTES:
            raise UnsupportedSource(f"{file.path}: the archive's directory has {nbytes} bytes")
        return begin, nbytes, count

    @staticmethod
    def _end_record(tail: bytes) -> int | None:
        at = tail.rfind(b"PK\x05\x06")
        while at >= 0:
            if at + _END.size <= len(tail):
                comment_nbytes = int.from_bytes(tail[at + 20 : at + 22], "little")
                if at + _END.size + comment_nbytes == len(tail):
                    return at
            at = tail.rfind(b"PK\x05\x06", 0, at)
        return None

    def _zip64(self, end: int, begin: int, nbytes: int, count: int) -> tuple[int, int, int, int]:
        at = end - _END64_LOCATOR.size
        if at < 0:
            raise self._corrupt("the archive's zip64 record is missing")
        magic, _, where, _ = _END64_LOCATOR.unpack(self._file.read(at, _END64_LOCATOR.size))
        if magic != b"PK\x06\x07":
            if begin == _FULL32 or nbytes == _FULL32:
                raise self._corrupt("the archive's zip64 record is missing")
            return begin, nbytes, count, end  # exactly 65535 records
        fields = _END64.unpack(self._file.read(where, _END64.size))
        if fields[0] != b"PK\x06\x06":
            raise self._corrupt("the archive's zip64 record is not where the archive says")
        return fields[9], fields[8], fields[7], where

    def _parse_directory(self, data: bytes, count: int) -> dict[str, _Record]:
        records: dict[str, _Record] = {}
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > len(data):
                raise self._corrupt("the archive's directory ends in the middle of a record")
            (
                magic,
                _,
                _,
                flags,
                method,
                _,
                _,
                crc,
                stored,
                nbytes,
                name_nbytes,
                extra_nbytes,
                comment_nbytes,
                _,
                _,
                _,
                header,
            ) = _ENTRY.unpack_from(data, at)
            if magic != b"PK\x01\x02":
                raise self._corrupt("the archive's directory is damaged")
            at += _ENTRY.size
            end = at + name_nbytes + extra_nbytes + comment_nbytes
            if end > len(data):
                raise self._corrupt("the archive's directory ends in the middle of a record")
            try:
                name = data[at : at + name_nbytes].decode("utf-8")
            except UnicodeDecodeError:
                raise self._corrupt("a name in the archive's directory is damaged") from None
            if _FULL32 in (nbytes, stored, header):
                extra = data[at + name_nbytes : at + name_nbytes + extra_nbytes]
                nbytes, stored, header = self._wide(name, extra, nbytes, stored, header)
            at = end
            if flags & 1:
                raise UnsupportedSource(f"{self._file.path}: record {name!r} is encrypted")
            if method == _STORED and stored != nbytes:
                raise self._corrupt(f"record {name!r} has two sizes, {stored} and {nbytes}")
            if header + _LOCAL.size + stored > self._directory_start:
                raise self._corrupt(f"record {name!r} reaches past the records of the archive")
            if name in records:
                raise self._corrupt(f"the archive has two records {name!r}")
            records[name] = _Record(header, nbytes, stored, method, crc)
        return records

    def _wide(self, name: str, extra: bytes, nbytes: int, stored: int, header: int) -> tuple[int, int, int]:
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            at += 4
            if kind == 1:
                values = [
                    int.from_bytes(extra[i : i + 8], "little")
                    for i in range(at, min(at + size, len(extra)) - 7, 8)
                ]
                wide = iter(values)
                try:
                    nbytes = next(wide) if nbytes == _FULL32 else nbytes
                    stored = next(wide) if stored == _FULL32 else stored
                    header = next(wide) if header == _FULL32 else header
                except StopIteration:
                    break
                return nbytes, stored, header
            at += size
        raise self._corrupt(f"the sizes of record {name!r} are missing")
