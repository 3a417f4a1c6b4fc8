"""Arrays laid end to end, and where such a stream is best cut.

Sharing work by bytes means cutting a row of arrays at given places: among ranks, among volumes, among
readers. A cut may move a little (its tolerance) to fall between two arrays, or between rows of one, or on a
block: then small arrays stay whole, fragments stay one box, and direct I/O meets few ragged ends.

Each cut depends on its own target only, so every rank finds the same place, and errors do not add up along
the stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from everystep.engine import ALIGNMENT


class ByteStream:
    """Arrays of these shapes one after the other; places on the stream are counted in bytes."""

    __slots__ = ("_itemsizes", "_shapes", "ends", "nbytes")

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        itemsizes: Sequence[int],
        sizes: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`sizes` are the arrays' bytes, where the caller has them already."""
        if sizes is None:
            sizes = np.fromiter(
                (math.prod(shape) * size for shape, size in zip(shapes, itemsizes, strict=True)),
                dtype=np.int64,
                count=len(shapes),
            )
        self._shapes = shapes
        self._itemsizes = itemsizes
        self.ends = np.cumsum(sizes)
        self.nbytes = int(self.ends[-1]) if len(shapes) else 0

    def start(self, number: int) -> int:
        """Where an array begins."""
        return int(self.ends[number - 1]) if number else 0

    def snap(self, target: int, tolerance: int) -> int:
        """The best place for a cut within `tolerance` of a target (within an element, if that is more).

        Places never overtake each other: a greater target, with the same tolerance, gives no smaller place.
        """
        if target <= 0:
            return 0
        if target >= self.nbytes:
            return self.nbytes
        number = int(np.searchsorted(self.ends, target, side="right"))
        start, end = self.start(number), int(self.ends[number])
        before, after = target - start, end - target
        if min(before, after) <= tolerance:
            return start if before <= after else end
        step = _step(self._shapes[number], self._itemsizes[number], 2 * tolerance)
        return min(start + (before + step // 2) // step * step, end)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What lies between two cuts: (number of an array, its first element, one past its last)."""
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            base, end = self.start(number), int(self.ends[number])
            size = self._itemsizes[number]
            upto = min(stop, end)
            if start < upto:
                yield number, (start - base) // size, (upto - base) // size
                start = upto
            number += 1


def _step(shape: tuple[int, ...], itemsize: int, limit: int) -> int:
    """Cuts inside an array fall on multiples of this: rows, if they are small enough, and whole blocks."""
    for axis in range(1, len(shape) + 1):
        row = itemsize * math.prod(shape[axis:])
        if row <= limit:
            blocks = math.lcm(row, ALIGNMENT)
            return blocks if blocks <= limit else row
    return itemsize
