"""The files of ``torch.save``, as they are written: a zip archive with a pickle and the bytes of tensors.

`TorchArchive` knows the place of every byte before any tensor is read. So small archives are put together in
memory and written at once (`assemble`), and large ones stream to the disk (`stream`, or `write_archive` where
a file has several). Owns the zip format; what is in the pickle belongs to `pickle_writer`.

The bytes of tensors are aligned, as those of torch are, so that they can be mapped. Their CRC-32 is known
only when they have passed, so it comes behind them (a data descriptor), as in torch's own files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from everystep.engine import Produced, WritePiece, fs

Fill = Callable[[memoryview, int], None]
"""Writes bytes of a tensor, from an offset on, into a window: as many as it has room for."""

_DATA_ALIGNMENT = 64
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64, _LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_VERSION, _CRC_FOLLOWS = 45, 1 << 3
_DAY = 1 << 5 | 1  # 1980-01-01, the first that there is
_PADDING = b"FB"  # the tag of torch's own padding
_ROOT = "archive"
_BLOCK_NBYTES = 4 << 20


@dataclass(slots=True)
class _Member:
    """A file of the archive. Without `content` its bytes are a tensor's."""

    name: bytes
    nbytes: int
    content: bytes | None = None
    at: int = 0
    header: bytes = b""

    @property
    def wide(self) -> bool:
        return self.nbytes >= _MAX32

    @property
    def data_at(self) -> int:
        return self.at + len(self.header)

    @property
    def end(self) -> int:
        descriptor = 0 if self.content is not None else len(self.descriptor(0))
        return self.data_at + self.nbytes + descriptor

    def place(self, at: int) -> None:
        self.at = at
        crc = 0 if self.content is None else zlib.crc32(self.content)
        size = _MAX32 if self.wide else self.nbytes if self.content is not None else 0
        extra = struct.pack("<2H2Q", 1, 16, 0, 0) if self.wide else b""
        if self.content is None:
            bare = at + _LOCAL.size + len(self.name) + len(extra) + 4
            fill = -bare % _DATA_ALIGNMENT
            extra += _PADDING + fill.to_bytes(2, "little") + b"Z" * fill
        flags = _CRC_FOLLOWS if self.content is None else 0
        lengths = len(self.name), len(extra)
        self.header = (
            _LOCAL.pack(b"PK\3\4", _VERSION, flags, 0, 0, _DAY, crc, size, size, *lengths) + self.name + extra
        )

    def descriptor(self, crc: int) -> bytes:
        form = _DESCRIPTOR64 if self.wide else _DESCRIPTOR
        return form.pack(b"PK\7\10", crc, self.nbytes, self.nbytes)

    def entry(self, crc: int) -> bytes:
        """What the directory at the end says."""
        wide = ([self.nbytes, self.nbytes] if self.wide else []) + ([self.at] if self.at >= _MAX32 else [])
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, at = min(self.nbytes, _MAX32), min(self.at, _MAX32)
        flags = _CRC_FOLLOWS if self.content is None else 0
        lengths = len(self.name), len(extra), 0, 0, 0
        head = b"PK\1\2", _VERSION, _VERSION, flags, 0, 0, _DAY
        return _ENTRY.pack(*head, crc, size, size, *lengths, 0, at) + self.name + extra


class TorchArchive:
    """An archive with a pickle and tensors of known sizes."""

    def __init__(self, pickled: bytes, sizes: Sequence[int]) -> None:
        self._head = [_member("data.pkl", pickled), _member("byteorder", b"little")]
        self._tensors = [
            _Member(f"{_ROOT}/data/{number}".encode(), nbytes) for number, nbytes in enumerate(sizes)
        ]
        self._tail = _member("version", b"3\n")
        at = 0
        for member in self._members:
            member.place(at)
            at = member.end
        self._directory_at = at
        self.nbytes = at + len(self._directory([0] * len(sizes)))

    @property
    def offsets(self) -> list[int]:
        """Where the bytes of each tensor begin."""
        return [member.data_at for member in self._tensors]

    @property
    def sizes(self) -> list[int]:
        return [member.nbytes for member in self._tensors]

    def between(self, number: int, crcs: Sequence[int]) -> tuple[int, bytes]:
        """What lies before tensor `number`, or behind the last one: the offset, and the bytes.

        `crcs` are those of the tensors before it; the others may still be anything.
        """
        start, parts = 0, b""
        if number == 0:
            parts = b"".join(member.header + (member.content or b"") for member in self._head)
        else:
            before = self._tensors[number - 1]
            start = before.data_at + before.nbytes
            parts = before.descriptor(crcs[number - 1])
        if number < len(self._tensors):
            return start, parts + self._tensors[number].header
        assert self._tail.content is not None
        return start, parts + self._tail.header + self._tail.content + self._directory(crcs)

    @property
    def _members(self) -> list[_Member]:
        return [*self._head, *self._tensors, self._tail]

    def _directory(self, crcs: Sequence[int]) -> bytes:
        fixed = {id(member): zlib.crc32(member.content or b"") for member in (*self._head, self._tail)}
        found = dict(zip(map(id, self._tensors), crcs, strict=True)) | fixed
        members = self._members
        entries = b"".join(member.entry(found[id(member)]) for member in members)
        begin, count, nbytes = self._directory_at, len(members), len(entries)
        end = b""
        if count >= _MAX16 or begin >= _MAX32 or nbytes >= _MAX32:
            versions = _VERSION, _VERSION, 0, 0
            end = _END64.pack(b"PK\6\6", _END64.size - 12, *versions, count, count, nbytes, begin)
            end += _LOCATOR.pack(b"PK\6\7", 0, begin + nbytes, 1)
        small = min(count, _MAX16), min(count, _MAX16), min(nbytes, _MAX32), min(begin, _MAX32)
        return entries + end + _END.pack(b"PK\5\6", 0, 0, *small, 0)


def _member(name: str, content: bytes) -> _Member:
    return _Member(f"{_ROOT}/{name}".encode(), len(content), content)


def assemble(archive: TorchArchive, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Completes an archive in memory (`archive.nbytes` long) that has the bytes of all tensors in place."""
    crcs = [
        zlib.crc32(data[at : at + nbytes].data)
        for at, nbytes in zip(archive.offsets, archive.sizes, strict=True)
    ]
    for number in range(len(crcs) + 1):
        at, content = archive.between(number, crcs)
        data[at : at + len(content)] = np.frombuffer(content, np.uint8)


def write_archive(file: BinaryIO, archive: TorchArchive, fills: Sequence[Fill]) -> None:
    """Writes an archive where `file` stands, a block at a time."""
    block = memoryview(bytearray(min(_BLOCK_NBYTES, max(archive.sizes, default=0))))
    crcs = [0] * len(fills)
    for number, (fill, nbytes) in enumerate(zip(fills, archive.sizes, strict=True)):
        file.write(archive.between(number, crcs)[1])
        for start in range(0, nbytes, _BLOCK_NBYTES):
            part = block[: min(_BLOCK_NBYTES, nbytes - start)]
            fill(part, start)
            crcs[number] = zlib.crc32(part, crcs[number])
            file.write(part)
    file.write(archive.between(len(fills), crcs)[1])


def stream(path: str, archive: TorchArchive, fills: Sequence[Fill], progress: Callable[[int], None]) -> None:
    """Writes and syncs an archive, a window at a time. `progress` gets the bytes of the file so far."""
    crcs = [0] * len(fills)
    pieces: list[WritePiece] = []
    sizes = archive.sizes
    for number in range(len(fills) + 1):
        at, content = archive.between(number, crcs)
        pieces.append(WritePiece(at, Produced(len(content), _between(archive, number, crcs))))
        if number < len(fills) and sizes[number]:
            tensor = Produced(sizes[number], _counted(fills[number], number, crcs))
            pieces.append(WritePiece(archive.offsets[number], tensor))
    fs.write_synced(path, archive.nbytes, pieces, progress)


def _between(archive: TorchArchive, number: int, crcs: list[int]) -> Fill:
    def fill(window: memoryview, offset: int) -> None:
        window[:] = archive.between(number, crcs)[1][offset : offset + len(window)]

    return fill


def _counted(fill: Fill, number: int, crcs: list[int]) -> Fill:
    """The same bytes; their CRC is known when all have passed. The engine asks for them in order."""
    done = 0

    def counted(window: memoryview, offset: int) -> None:
        nonlocal done
        if offset != done:
            raise AssertionError(f"bytes from {offset} were asked for where those from {done} are next")
        fill(window, offset)
        crcs[number] = zlib.crc32(window, crcs[number])
        done += len(window)

    return counted
