"""Whether ranks that hold one leaf in different layouts hold the same values.

A leaf may be whole on one rank and in shards on others, or in rows on one mesh and in columns on another.
Only one of these layouts is written (`everystep.plan.world`), so the others must hold the same bits. Shards
of different layouts are cut differently, so their digests cannot be compared. Sums can: every element adds a
number that follows from its bits and its position in the leaf, so the sum over a box is the same however the
box was cut. Collisions are as rare as with any digest of 64 bits.

All elements are summed when ranks make a plan. Every save compares a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from everystep.engine import ByteSource, WritePiece, copy
from everystep.errors import RanksDisagree
from everystep.format.checksums import digest
from everystep.format.geometry import Box, boxes_of_range, intersect
from everystep.plan.fragments import part_of_source
from everystep.plan.placement import Holding, LeafLayout, MeshPlacement, holding, shards_meeting
from everystep.plan.world import Beside
from everystep.state import LeafSource
from everystep.store.ranks.checks.replicas import in_host_memory
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.membership import name_ranks

_ELEMENTS: Final = 1 << 16
"""Summed up at a time: little enough to stay in the caches."""
_POSITIONS: Final = 16
_MAX_LEAVES: Final = 8
_MAX_RANKS: Final = 8
_WRITTEN, _BESIDE = 0, 1

Numbers = npt.NDArray[np.uint64]


class _Sum(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has of a target: on which side, in which shard there, and its sum."""

    target: int
    side: int
    placement: int
    stream: tuple[int, ...]
    sum: int


class _Said(msgspec.Struct, frozen=True, array_like=True):
    sums: list[_Sum]
    trouble: str = ""
    """Why this rank cannot compare, and the leaf."""
    leaf: str = ""


class _Finding(msgspec.Struct, frozen=True, array_like=True):
    leaf: str
    beside: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """Boxes of a leaf that ranks hold in another way than the one that is written: all of that way, if each
    of its shards is there; else one shard of it."""

    beside: Beside
    boxes: tuple[Box, ...]
    stream: tuple[int, ...] | None


def check_layouts(
    meeting: Meeting,
    leaves: Sequence[LeafSource],
    layouts: Sequence[LeafLayout],
    besides: Sequence[Beside],
) -> None:
    """`RanksDisagree`, on all ranks, names leaves that lie on ranks in different ways and are not the same.

    To be called by all ranks, each with its own leaves and with the layouts of all.
    """
    if not besides:
        return
    targets = _targets(layouts, besides)
    here = {leaf.name: leaf for leaf in leaves}
    try:
        said = _Said(list(_sums(meeting.rank, here, layouts, targets)))
    except _Uncut as error:
        said = _Said([], str(error), error.leaf)

    def compare(messages: Sequence[bytes]) -> bytes:
        heard = [msgspec.msgpack.decode(data, type=_Said) for data in messages]
        for rank, its in enumerate(heard):
            if its.trouble:
                return msgspec.msgpack.encode((rank, its.leaf, its.trouble, []))
        return msgspec.msgpack.encode((0, "", "", _findings(heard, layouts, targets)))

    verdict = meeting.agree(msgspec.msgpack.encode(said), compare)
    rank, leaf, trouble, found = msgspec.msgpack.decode(verdict, type=tuple[int, str, str, list[_Finding]])
    if trouble:
        raise RanksDisagree(
            f"rank {rank} holds it in a different layout than other ranks, and {trouble}",
            leaf=leaf,
            ranks=(rank,),
        )
    if found:
        raise _disagreement(found)


class _Uncut(Exception):
    """A shard is not cut as its placements say."""

    def __init__(self, leaf: str, reason: str) -> None:
        super().__init__(reason)
        self.leaf = leaf


def _targets(layouts: Sequence[LeafLayout], besides: Sequence[Beside]) -> list[_Target]:
    found: list[_Target] = []
    for beside in besides:
        layout, placement = layouts[beside.leaf], beside.placement
        streams: dict[tuple[int, ...], Holding] = {}
        for rank in beside.ranks:
            coordinate = placement.mesh.coordinate(rank)
            assert coordinate is not None, "who holds something of a mesh stands in it"
            streams.setdefault(_stream(placement, coordinate), holding(layout, placement, coordinate))
        if len(streams) == math.prod(placement.mesh.shape[dim] for dim in placement.split_dims):
            found.append(_Target(beside, (layout.box_of(placement),), None))
        else:
            for stream, held in streams.items():
                found.append(_Target(beside, tuple(piece.box for piece in held.pieces()), stream))
    return found


def _stream(placement: MeshPlacement, coordinate: Sequence[int]) -> tuple[int, ...]:
    return tuple(coordinate[dim] for dim in placement.split_dims)


def _sums(
    rank: int, here: Mapping[str, LeafSource], layouts: Sequence[LeafLayout], targets: Sequence[_Target]
) -> Iterator[_Sum]:
    """What this rank holds of each target."""
    by_leaf: dict[int, list[int]] = {}
    for number, target in enumerate(targets):
        by_leaf.setdefault(target.beside.leaf, []).append(number)
    buffer = np.empty(_ELEMENTS * 16, np.uint8)
    for leaf, numbers in by_leaf.items():
        layout = layouts[leaf]
        found = here.get(layout.name)
        if found is None:
            continue
        for way, placement in enumerate(layout.placements):
            coordinate = placement.mesh.coordinate(rank)
            if coordinate is not None:
                held = holding(layout, placement, coordinate)
                sums = box_sums(found, layout, held, [targets[n].boxes for n in numbers], buffer)
                stream = _stream(placement, coordinate)
                for target_number, value in zip(numbers, sums, strict=True):
                    yield _Sum(target_number, _WRITTEN, way, stream, value)
        for number in numbers:
            target = targets[number]
            placement = target.beside.placement
            coordinate = placement.mesh.coordinate(rank) if rank in target.beside.ranks else None
            if coordinate is not None and target.stream in (None, _stream(placement, coordinate)):
                held = holding(layout, placement, coordinate)
                (value,) = box_sums(found, layout, held, [target.boxes], buffer)
                yield _Sum(number, _BESIDE, 0, _stream(placement, coordinate), value)


def box_sums(
    leaf: LeafSource,
    layout: LeafLayout,
    held: Holding,
    wanted: Sequence[Sequence[Box]],
    buffer: npt.NDArray[np.uint8],
) -> list[int]:
    """The sums over what an array has of several sets of boxes; `held` says which elements the array has.

    Its memory is gone through once, whatever its size and strides, in windows that fit `buffer`.
    """
    if leaf.shape != held.shape:
        raise _Uncut(
            layout.name,
            f"its array has shape {list(leaf.shape)}, but by its placements it should be {list(held.shape)} "
            f"of {list(layout.shape)}. Shards of uneven sizes must be cut as torch.chunk does",
        )
    size = layout.itemsize
    source: ByteSource = leaf.source
    totals = [0] * len(wanted)
    count = math.prod(leaf.shape)
    for start in range(0, count, _ELEMENTS):
        boxes = boxes_of_range(leaf.shape, start, min(start + _ELEMENTS, count))
        pieces: list[WritePiece] = []
        at = 0
        for box in boxes:
            pieces.append(WritePiece(at, part_of_source(source, leaf.shape, size, box)))
            at += size * box.volume
        copy(pieces, buffer)
        at = 0
        for box in boxes:
            bits = _bits(buffer[at : at + size * box.volume], size).reshape(*box.shape, -1)
            at += size * box.volume
            for piece in held.narrowed(box):
                mixed = _mixed(bits[_slices(piece.local, box)], piece.box, layout.shape)
                for number, targets in enumerate(wanted):
                    for target in targets:
                        both = intersect(piece.box, target)
                        if both is not None:
                            totals[number] += int(mixed[_slices(both, piece.box)].sum(dtype=np.uint64))
    return [total % (1 << 64) for total in totals]


def _bits(data: npt.NDArray[np.uint8], size: int) -> npt.NDArray[Any]:
    """Elements as whole numbers; those of 16 bytes as two."""
    return data.view(f"u{min(size, 8)}")


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, stop - base)
        for start, stop, base in zip(inner.start, inner.stop, outer.start, strict=True)
    )


def _mixed(bits: npt.NDArray[Any], box: Box, shape: tuple[int, ...]) -> Numbers:
    """A number for each element of a box, from its bits and its place in an array of that shape.

    `bits` has one dimension more than the box: the words of an element.
    """
    words = bits.shape[-1]
    place: Any = np.arange(words, dtype=np.uint64)
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        step = words * math.prod(shape[axis + 1 :])
        along = np.arange(start, stop, dtype=np.uint64) * np.uint64(step)
        place = place + along.reshape(-1, *(1,) * (len(shape) - axis))
    mixed: Numbers = np.broadcast_to(place, bits.shape) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= bits
    for shift, factor in ((32, 0xD6E8FEB86659FD93), (29, 0xBF58476D1CE4E5B9)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _findings(
    heard: Sequence[_Said], layouts: Sequence[LeafLayout], targets: Sequence[_Target]
) -> list[_Finding]:
    said: dict[int, tuple[dict[Any, int], dict[Any, int]]] = {}
    holders: dict[int, tuple[list[int], list[int]]] = {}
    unequal: set[int] = set()
    for rank, its in enumerate(heard):
        for item in its.sums:
            sides = said.setdefault(item.target, ({}, {}))
            holders.setdefault(item.target, ([], []))[item.side].append(rank)
            if sides[item.side].setdefault((item.placement, item.stream), item.sum) != item.sum:
                unequal.add(item.target)
    found: list[_Finding] = []
    for target, (written, beside) in sorted(said.items()):
        different = (sum(written.values()) - sum(beside.values())) % (1 << 64)
        if (different or target in unequal) and len(found) < _MAX_LEAVES:
            first, second = holders[target]
            name = layouts[targets[target].beside.leaf].name
            found.append(_Finding(name, tuple(second), tuple(first)))
    return found


def _disagreement(findings: Sequence[_Finding]) -> RanksDisagree:
    lines = [
        f"{finding.leaf}: the values on {name_ranks(finding.beside)} differ from those on "
        f"{name_ranks(finding.written)}"
        for finding in findings
    ]
    if len(findings) == _MAX_LEAVES:
        lines.append("... and perhaps others")
    return RanksDisagree(
        "ranks hold the same leaf in different layouts and with different values:\n    "
        + "\n    ".join(lines)
        + "\n  Only one copy can be stored. Mark state that is meant to differ with everystep.per_rank; make "
        "everything else equal",
        leaf=findings[0].leaf,
        ranks=sorted({rank for finding in findings for rank in finding.beside})[:_MAX_RANKS],
    )


# --- in every save

Crossings = tuple[tuple[str, tuple[tuple[str, Box], ...]], ...]
"""What is compared in every save: elements of this rank's arrays, by leaf and place, under names that all
ranks have for the same elements."""


def crossings_of(rank: int, layouts: Sequence[LeafLayout], besides: Sequence[Beside]) -> Crossings:
    """Elements, taken evenly from each leaf, that this rank holds in one way and others may in another.

    Those that lie in the same shards of all ways go under one name.
    """
    by_leaf: dict[int, list[Beside]] = {}
    for beside in besides:
        by_leaf.setdefault(beside.leaf, []).append(beside)
    names: dict[Any, int] = {}
    found: dict[int, list[tuple[str, Box]]] = {}
    for leaf, others in by_leaf.items():
        layout = layouts[leaf]
        ways = [(placement, True) for placement in layout.placements]
        ways += [(beside.placement, rank in beside.ranks) for beside in others]
        for element in _positions(layout.shape):
            shards: list[tuple[MeshPlacement, tuple[tuple[int, int], ...]]] = []
            mine: Box | None = None
            for placement, listed in ways:
                coordinate = placement.mesh.coordinate(rank) if listed else None
                for coordinates, held in shards_meeting(layout, placement, element):
                    shards.append((placement, tuple(sorted(coordinates.items()))))
                    if coordinate is not None and all(coordinate[d] == c for d, c in coordinates.items()):
                        mine = next(held.inside(element)).local
            number = names.setdefault(tuple(shards), len(names))
            if mine is not None and len(shards) > 1:
                found.setdefault(number, []).append((layout.name, mine))
    return tuple((f"x{number}", tuple(places)) for number, places in sorted(found.items()))


def _positions(shape: tuple[int, ...]) -> Iterator[Box]:
    count = math.prod(shape)
    few = min(count, _POSITIONS)
    for number in range(few):
        at = number * (count - 1) // max(few - 1, 1)
        yield Box(tuple(int(index) for index in np.unravel_index(at, shape)), (1,) * len(shape))


def crossing_samples(crossings: Crossings, here: Mapping[str, LeafSource]) -> dict[str, str]:
    """Digests of these elements as they are now, by name: equal where the elements are."""
    found: dict[str, str] = {}
    for name, places in crossings:
        pieces: list[WritePiece] = []
        leaves: list[str] = []
        at = 0
        for leaf_name, place in places:
            leaf = here[leaf_name]
            if in_host_memory(leaf.source):
                size = leaf.nbytes // math.prod(leaf.shape)
                pieces.append(WritePiece(at, part_of_source(leaf.source, leaf.shape, size, place)))
                leaves.append(leaf_name)
                at += size
        if pieces:
            buffer = np.empty(at, np.uint8)
            copy(pieces, buffer)
            found[f"{name}/{digest(chr(0).join(leaves).encode())}"] = digest(buffer.tobytes())
    return found
