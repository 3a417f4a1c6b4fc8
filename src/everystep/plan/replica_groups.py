"""Leaves grouped by the ranks that hold them: these ranks can share the reading or writing of their bytes.

A *replica group* is all that lies on one mesh and is split along the same of its dimensions. It consists of
*streams*: one for each coordinate along these split dimensions, held in equal copies by the ranks along the
others. A stream is local arrays laid end to end, and ranks share it by cutting it.

A model has few replica groups (replicated, fully sharded, tensor parallel, ... per pipeline stage), and its
leaves are of few *kinds* (same shape, type and splits). So the sizes of a replica group take numpy arithmetic
on kinds x ranks numbers, and one stream takes time in the number of its leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everystep.format.geometry import boxes_of_range
from everystep.plan.byte_stream import ByteStream
from everystep.plan.placement import Holding, LeafLayout, LocalBox, Mesh, holding, local_sizes

_CACHED_NUMBERS = 1 << 22
"""Streams are kept while they hold no more numbers than this in all: a rank needs few, a simulation many."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Something for one rank to transfer: a piece of a leaf, all of it in one array of that rank.

    `leaf` and `placement` are numbers in the plan's list of leaves, and in that leaf's placements.
    """

    leaf: int
    placement: int
    piece: LocalBox
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """The leaves of a replica group at one coordinate: what is there of each kind, and all end to end."""

    holdings: tuple[Holding, ...]
    byte_stream: ByteStream


class ReplicaGroup:
    """Leaves on one mesh, split along the same of its dimensions."""

    def __init__(self, leaves: Sequence[LeafLayout], mesh: Mesh, split_dims: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.split_dims = split_dims
        self.copy_dims = tuple(dim for dim in range(len(mesh.shape)) if dim not in split_dims)
        self.members: list[tuple[int, int]] = []
        self._leaves = leaves
        self._places: dict[tuple[int, int], int] = {}
        self._kinds: list[int] = []
        self._samples: list[tuple[int, int]] = []
        self._kind_of: dict[object, int] = {}
        self._streams: dict[int, Stream] = {}

    def add(self, leaf: int, placement: int) -> None:
        """Put a leaf at the end of the replica group's streams."""
        layout = self._leaves[leaf]
        way = layout.placements[placement]
        kind = self._kind_of.setdefault(
            (layout.shape, layout.itemsize, way.splits, way.box), len(self._samples)
        )
        if kind == len(self._samples):
            self._samples.append((leaf, placement))
        self._places[leaf, placement] = len(self.members)
        self.members.append((leaf, placement))
        self._kinds.append(kind)

    @property
    def copies(self) -> int:
        """How many ranks hold each stream."""
        return math.prod(self.mesh.shape[dim] for dim in self.copy_dims)

    def ranks(self) -> npt.NDArray[np.int64]:
        """The holders of every stream: one row each."""
        order = (*self.split_dims, *self.copy_dims)
        rows: npt.NDArray[np.int64] = self.mesh.ranks().transpose(order).reshape(-1, self.copies)
        return rows

    def stream_number(self, coordinates: Mapping[int, int]) -> int:
        """The number of a stream, from its coordinates along the split dimensions."""
        number = 0
        for dim in self.split_dims:
            number = number * self.mesh.shape[dim] + coordinates[dim]
        return number

    def copy_number(self, coordinate: Sequence[int]) -> int:
        """Which of a stream's holders the rank at this coordinate is."""
        number = 0
        for dim in self.copy_dims:
            number = number * self.mesh.shape[dim] + coordinate[dim]
        return number

    def totals(self) -> npt.NDArray[np.int64]:
        """The bytes of every stream."""
        shape = [n if dim in self.split_dims else 1 for dim, n in enumerate(self.mesh.shape)]
        total = np.zeros(shape, dtype=np.int64)
        counts = np.bincount(np.asarray(self._kinds, dtype=np.int64), minlength=len(self._samples))
        for (leaf, placement), count in zip(self._samples, counts.tolist(), strict=True):
            layout = self._leaves[leaf]
            total += local_sizes(layout, layout.placements[placement]) * (layout.itemsize * count)
        return total.reshape(-1)

    def stream(self, number: int) -> Stream:
        """A stream by its number."""
        found = self._streams.get(number)
        if found is None:
            if (len(self._streams) + 1) * len(self.members) > _CACHED_NUMBERS:
                self._streams.clear()
            found = self._streams[number] = self._make_stream(number)
        return found

    def _make_stream(self, number: int) -> Stream:
        coordinate = [0] * len(self.mesh.shape)
        for dim in reversed(self.split_dims):
            number, coordinate[dim] = divmod(number, self.mesh.shape[dim])
        holdings: list[Holding] = []
        for leaf, placement in self._samples:
            layout = self._leaves[leaf]
            holdings.append(holding(layout, layout.placements[placement], coordinate))
        shapes = [held.shape for held in holdings]
        itemsizes = [self._leaves[leaf].itemsize for leaf, _ in self._samples]
        sizes = np.asarray(
            [math.prod(shape) * size for shape, size in zip(shapes, itemsizes, strict=True)], dtype=np.int64
        )
        kinds = self._kinds
        byte_stream = ByteStream([shapes[k] for k in kinds], [itemsizes[k] for k in kinds], sizes[kinds])
        return Stream(tuple(holdings), byte_stream)

    def place(self, leaf: int, placement: int) -> int:
        """Which array of the streams a leaf is."""
        return self._places[leaf, placement]

    def cut(self, number: int, start: int, stop: int) -> Iterator[Owned]:
        """The parts of a stream between two cuts."""
        stream = self.stream(number)
        for place, first, last in stream.byte_stream.between(start, stop):
            leaf, placement = self.members[place]
            held, itemsize = stream.holdings[self._kinds[place]], self._leaves[leaf].itemsize
            for local in boxes_of_range(held.shape, first, last):
                for piece in held.narrowed(local):
                    yield Owned(leaf, placement, piece, piece.box.volume * itemsize)


def replica_groups_of(leaves: Sequence[LeafLayout]) -> list[ReplicaGroup]:
    """The replica groups of a world, those with the fewest copies (the least choice) first. O(leaves)."""
    found: dict[tuple[Mesh, tuple[int, ...]], ReplicaGroup] = {}
    for leaf, layout in enumerate(leaves):
        for placement, way in enumerate(layout.placements):
            key = way.mesh, way.split_dims
            replica_group = found.get(key)
            if replica_group is None:
                replica_group = found[key] = ReplicaGroup(leaves, *key)
            replica_group.add(leaf, placement)
    return sorted(found.values(), key=lambda replica_group: replica_group.copies)
