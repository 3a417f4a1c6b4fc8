"""Which bytes of which files a rank reads, whatever layout they were written in.

Wanted are boxes of leaves, and where each lies in an array of the rank's own; stored are fragments, which are
boxes too. What both have is one *copy*: elements that come from one place in one file and go to one place in
memory. Copies that lie near each other in a file are read in one go, since another request costs more than
the bytes between them; copies whose rows lie far apart in their fragment are read row by row.

`StoredIndex` answers which fragments meet a box, in about logarithmic time; it takes the parts a rank needs,
and `WritePlan.sources` says which those are, so no reader needs the index of every rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from everystep.errors import CorruptCheckpoint
from everystep.format.dtypes import itemsize
from everystep.format.geometry import (
    Box,
    TooTangled,
    contiguous_runs,
    disjoint,
    intersect,
    subtract,
)
from everystep.format.records import Leaf, Part
from everystep.plan.placement import LocalBox

GAP_NBYTES = 1 << 20
"""Bytes between two ranges that are read rather than skipped: a chunk, which is checked as a whole anyway."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box of a leaf to read, and where it goes in a local array."""

    leaf: str
    piece: LocalBox


@dataclass(frozen=True, slots=True)
class Stored:
    """A fragment of a leaf: `box`, in C order, from `offset` of file number `file` of a rank's part."""

    part: int
    file: int
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements to be taken out of what was read and put into `target.local` of the reader's array."""

    wanted: int
    source: Stored
    target: LocalBox

    def source_range(self, itemsize: int) -> tuple[int, int]:
        """First byte and one past the last one, in the file."""
        first, last = contiguous_runs(self.target.box, self.source.box).span
        return self.source.offset + first * itemsize, self.source.offset + last * itemsize


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One contiguous range of one file, and what is copied out of it."""

    part: int
    file: int
    start: int
    stop: int
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MissingBox:
    """Elements that are wanted and that no fragment holds."""

    leaf: str
    box: Box


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read, in the order of parts, files and offsets; and what no fragment holds."""

    reads: tuple[RangeRead, ...]
    missing: tuple[MissingBox, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to be read, gaps included."""
        return sum(read.nbytes for read in self.reads)


class StoredIndex:
    """The fragments of some parts, by leaf and place."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._leaves: dict[str, _StoredLeaf] = {}
        for part in parts:
            for leaf in part.leaves:
                self._add(part.rank, leaf)

    def _add(self, rank: int, leaf: Leaf) -> None:
        known = self._leaves.get(leaf.name)
        if known is None:
            known = self._leaves[leaf.name] = _StoredLeaf(leaf.dtype, leaf.shape)
        elif (known.dtype, known.shape) != (leaf.dtype, leaf.shape):
            raise CorruptCheckpoint(
                f"the part of rank {rank} says {leaf.dtype} of shape {list(leaf.shape)}, "
                f"another part {known.dtype} of shape {list(known.shape)}",
                leaf=leaf.name,
            )
        known.add(
            Stored(rank, fragment.file, fragment.offset, Box(fragment.start, fragment.shape))
            for fragment in leaf.fragments
            if fragment.nbytes
        )

    def __contains__(self, name: str) -> bool:
        return name in self._leaves

    def itemsize(self, name: str) -> int:
        return itemsize(self._leaves[name].dtype)

    def meeting(self, name: str, box: Box) -> list[Stored]:
        """The fragments that hold elements of a box."""
        leaf = self._leaves.get(name)
        return [] if leaf is None else leaf.meeting(box)


class _StoredLeaf:
    """Fragments sorted along the dimension in which most of them differ."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self._fragments: list[Stored] = []
        self._axis = 0
        self._starts: list[int] | None = None
        self._longest = 0

    def add(self, fragments: Iterable[Stored]) -> None:
        self._fragments.extend(fragments)
        self._starts = None

    def meeting(self, box: Box) -> list[Stored]:
        if len(box.start) != len(self.shape):
            raise ValueError(f"a box of {len(box.start)} dimensions of an array of {len(self.shape)}")
        if not self.shape:
            return list(self._fragments)
        if self._starts is None:
            self._sort()
        assert self._starts is not None
        axis = self._axis
        low = bisect_left(self._starts, box.start[axis] - self._longest + 1)
        high = bisect_left(self._starts, box.stop[axis])
        return [found for found in self._fragments[low:high] if intersect(found.box, box) is not None]

    def _sort(self) -> None:
        starts = zip(*(found.box.start for found in self._fragments), strict=True)
        distinct = [len(set(along)) for along in starts] or [0]
        axis = self._axis = max(range(len(distinct)), key=distinct.__getitem__)
        self._fragments.sort(key=lambda found: found.box.start[axis])
        self._starts = [found.box.start[axis] for found in self._fragments]
        self._longest = max((found.box.shape[axis] for found in self._fragments), default=0)


def plan_reads(stored: StoredIndex, wanted: Sequence[Wanted], *, gap_nbytes: int = GAP_NBYTES) -> ReadPlan:
    """What to read for everything that is wanted; each wanted element comes from exactly one place.

    `CorruptCheckpoint` when two fragments hold the same elements. Near-linear in the number of copies.
    """
    copies: list[tuple[int, int, int, int, Copy]] = []  # part, file, start, stop
    missing: list[MissingBox] = []
    for number, want in enumerate(wanted):
        box = want.piece.box
        sources = stored.meeting(want.leaf, box) if box.volume else []
        both = [found for source in sources if (found := intersect(source.box, box)) is not None]
        _check_disjoint(want.leaf, both, sources)
        if sum(found.volume for found in both) != box.volume:
            missing.extend(MissingBox(want.leaf, left) for left in subtract(box, both))
        for source, found in zip(sources, both, strict=True):
            size = stored.itemsize(want.leaf)
            for dense in _dense_boxes(found, source.box, size, gap_nbytes):
                copy = Copy(number, source, want.piece.part(dense))
                copies.append((source.part, source.file, *copy.source_range(size), copy))
    copies.sort(key=lambda entry: entry[:4])
    return ReadPlan(tuple(_coalesce(copies, gap_nbytes)), tuple(missing))


def _check_disjoint(leaf: str, boxes: Sequence[Box], sources: Sequence[Stored]) -> None:
    try:
        alone = disjoint(boxes)
    except TooTangled as error:
        raise CorruptCheckpoint(str(error), leaf=leaf) from None
    if not alone:
        ranks = sorted({source.part for source in sources})
        raise CorruptCheckpoint(
            f"two fragments hold the same elements, in the parts of ranks {', '.join(map(str, ranks[:20]))}",
            leaf=leaf,
        )


def _dense_boxes(box: Box, source: Box, itemsize: int, gap_nbytes: int) -> Iterator[Box]:
    """Cut a box so that no part of it has gaps of more than `gap_nbytes` in the fragment it comes from."""
    depth, hull, stride = 0, itemsize, itemsize
    for axis in range(len(box.shape) - 1, -1, -1):
        if not depth and box.shape[axis] > 1 and stride - hull > gap_nbytes:
            depth = axis + 1
        hull += (box.shape[axis] - 1) * stride
        stride *= source.shape[axis]
    if not depth:
        yield box
        return
    rows = [range(start, start + n) for start, n in zip(box.start[:depth], box.shape, strict=False)]
    for prefix in itertools.product(*rows):
        yield Box((*prefix, *box.start[depth:]), (*(1,) * depth, *box.shape[depth:]))


def _coalesce(copies: Sequence[tuple[int, int, int, int, Copy]], gap_nbytes: int) -> Iterator[RangeRead]:
    """Join sorted ranges of the same file that touch, overlap, or lie at most a gap apart."""
    group: list[Copy] = []
    part = file = begin = end = -1
    for its_part, its_file, start, stop, copy in copies:
        if group and (its_part, its_file) == (part, file) and start - end <= gap_nbytes:
            end = max(end, stop)
        else:
            if group:
                yield RangeRead(part, file, begin, end, tuple(group))
            group = []
            part, file, begin, end = its_part, its_file, start, stop
        group.append(copy)
    if group:
        yield RangeRead(part, file, begin, end, tuple(group))
