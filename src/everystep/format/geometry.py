"""Boxes of a global array: what a fragment holds, and where one box lies inside another.

Owns integer arithmetic on (start, shape) only: no dtypes, no files. Inside a box, elements are in C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

_PAIRWISE_LIMIT = 8
_VISITS_PER_BOX = 32
_FREE_VISITS = 1024


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array: `start` inclusive, `shape` elements along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"start {self.start} and shape {self.shape} differ in length")
        if min(self.start, default=0) < 0 or min(self.shape, default=0) < 0:
            raise ValueError(f"negative start or shape: {self.start}, {self.shape}")

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(s + n for s, n in zip(self.start, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Runs:
    """The contiguous runs that an inner box makes in an outer one, as a lattice: never one object per run.

    Every run is `length` elements. Run number `(i, j, ...)` of `counts` begins at element
    ``offset + i * strides[0] + j * strides[1] + ...`` of the outer box; in the inner box the runs
    follow each other without gaps.
    """

    offset: int
    length: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def number(self) -> int:
        return math.prod(self.counts) if self.length else 0

    @property
    def span(self) -> tuple[int, int]:
        """First element and one past the last one, in the outer box; (offset, offset) when there are none."""
        if not self.number:
            return self.offset, self.offset
        last = sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True))
        return self.offset, self.offset + last + self.length

    def offsets(self) -> Iterator[int]:
        """Where each run begins in the outer box, in order."""
        if not self.number:
            return
        index = [0] * len(self.counts)
        at = self.offset
        while True:
            yield at
            for axis in range(len(index) - 1, -1, -1):
                index[axis] += 1
                at += self.strides[axis]
                if index[axis] < self.counts[axis]:
                    break
                at -= self.strides[axis] * self.counts[axis]
                index[axis] = 0
            else:
                return


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of an array of that shape."""
    return Box((0,) * len(shape), shape)


def contains(outer: Box, inner: Box) -> bool:
    """Whether `inner` lies in `outer`. An empty box is judged by its position, too."""
    return len(outer.start) == len(inner.start) and all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.start, outer.shape, inner.start, inner.shape, strict=True)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """The elements both boxes hold, or None when there are none."""
    if len(a.start) != len(b.start):
        raise ValueError(f"boxes of {len(a.start)} and {len(b.start)} dimensions do not meet")
    start = tuple(map(max, a.start, b.start))
    shape = tuple(min(p, q) - s for p, q, s in zip(a.stop, b.stop, start, strict=True))
    if min(shape, default=1) <= 0:
        return None
    return Box(start, shape)


def contiguous_runs(inner: Box, outer: Box) -> Runs:
    """Where the elements of `inner` lie in the C-order elements of `outer`, which contains it."""
    if not contains(outer, inner):
        raise ValueError(f"{inner} does not lie inside {outer}")
    strides = [1] * len(outer.shape)
    for axis in range(len(strides) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * outer.shape[axis]
    begin = tuple(b - a for a, b in zip(outer.start, inner.start, strict=True))
    offset = sum(b * s for b, s in zip(begin, strides, strict=True))
    # Trailing dimensions that are taken whole join into one run, together with the one before them.
    axis = len(strides)
    length = 1
    while axis > 0:
        axis -= 1
        length *= inner.shape[axis]
        if inner.shape[axis] != outer.shape[axis]:
            break
    return Runs(offset, length, inner.shape[:axis], tuple(strides[:axis]))


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements `start` to `stop` of a C-order array as boxes, in order: at most 2 * dimensions - 1.

    Each of them is contiguous in the array, and they follow each other without gaps.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}:{stop} is not one of an array of shape {shape}")
    boxes: list[Box] = []
    if start < stop:
        _cut_range((), shape, start, stop, boxes)
    return boxes


def _cut_range(
    prefix: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int, out: list[Box]
) -> None:
    depth = len(prefix)
    if depth == len(shape):
        out.append(Box(prefix, (1,) * depth))
        return
    row = math.prod(shape[depth + 1 :])
    first, last = -(-start // row), stop // row  # rows first to last are taken whole
    if first > last:  # begins and ends inside of one row
        _cut_range((*prefix, last), shape, start - last * row, stop - last * row, out)
        return
    if start < first * row:
        _cut_range((*prefix, first - 1), shape, start - (first - 1) * row, row, out)
    if first < last:
        rest = shape[depth + 1 :]
        out.append(
            Box((*prefix, first, *(0,) * len(rest)), (*(1,) * depth, last - first, *rest)),
        )
    if last * row < stop:
        _cut_range((*prefix, last), shape, 0, stop - last * row, out)


def subtract(box: Box, holes: Iterable[Box]) -> list[Box]:
    """The rest of a box without the elements of others, as disjoint boxes.

    For naming what is missing: the work grows with the number of holes times that of boxes left.
    """
    left = [box] if box.volume else []
    for hole in holes:
        remaining: list[Box] = []
        for piece in left:
            both = intersect(piece, hole)
            if both is None:
                remaining.append(piece)
            else:
                remaining.extend(_around(piece, both))
        left = remaining
    return left


def _around(outer: Box, inner: Box) -> Iterator[Box]:
    """Cut `inner` out of `outer`, slab by slab along each dimension."""
    start, stop = list(outer.start), list(outer.stop)
    for axis, (low, high) in enumerate(zip(inner.start, inner.stop, strict=True)):
        for begin, end in ((start[axis], low), (high, stop[axis])):
            if begin < end:
                yield Box(
                    (*start[:axis], begin, *start[axis + 1 :]),
                    tuple(
                        b - a
                        for a, b in zip(
                            (*start[:axis], begin, *start[axis + 1 :]),
                            (*stop[:axis], end, *stop[axis + 1 :]),
                            strict=True,
                        )
                    ),
                )
        start[axis], stop[axis] = low, high


class TooTangled(ValueError):
    """Boxes arranged in a way that would take unbounded work to check; no writer arranges them so."""


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no element lies in two of the boxes. Empty boxes hold nothing and never overlap.

    Takes near-linear time for what sharding makes (grids, byte ranges), by separating groups at planes that
    cut no box. Raises `TooTangled` for arrangements that only an attacker makes and that would take quadratic
    time.
    """
    group = [box for box in boxes if box.volume]
    if len(group) < 2:
        return True
    rank = len(group[0].start)
    if any(len(box.start) != rank for box in group):
        raise ValueError("boxes of different dimensions do not meet")
    pending = [(group, 0)]
    budget = _VISITS_PER_BOX * len(group) + _FREE_VISITS
    while pending:
        group, axis = pending.pop()
        parts = [group]
        if len(group) > _PAIRWISE_LIMIT:
            for _ in range(rank):
                budget -= len(group)
                parts = _separate(group, axis)
                axis = (axis + 1) % rank
                if len(parts) > 1 or budget < 0:
                    break
        if len(parts) > 1:
            pending.extend((part, axis) for part in parts if len(part) > 1)
            continue
        for i, box in enumerate(group):
            # A tangle of boxes that overlap is found early; one of boxes that do not runs into the budget.
            budget -= i
            if budget < 0:
                raise TooTangled(f"{len(boxes)} boxes are arranged in a way too tangled to check")
            if any(_overlap(box, group[j]) for j in range(i)):
                return False
    return True


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of the same dimensions, neither of them empty, share an element."""
    return all(s < t + m and t < s + n for s, n, t, m in zip(a.start, a.shape, b.start, b.shape, strict=True))


def _separate(group: list[Box], axis: int) -> list[list[Box]]:
    """Cut a group at every plane across `axis` that goes through none of its boxes."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(group, key=lambda box: box.start[axis]):
        begin = box.start[axis]
        if begin >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, begin + box.shape[axis])
    return parts
