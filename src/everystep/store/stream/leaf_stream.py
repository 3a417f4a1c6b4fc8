"""The bytes of many leaves, in the order in which a writer asks for them: streamed through bounded memory.

Leaves are read in windows (`leaf_windows`), the next ones while the writer takes this one. On the way,
elements may be cast to another type. A writer should ask in the order of the leaves: any other order works,
too, but reads windows again.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from everystep.engine import READING, Produced
from everystep.format.dtypes import itemsize
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.stream.element_casts import cast
from everystep.store.stream.leaf_windows import (
    WINDOW_NBYTES,
    Bytes,
    LeafRange,
    LeafSize,
    WindowReader,
    windows,
)

_AHEAD = 3
"""Windows that are read before the writer asks for them: a device is busy only with several reads at once."""
_READERS = 2
_LEAST_NBYTES = READING.window_nbytes * READING.depth
"""Of a read. Who bounds memory below that gets one window ahead, and one reader."""


@dataclass(frozen=True, slots=True)
class StreamedLeaf:
    """A stored leaf, and the type that its elements get on the way."""

    stored: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _WindowPart:
    """Where the bytes from `start` to `stop` of a leaf are: from `at` on, in a window."""

    start: int
    stop: int
    window: int
    at: int


@dataclass(frozen=True, slots=True)
class _Window:
    """The bytes of a window, and the memory that they were read into."""

    number: int
    data: Bytes
    buffer: Bytes


class LeafStream:
    """Leaves of one checkpoint to be written. Use it as a context manager: it owns threads.

    `alone`: no other stream is read at the same time. Two share the memory that one has.
    """

    def __init__(self, checkpoint: Checkpoint, leaves: Sequence[StreamedLeaf], *, alone: bool = True) -> None:
        self._reader = WindowReader(checkpoint)
        self._names = [leaf.stored for leaf in leaves]
        self._types = [(checkpoint._parts.leaf_infos[leaf.stored].dtype, leaf.dtype) for leaf in leaves]
        infos = [checkpoint._parts.leaf_infos[leaf.stored] for leaf in leaves]
        sizes = [LeafSize(info.nbytes, itemsize(info.dtype)) for info in infos]
        self.sizes = [self._cast_nbytes(index, info.nbytes) for index, info in enumerate(infos)]
        self._windows = list(windows(sizes))
        self._pieces: list[list[_WindowPart]] = [[] for _ in leaves]
        for number, ranges in enumerate(self._windows):
            at = 0
            for span in ranges:
                start, stop = (self._cast_nbytes(span.index, nbytes) for nbytes in (span.start, span.stop))
                self._pieces[span.index].append(_WindowPart(start, stop, number, at))
                at += stop - start
        self._current: _Window | None = None
        self._ahead: dict[int, Future[_Window]] = {}
        self._buffers: list[Bytes] = []  # reused: fresh memory costs as much as reading into it
        roomy = checkpoint._reader.window_nbytes >= _LEAST_NBYTES
        self._most_ahead = _AHEAD if roomy else int(alone)
        self._pool = ThreadPoolExecutor(_READERS if roomy else 1, "everystep-stream")

    def source(self, index: int) -> Produced:
        """The bytes of a leaf, as the engine takes them."""
        return Produced(self.sizes[index], lambda window, offset: self.fill(index, window, offset))

    def fill(self, index: int, window: memoryview, offset: int) -> None:
        """Bytes of a leaf, from `offset` on: as many as there is room for."""
        pieces = self._pieces[index]
        number = bisect.bisect_right(pieces, offset, key=lambda piece: piece.start) - 1
        room: Bytes = np.frombuffer(window, np.uint8)  # numpy copies without holding up other threads
        done = 0
        while done < len(room):
            piece = pieces[number]
            begin = offset + done - piece.start
            nbytes = min(len(room) - done, piece.stop - piece.start - begin)
            data = self._window(piece.window)
            room[done : done + nbytes] = data[piece.at + begin : piece.at + begin + nbytes]
            done += nbytes
            number += 1

    def _window(self, number: int) -> Bytes:
        if self._current is not None and self._current.number == number:
            return self._current.data
        if self._current is not None:
            self._buffers.append(self._current.buffer)
            self._current = None
        wanted = range(number, min(number + 1 + self._most_ahead, len(self._windows)))
        for other in [other for other in self._ahead if other not in wanted]:
            self._ahead.pop(other).cancel()  # asked for in another order
        for coming in wanted:
            if coming not in self._ahead:
                self._ahead[coming] = self._pool.submit(self._read, coming)
        self._current = self._ahead.pop(number).result()
        return self._current.data

    def _read(self, number: int) -> _Window:
        ranges = self._windows[number]
        buffer = self._buffers.pop() if self._buffers else np.empty(WINDOW_NBYTES, np.uint8)
        data = self._reader.read(ranges, self._names, buffer)
        if any(self._types[span.index][0] != self._types[span.index][1] for span in ranges):
            data = np.concatenate(list(self._cast(ranges, data)))
        return _Window(number, data, buffer)

    def _cast(self, ranges: Sequence[LeafRange], data: Bytes) -> list[Bytes]:
        found: list[Bytes] = []
        at = 0
        for span in ranges:
            found.append(cast(data[at : at + span.nbytes], *self._types[span.index]))
            at += span.nbytes
        return found

    def _cast_nbytes(self, index: int, nbytes: int) -> int:
        dtype, to = self._types[index]
        return nbytes if dtype == to else nbytes // itemsize(dtype) * itemsize(to)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._current = None
        self._ahead.clear()
        self._buffers.clear()

    def __enter__(self) -> LeafStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
