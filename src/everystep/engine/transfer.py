"""Jobs: writing and reading one file at a time through the native core.

`write` starts a job that fills a whole file from pieces of memory; `read` fills memory from pieces of a file
and verifies them. What the pieces mean is the caller's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from everystep import _native
from everystep._native import Pieces
from everystep.engine.buffers import ByteSource, Consumed, Destination, Memory, Produced, Strided
from everystep.engine.tuning import Tuning
from everystep.errors import EngineTimeout

CHUNK_NBYTES = 1 << 20
"""Bytes per checksum. Small enough that reading a slice of an array verifies little more than the slice."""


class WritePiece(msgspec.Struct, frozen=True, gc=False):
    offset: int
    source: Any  # Source; msgspec does not look inside


@dataclass(frozen=True, slots=True)
class Padding:
    """A destination for bytes that must be zero."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Unkept:
    """A destination for bytes of which only the checksum matters."""

    nbytes: int


class ReadPiece(msgspec.Struct, frozen=True, gc=False):
    offset: int
    destination: Any  # Destination | Padding | Unkept; msgspec does not look inside
    checksums: str = ""


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that fails verification."""

    piece: int
    chunk: int


_LONG_READ_NBYTES = 8 << 20


def _pieces(offsets: Iterable[int], ends: Iterable[ByteSource | Destination | Padding | Unkept]) -> Pieces:
    pieces = Pieces()
    for offset, end in zip(offsets, ends, strict=True):
        if isinstance(end, Memory):
            pieces.memory(offset, end.nbytes, end.address)
        elif isinstance(end, Strided):
            pieces.strided(offset, end.nbytes, end.address, end.itemsize, end.shape, end.strides)
        elif isinstance(end, Produced):
            pieces.callback(offset, end.nbytes, end.fill)
        elif isinstance(end, Consumed):
            pieces.callback(offset, end.nbytes, end.drain)
        elif isinstance(end, Unkept):
            pieces.discard(offset, end.nbytes)
        else:
            pieces.zero(offset, end.nbytes)
    return pieces


def _sources(pieces: Sequence[WritePiece]) -> Pieces:
    return _pieces([piece.offset for piece in pieces], [piece.source for piece in pieces])


def destinations(pieces: Sequence[ReadPiece]) -> Pieces:
    """What `read` takes. `Pieces.to_memory` makes many at once, without an object for each."""
    found = _pieces([piece.offset for piece in pieces], [piece.destination for piece in pieces])
    found.expect([piece.checksums for piece in pieces if not isinstance(piece.destination, Padding)])
    return found


class WriteJob:
    """One file being written. Call `wait`, then `fs.sync`: only then are its bytes durable."""

    def __init__(self, native: _native.WriteJob, sources: Sequence[ByteSource]) -> None:
        self.native = native
        self._sources = sources  # kept alive while the engine reads them

    @property
    def done(self) -> bool:
        return self.native.done()

    @property
    def progress(self) -> int:
        """Bytes handed over to the device so far."""
        return self.native.progress()

    def wait(self, timeout: float | None = None, progress: Callable[[int], None] | None = None) -> None:
        """Returns when every byte has left its source. Raises what went wrong, as `OSError`.

        Calls `progress` in this thread, ten times a second, with the bytes handed over to the device so far.
        """
        if not self.native.wait(timeout, progress):
            raise EngineTimeout(f"the write did not finish within {timeout} s; it goes on in the background")
        self.native.check()

    def wait_for_nbytes(self, nbytes: int, timeout: float | None = None) -> bool:
        """Whether so many bytes of the file, from its start, have left their sources in time.

        Also true once the job has ended, however it ended: it reads no memory any more.
        """
        return self.native.wait_for_nbytes(nbytes, timeout)

    def fresh(self) -> bool:
        """Whether the file has a new name, which only a sync of its directory makes durable."""
        return self.native.fresh()

    def truncate(self, nbytes: int) -> None:
        """Cuts the file, once it is written. The sync makes that durable, too."""
        self.native.truncate(nbytes)

    def checksums(self) -> list[str]:
        """Per piece, the checksums of its chunks: 16 hexadecimal digits each."""
        return self.native.checksums(CHUNK_NBYTES)

    def stats(self) -> tuple[int, int, int]:
        """Bytes moved without a copy (of a write: none), bytes copied, transfers."""
        return self.native.stats()

    def cancel(self) -> None:
        """Stops at the next window. The sources are free again when `done`, or after `abandon`."""
        self.native.cancel()

    def abandon(self) -> None:
        """Stops, and returns when the engine has let go of the sources and the file."""
        self.native.cancel()
        self.native.wait(None)
        # If the error is kept, so is this job. An open file would keep its space on the disk.
        self.native.close()

    def __enter__(self) -> WriteJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()


def write(
    path: str | os.PathLike[str] | _native.Entry,
    nbytes: int,
    pieces: Sequence[WritePiece],
    *,
    tuning: Tuning,
    header: bytes = b"",
    recycle: bool = False,
    background: bool = True,
) -> WriteJob:
    """Starts writing a whole file: `header`, then `pieces` (sorted by offset; gaps become zeros).

    Without a backend in `tuning` the page cache is used, as it is for small files in any case. With `recycle`
    an existing file is overwritten in place, unless others have it open or mapped: then a new one takes its
    name (`WriteJob.fresh`). ``background=False`` does the work before returning.
    """
    sources: list[ByteSource] = [piece.source for piece in pieces]
    native = _native.write(
        path,
        nbytes,
        recycle,
        header,
        _pieces([piece.offset for piece in pieces], sources),
        tuning.backend or "buffered",
        tuning.window_nbytes,
        tuning.depth,
        CHUNK_NBYTES,
        tuning.small_nbytes,
        background,
    )
    try:
        return WriteJob(native, sources)
    except BaseException:
        # An interrupt in the constructor: the traceback keeps the job, which would go on reading memory.
        native.cancel()
        native.wait(None)
        native.close()
        raise


def read(
    path: str | os.PathLike[str],
    pieces: Sequence[ReadPiece] | Pieces,
    *,
    tuning: Tuning,
    chunk_nbytes: int = CHUNK_NBYTES,
    verify: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[Damage]:
    """Reads `pieces` (sorted by offset) and returns the chunks that fail verification: none, as a rule.

    Calls `progress` in this thread, ten times a second, with the bytes read so far.
    """
    pieces = pieces if isinstance(pieces, Pieces) else destinations(pieces)
    native = _native.read(
        path,
        pieces,
        verify,
        tuning.backend or "buffered",
        tuning.window_nbytes,
        tuning.depth,
        chunk_nbytes,
        tuning.small_nbytes,
        # What may take long is waited for where interrupts are heard; a thread costs more than a small read.
        progress is not None or pieces.nbytes > _LONG_READ_NBYTES,
    )
    try:
        native.wait(None, progress)
    except BaseException:
        native.cancel()
        del native  # returns when the engine has let go of the destinations, which the caller may free
        raise
    return [Damage(piece, chunk) for piece, chunk in native.damage()]


def copy(pieces: Sequence[WritePiece], buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Copies sources (sorted by offset) into `buffer`, each to its offset there."""
    if pieces and pieces[-1].offset + pieces[-1].source.nbytes > buffer.nbytes:
        raise ValueError("the pieces reach past the end of the buffer")
    _native.copy(buffer.ctypes.data, _sources(pieces))


class Packed(WriteJob):
    """Stands for a job where all was copied out of the sources before the first byte is written."""

    def __init__(self, data: bytes, checksums: list[str]) -> None:
        self.data = data
        self._checksums = checksums

    @property
    def done(self) -> bool:
        return True

    @property
    def progress(self) -> int:
        return len(self.data)

    def wait(self, timeout: float | None = None, progress: Callable[[int], None] | None = None) -> None:
        pass

    def wait_for_nbytes(self, nbytes: int, timeout: float | None = None) -> bool:
        return True

    def checksums(self) -> list[str]:
        return self._checksums

    def stats(self) -> tuple[int, int, int]:
        return 0, len(self.data), 1

    def cancel(self) -> None:
        """The sources are free already; the file is the caller's to write or to leave."""

    def abandon(self) -> None:
        self.cancel()


def pack(pieces: Sequence[WritePiece], nbytes: int) -> Packed:
    """Copies sources (sorted by offset) into `nbytes` of data, zeros between them."""
    data, checksums = _native.pack(nbytes, CHUNK_NBYTES, _sources(pieces))
    return Packed(data, checksums)


def fingerprints(sources: Sequence[ByteSource]) -> list[int]:
    """A hash over a sample of each: enough to notice that an optimizer went over it, at next to no cost.

    Of the C-order bytes: equal arrays have equal ones, however each of them lies in memory.
    """
    offsets = list(accumulate([source.nbytes for source in sources], initial=0))[:-1]
    return _native.fingerprints(_pieces(offsets, sources))


def fresh_bytes(nbytes: int, address_residue: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised memory to load into, at an address congruent to the residue modulo `ALIGNMENT`."""
    return _native.fresh_memory(nbytes, address_residue)
