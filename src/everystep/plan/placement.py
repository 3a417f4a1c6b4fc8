"""Which rank holds which elements of a leaf, described by meshes and splits instead of by lists.

A world of thousands of ranks with thousands of leaves is never written down rank by rank. Ranks stand in a
`Mesh`. A `MeshPlacement` lists the mesh dimensions along which an array is split, in order; along all others
it is replicated. From that the elements any rank holds, the ranks that hold an element, and the sizes of all
shards follow by arithmetic in the number of mesh dimensions.

Splits cut as torch's DTensor does. `Shard` is ``torch.chunk``: pieces of ``ceil(n / parts)``, the last ones
short or empty. `_StridedShard` cuts into `factor` pieces first and gives each rank its chunk of every piece,
one after the other: such a rank may hold several intervals. Splits apply in the order they are listed. Fully
sharded on top of tensor parallel is the tensor-parallel split, then the other; torch calls that a strided
shard and a plain one, which is the same where sizes divide evenly (`everystep.plan.dtensor`).

Anything irregular (a name on one pipeline stage, boxes that follow no rule) is a leaf with several
placements, each of one box over one mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box, disjoint, whole
from everystep.state import Framework

Intervals = tuple[tuple[int, int], ...]
"""Half-open intervals of indices along one dimension, in the order in which a local array holds them."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid: coordinate ``(i, j, ...)`` is rank ``first + i * strides[0] + j * strides[1] + ...``.

    Where ranks follow no such rule, `table` lists them in C order, and the strides count places in it.
    Use `grid` and `of` to make one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int = 0
    table: tuple[int, ...] | None = None
    _places: dict[int, int] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or min(self.shape, default=1) < 1:
            raise ValueError(f"mesh of shape {self.shape} with strides {self.strides}")
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride <= reach:
                raise ValueError(f"two places of the mesh {self.shape} by {self.strides} are the same rank")
            reach += (size - 1) * stride
        if self.table is not None:
            places = {rank: place for place, rank in enumerate(self.table)}
            if len(places) != self.size or len(self.table) != self.size:
                raise ValueError(f"a mesh of shape {self.shape} needs {self.size} different ranks")
            object.__setattr__(self, "_places", places)

    @classmethod
    def grid(cls, *shape: int, first: int = 0) -> Mesh:
        """Consecutive ranks in C order, as ``init_device_mesh`` arranges them."""
        return cls(shape, _c_strides(shape), first)

    @classmethod
    def of(cls, ranks: npt.ArrayLike) -> Mesh:
        """A mesh from an array of ranks (``DeviceMesh.mesh``)."""
        array = np.asarray(ranks, dtype=np.int64)
        shape = tuple(int(n) for n in array.shape)
        first = int(array.flat[0])
        strides = tuple(
            int(array[tuple(int(d == axis) for axis in range(array.ndim))]) - first if shape[d] > 1 else 0
            for d in range(array.ndim)
        )
        if min(strides, default=0) >= 0 and np.array_equal(_lattice(shape, strides) + first, array):
            return cls(shape, strides, first)
        return cls(shape, _c_strides(shape), 0, tuple(int(rank) for rank in array.flat))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        place = self.first + sum(c * s for c, s in zip(coordinate, self.strides, strict=True))
        return place if self.table is None else self.table[place]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where a rank stands, or None when it is not in this mesh. O(dimensions)."""
        if self._places is not None:
            found = self._places.get(rank)
            if found is None:
                return None
            rest = found
        else:
            rest = rank - self.first
        coordinate = [0] * len(self.shape)
        for dim in sorted(range(len(self.shape)), key=self.strides.__getitem__, reverse=True):
            if self.shape[dim] > 1:
                coordinate[dim], rest = divmod(rest, self.strides[dim])
                if not 0 <= coordinate[dim] < self.shape[dim]:
                    return None
        return None if rest else tuple(coordinate)

    def ranks(self) -> npt.NDArray[np.int64]:
        """All ranks, as an array of the mesh's shape."""
        places = _lattice(self.shape, self.strides) + self.first
        return places if self.table is None else np.asarray(self.table, dtype=np.int64)[places]


@dataclass(frozen=True, slots=True)
class Split:
    """A dimension of an array is split over a dimension of the mesh; `factor` is that of a strided shard."""

    axis: int
    mesh_dim: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """How a box of a leaf (all of it, if none is given) lies on a mesh: split by `splits`, in their order.

    Along mesh dimensions without a split, ranks hold the same elements.
    """

    mesh: Mesh
    splits: tuple[Split, ...] = ()
    box: Box | None = None

    def __post_init__(self) -> None:
        dims = self.split_dims
        if len(set(dims)) != len(self.splits) or any(d >= len(self.mesh.shape) for d in dims):
            raise ValueError(f"splits {self.splits} do not fit a mesh of {len(self.mesh.shape)} dimensions")
        if any(split.factor < 1 or split.axis < 0 or split.mesh_dim < 0 for split in self.splits):
            raise ValueError(f"splits {self.splits} make no sense")

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The mesh dimensions along which ranks hold different elements, ascending."""
        return tuple(sorted({split.mesh_dim for split in self.splits}))


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """A leaf and who holds it. Several placements hold different boxes of it, and together all of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]
    framework: Framework = "torch"

    def __post_init__(self) -> None:
        boxes = [self.box_of(placement) for placement in self.placements]
        for box, placement in zip(boxes, self.placements, strict=True):
            if len(box.start) != len(self.shape) or any(
                stop > n for stop, n in zip(box.stop, self.shape, strict=True)
            ):
                raise ValueError(f"leaf {self.name!r} of shape {self.shape} has no box {box}")
            if any(split.axis >= len(self.shape) for split in placement.splits):
                raise ValueError(
                    f"leaf {self.name!r} of shape {self.shape} cannot be split by {placement.splits}"
                )
        if sum(box.volume for box in boxes) != math.prod(self.shape) or not disjoint(boxes):
            raise ValueError(f"the placements of leaf {self.name!r} do not hold each of its elements once")

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    def box_of(self, placement: MeshPlacement) -> Box:
        return whole(self.shape) if placement.box is None else placement.box


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a leaf, and the box of a local array of shape `within` where a rank has these elements."""

    box: Box
    local: Box
    within: tuple[int, ...]

    def part(self, box: Box) -> LocalBox:
        """The piece for a box inside of this one."""
        shift = tuple(a + b - c for a, b, c in zip(self.local.start, box.start, self.box.start, strict=True))
        return LocalBox(box, Box(shift, box.shape), self.within)


@dataclass(frozen=True, slots=True)
class Holding:
    """The elements of a placement at one coordinate: intervals along each dimension, and all combinations."""

    axes: tuple[Intervals, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local array: intervals follow each other in it."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.axes)

    def pieces(self) -> Iterator[LocalBox]:
        """The boxes held, in the order of the local array; one unless a split is strided."""
        return self.narrowed(whole(self.shape))

    def narrowed(self, local: Box) -> Iterator[LocalBox]:
        """The same for a box of the local array."""
        return self._combined(map(_overlaps, self.axes, local.start, local.stop))

    def inside(self, box: Box) -> Iterator[LocalBox]:
        """The same for a box of the leaf: what is held of it."""
        return self._combined(map(_meets, self.axes, box.start, box.stop))

    def _combined(self, spans: Iterable[Iterable[tuple[int, int, int]]]) -> Iterator[LocalBox]:
        within = self.shape
        for cell in itertools.product(*spans):
            shape = tuple(length for _, _, length in cell)
            yield LocalBox(
                Box(tuple(start for start, _, _ in cell), shape),
                Box(tuple(at for _, at, _ in cell), shape),
                within,
            )


def holding(leaf: LeafLayout, placement: MeshPlacement, coordinate: Sequence[int]) -> Holding:
    """What the rank at that coordinate of the placement's mesh holds. O(splits), times their factors."""
    box = leaf.box_of(placement)
    axes: list[Intervals] = [
        ((start, stop),) if start < stop else () for start, stop in zip(box.start, box.stop, strict=True)
    ]
    for split in placement.splits:
        parts = placement.mesh.shape[split.mesh_dim]
        axes[split.axis] = _take(axes[split.axis], split.factor, parts, coordinate[split.mesh_dim])
    return Holding(tuple(axes))


def pieces_of(leaf: LeafLayout, rank: int) -> Iterator[tuple[int, LocalBox]]:
    """Everything a rank holds of a leaf: the number of the placement, and a piece that is not empty."""
    for number, placement in enumerate(leaf.placements):
        coordinate = placement.mesh.coordinate(rank)
        if coordinate is not None:
            for piece in holding(leaf, placement, coordinate).pieces():
                yield number, piece


def shards_meeting(
    leaf: LeafLayout, placement: MeshPlacement, box: Box
) -> Iterator[tuple[dict[int, int], Holding]]:
    """The shards of a placement that hold elements of a box.

    Each as its coordinates along the split mesh dimensions, and what is held there. Takes time in
    proportion to the number of shards found, not to the size of the mesh.
    """
    own = leaf.box_of(placement)
    choices: list[list[tuple[dict[int, int], Intervals]]] = []
    for axis in range(len(leaf.shape)):
        low, high = max(box.start[axis], own.start[axis]), min(box.stop[axis], own.stop[axis])
        if low >= high:
            return
        splits = [split for split in placement.splits if split.axis == axis]
        found: list[tuple[dict[int, int], Intervals]] = []
        _find(((own.start[axis], own.stop[axis]),), splits, placement.mesh.shape, low, high, {}, found)
        choices.append(found)
    for combination in itertools.product(*choices):
        yield (
            {dim: index for chosen, _ in combination for dim, index in chosen.items()},
            Holding(tuple(intervals for _, intervals in combination)),
        )


def local_sizes(leaf: LeafLayout, placement: MeshPlacement) -> npt.NDArray[np.int64]:
    """Number of elements at every coordinate of the mesh, as an array that broadcasts to its shape."""
    dims = len(placement.mesh.shape)
    lengths: list[npt.NDArray[np.int64]] = [
        np.full((1,) * dims, n, dtype=np.int64) for n in leaf.box_of(placement).shape
    ]
    for split in placement.splits:
        parts = placement.mesh.shape[split.mesh_dim]
        index = np.arange(parts, dtype=np.int64).reshape(
            [parts if dim == split.mesh_dim else 1 for dim in range(dims)]
        )
        length = lengths[split.axis]
        lengths[split.axis] = sum(
            (
                _chunk_lengths(_chunk_lengths(length, split.factor, np.int64(number)), parts, index)
                for number in range(split.factor)
            ),
            start=np.zeros((1,) * dims, dtype=np.int64),
        )
    volume: npt.NDArray[np.int64] = math.prod(lengths, start=np.ones((1,) * dims, dtype=np.int64))
    return volume


def _c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _lattice(shape: Sequence[int], strides: Sequence[int]) -> npt.NDArray[np.int64]:
    places = np.zeros(tuple(shape), dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        places += (np.arange(size, dtype=np.int64) * stride).reshape((-1,) + (1,) * (len(shape) - dim - 1))
    return places


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Where a chunk of ``torch.chunk`` begins and ends; empty ones lie at the end."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def _chunk_lengths(
    length: npt.NDArray[np.int64], parts: int, index: npt.NDArray[np.int64] | np.int64
) -> npt.NDArray[np.int64]:
    size = -(-length // parts)
    lengths: npt.NDArray[np.int64] = np.minimum((index + 1) * size, length) - np.minimum(index * size, length)
    return lengths


def _take(intervals: Intervals, factor: int, parts: int, index: int) -> Intervals:
    """The intervals left to one of `parts` ranks."""
    length = sum(stop - start for start, stop in intervals)
    taken: list[tuple[int, int]] = []
    for number in range(factor):
        base, end = _chunk(length, factor, number)
        low, high = _chunk(end - base, parts, index)
        for start, _, count in _overlaps(intervals, base + low, base + high):
            if taken and taken[-1][1] == start:
                taken[-1] = (taken[-1][0], start + count)
            else:
                taken.append((start, start + count))
    return tuple(taken)


def _overlaps(intervals: Intervals, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The local range `low` to `high` as (global start, local start, length)."""
    at = 0
    for start, stop in intervals:
        begin, end = max(low, at), min(high, at + stop - start)
        if begin < end:
            yield start + begin - at, begin, end - begin
        at += stop - start


def _meets(intervals: Intervals, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The held parts of the global range `low` to `high`, as (global start, local start, length)."""
    at = 0
    for start, stop in intervals:
        begin, end = max(low, start), min(high, stop)
        if begin < end:
            yield begin, at + begin - start, end - begin
        at += stop - start


def _find(
    intervals: Intervals,
    splits: Sequence[Split],
    mesh_shape: Sequence[int],
    low: int,
    high: int,
    chosen: dict[int, int],
    found: list[tuple[dict[int, int], Intervals]],
) -> None:
    """Follow the splits of one dimension down to every rank that holds some of `low` to `high`."""
    if not splits:
        found.append((chosen, intervals))
        return
    split, parts = splits[0], mesh_shape[splits[0].mesh_dim]
    length = sum(stop - start for start, stop in intervals)
    wanted = [(at, at + count) for _, at, count in _meets(intervals, low, high)]
    indices: set[int] = set()
    for number in range(split.factor):
        base, end = _chunk(length, split.factor, number)
        size = -(-(end - base) // parts)
        for begin, stop in wanted:
            a, b = max(begin, base) - base, min(stop, end) - base
            if a < b:
                indices.update(range(a // size, (b - 1) // size + 1))
    for index in sorted(indices):
        _find(
            _take(intervals, split.factor, parts, index),
            splits[1:],
            mesh_shape,
            low,
            high,
            {**chosen, split.mesh_dim: index},
            found,
        )
