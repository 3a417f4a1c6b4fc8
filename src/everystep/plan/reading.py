"""Which bytes of a leaf a request needs.

A request is a range along the first dimensions; checksums are per chunk, so what is read is rounded out to
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteRange:
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def rounded_out(self, chunk_nbytes: int, limit: int) -> ByteRange:
        """The smallest range of whole chunks around this one; the last chunk ends at `limit`."""
        start = self.start // chunk_nbytes * chunk_nbytes
        return ByteRange(start, min(-(-self.stop // chunk_nbytes) * chunk_nbytes, limit))


def rows_to_read(
    shape: Sequence[int], box: Sequence[range], itemsize: int, coarse_nbytes: int
) -> Iterator[tuple[tuple[int, ...], ByteRange]]:
    """Cuts a box of a C-order array into byte ranges, each with the index prefix of the rows it holds.

    Yields ``(prefix, bytes)``: the bytes cover ``array[prefix][box[k].start:box[k].stop]`` in full rows,
    ``k`` being the prefix's length. It goes into a dimension only where its rows are larger than
    `coarse_nbytes`, since reading a little too much is cheaper than many small reads.
    """
    yield from _descend((), 0, shape, box, itemsize, coarse_nbytes)


def _descend(
    prefix: tuple[int, ...], base: int, shape: Sequence[int], box: Sequence[range], itemsize: int, coarse: int
) -> Iterator[tuple[tuple[int, ...], ByteRange]]:
    depth = len(prefix)
    if depth == len(shape):
        yield prefix, ByteRange(base, base + itemsize)
        return
    row = itemsize * math.prod(shape[depth + 1 :])
    wanted = box[depth]
    narrower = any(len(span) < size for span, size in zip(box[depth + 1 :], shape[depth + 1 :], strict=True))
    if narrower and row > coarse:
        for index in wanted:
            yield from _descend((*prefix, index), base + index * row, shape, box, itemsize, coarse)
    else:
        yield prefix, ByteRange(base + wanted.start * row, base + wanted.stop * row)
