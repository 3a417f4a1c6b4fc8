"""Union: from what the ranks hold of a parameter to a whole leaf. Arithmetic only; no file is opened.

A rank's tensor may lie in one place or in several: a ZeRO rank's slice is an `Extent` of it. A rule says
where in the leaf each rank's elements belong. `split` is the reverse.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everystep.errors import CorruptCheckpoint, SpecError
from everystep.format import dtypes
from everystep.format.geometry import Box, boxes_of_range, contiguous_runs, intersect, whole
from everystep.universal.cuts import DoesNotFit, join_widths
from everystep.universal.rules import Flat, Fused, Layout, Partial, Replicated, Rule, Shard, Unique
from everystep.universal.source import SourceFragment, SourceLeaf

_MAX_RUNS = 1 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements `start` to `stop` of a rank's tensor, in C order, lie in `file` from byte `offset` on."""

    file: str
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What one rank holds of a parameter. Its extents are in order and together all of it."""

    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @classmethod
    def at(cls, file: str, offset: int, shape: tuple[int, ...]) -> LocalTensor:
        """A tensor that lies in one place."""
        return cls(shape, (Extent(file, offset, 0, math.prod(shape)),))


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a rank's tensor, and where it begins in the leaf."""

    local: Box
    start: tuple[int, ...]


def union(
    name: str,
    dtype: str,
    rule: Rule,
    ranks: Sequence[Sequence[LocalTensor]],
    *,
    leaf: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> SourceLeaf:
    """The whole leaf of parameter `name`.

    `ranks` has, for each tensor-parallel rank in order, its tensor and further copies of it (of other
    data-parallel ranks or pipeline stages); none for a rank that does not hold the parameter. `leaf` is the
    leaf's name, if not the parameter's. `shape` is the true shape, which `flat` needs.
    """
    shapes = [[held.shape for held in copies] for copies in ranks]
    try:
        return _union(leaf or name, dtype, rule, ranks, shape)
    except DoesNotFit as error:
        shown = "; ".join(
            f"rank {rank}: {', '.join(str(list(found)) for found in copies) or 'nothing'}"
            for rank, copies in enumerate(shapes[:16])
        )
        raise SpecError(
            f"parameter {name!r}: rule {rule.match} ({rule}) does not fit: {error}. Shapes: {shown}",
            names=[name],
        ) from None


def _union(
    leaf: str,
    dtype: str,
    rule: Rule,
    ranks: Sequence[Sequence[LocalTensor]],
    shape: tuple[int, ...] | None,
) -> SourceLeaf:
    itemsize = dtypes.itemsize(dtype)
    for copies in ranks:
        for held in copies:
            _require_all(leaf, held)
    if isinstance(rule.layout, Flat):
        if shape is None:
            raise DoesNotFit("the shape of a flat parameter must be known")
        return SourceLeaf(leaf, dtype, shape, _join_flat(_firsts(ranks), shape, itemsize))
    if any(held.shape != copies[0].shape for copies in ranks for held in copies):
        raise DoesNotFit("copies of one rank's tensor differ in shape")
    padded, placed = place(rule.layout, [copies[0].shape if copies else None for copies in ranks])
    true = strip(rule, padded)
    if shape is not None and shape != true:
        raise DoesNotFit(f"the union has shape {list(true)}, but the parameter has {list(shape)}")
    alternatives: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[SourceFragment, ...]]] = {}
    for copies, places in zip(ranks, placed, strict=True):
        for held in copies:
            for found in places:
                inside = intersect(Box(found.start, found.local.shape), whole(true))
                if inside is None:
                    continue
                shift = tuple(a - b for a, b in zip(found.local.start, found.start, strict=True))
                local = Box(tuple(map(sum, zip(inside.start, shift, strict=True))), inside.shape)
                fragments = tuple(fragments_of_box(held, local, inside.start, itemsize))
                alternatives.setdefault((inside.start, inside.shape), []).append(fragments)
    number = max(map(len, alternatives.values()), default=1)
    versions = [
        tuple(
            fragment
            for found in alternatives.values()
            for fragment in found[index if index < len(found) else 0]
        )
        for index in range(number)
    ]
    first, others = versions[0], tuple(versions[1:])
    if isinstance(rule.layout, Partial) and others:
        return SourceLeaf(leaf, dtype, true, first, terms=others, reduce=rule.layout.reduce)
    return SourceLeaf(leaf, dtype, true, first, copies=others)


def place(
    layout: Layout, shapes: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[int, ...], list[list[Placed]]]:
    """The shape of the whole with its padding, and where each rank's elements belong. None: it has none."""
    held = [shape for shape in shapes if shape is not None]
    if not held:
        raise DoesNotFit("no rank holds it")
    if isinstance(layout, Unique) and len(held) > 1:
        raise DoesNotFit(f"{len(held)} ranks hold it")
    if isinstance(layout, (Unique, Replicated, Partial)):
        if len(set(held)) > 1:
            raise DoesNotFit("the ranks' shapes differ")
        origin = (0,) * len(held[0])
        return held[0], [[] if shape is None else [Placed(whole(shape), origin)] for shape in shapes]
    if isinstance(layout, Flat):
        raise DoesNotFit("flat has no boxes")
    if len(held) != len(shapes):
        raise DoesNotFit("some ranks do not hold it")
    return _place_cut(layout, held)


def _place_cut(
    layout: Shard | Fused, shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[list[Placed]]]:
    dim = layout.dim
    if any(len(shape) <= dim for shape in shapes):
        raise DoesNotFit(f"there is no dimension {dim}")
    if len({(*shape[:dim], -1, *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise DoesNotFit(f"the ranks' shapes differ beyond dimension {dim}")
    size, segments = join_widths(layout, [shape[dim] for shape in shapes])
    placed: list[list[Placed]] = []
    for shape, mine in zip(shapes, segments, strict=True):
        origin = (0,) * len(shape)
        placed.append(
            [
                Placed(
                    Box(
                        (*origin[:dim], segment.at, *origin[dim + 1 :]),
                        (*shape[:dim], segment.length, *shape[dim + 1 :]),
                    ),
                    (*origin[:dim], segment.start, *origin[dim + 1 :]),
                )
                for segment in mine
            ]
        )
    return (*shapes[0][:dim], size, *shapes[0][dim + 1 :]), placed


def strip(rule: Rule, padded: tuple[int, ...]) -> tuple[int, ...]:
    """The true shape of a parameter, without the padding that a rule names."""
    true = list(padded)
    for pad in rule.pads:
        if pad.dim >= len(padded):
            raise DoesNotFit(f"there is no dimension {pad.dim} to take padding from")
        if padded[pad.dim] < pad.to:
            raise DoesNotFit(f"dimension {pad.dim} has length {padded[pad.dim]}, less than {pad.to}")
        true[pad.dim] = pad.to
    return tuple(true)


def _firsts(ranks: Sequence[Sequence[LocalTensor]]) -> list[LocalTensor]:
    if any(len(copies) > 1 for copies in ranks):
        raise DoesNotFit("flat ranges have no copies")
    return [held for copies in ranks for held in copies]


def _join_flat(
    ranks: Sequence[LocalTensor], shape: tuple[int, ...], itemsize: int
) -> tuple[SourceFragment, ...]:
    """Ranges that follow each other; what lies beyond the elements of the shape is padding."""
    total = math.prod(shape)
    held = sum(math.prod(rank.shape) for rank in ranks)
    if held < total:
        raise DoesNotFit(f"the ranks hold {held} elements, but the parameter has {total}")
    fragments: list[SourceFragment] = []
    begin = 0
    for rank in ranks:
        for extent in rank.extents:
            start, stop = min(begin + extent.start, total), min(begin + extent.stop, total)
            at = extent.offset
            for box in boxes_of_range(shape, start, stop):
                fragments.append(SourceFragment(extent.file, at, box))
                at += box.volume * itemsize
        begin += math.prod(rank.shape)
    return tuple(fragments)


def fragments_of_box(
    held: LocalTensor, inner: Box, start: tuple[int, ...], itemsize: int
) -> Iterator[SourceFragment]:
    """Where a box of a rank's tensor lies in files. Its first element is element `start` of the leaf."""
    runs = contiguous_runs(inner, whole(held.shape))
    if runs.number > _MAX_RUNS:
        raise DoesNotFit(f"it would be read in {runs.number} runs of {runs.length} elements")
    shift = tuple(a - b for a, b in zip(start, inner.start, strict=True))
    ends = [extent.stop for extent in held.extents]
    for begin in runs.offsets():
        end = begin + runs.length
        for number in range(bisect_right(ends, begin), len(ends)):
            extent = held.extents[number]
            if extent.start >= end:
                break
            low, high = max(begin, extent.start), min(end, extent.stop)
            at = extent.offset + (low - extent.start) * itemsize
            for box in boxes_of_range(held.shape, low, high):
                yield SourceFragment(
                    extent.file, at, Box(tuple(map(sum, zip(box.start, shift, strict=True))), box.shape)
                )
                at += box.volume * itemsize


def _require_all(leaf: str, held: LocalTensor) -> None:
    at = 0
    for extent in held.extents:
        if extent.start != at or extent.stop < extent.start:
            raise CorruptCheckpoint(
                f"elements {at} to {extent.start} are missing", path=extent.file, leaf=leaf
            )
        at = extent.stop
    if at != math.prod(held.shape):
        where = held.extents[-1].file if held.extents else None
        raise CorruptCheckpoint(
            f"{at} elements are there, but shape {list(held.shape)} has {math.prod(held.shape)}",
            path=where,
            leaf=leaf,
        )
