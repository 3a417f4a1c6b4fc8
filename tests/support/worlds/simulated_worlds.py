"""Worlds for the tests of many ranks: layouts drawn at random or by name, with every rank's memory at hand.

Nothing here uses the code under test to decide who holds what, but for cutting boxes out of arrays: a rank's
memory is made by splitting index arrays with numpy, as torch splits tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from everystep.format.geometry import Box
from everystep.format.records import Fragment, Leaf, Part, ShardFile
from everystep.plan.placement import LeafLayout, LocalBox, Mesh, MeshPlacement, Split, pieces_of
from everystep.plan.ranks import WritePlan
from everystep.plan.replica_groups import Owned
from everystep.plan.resharding import ReadPlan, StoredIndex, Wanted, plan_reads
from everystep.plan.topology import Topology
from everystep.plan.volumes import stripe

Array = np.ndarray[Any, Any]

DTYPES = {"U8": np.uint8, "F16": np.float16, "F32": np.float32, "I64": np.int64}


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def chunk(indices: Array, parts: int, axis: int) -> list[Array]:
    """``torch.chunk``, filled up with empty pieces."""
    size = -(-indices.shape[axis] // parts)
    return [
        indices.take(range(i * size, min((i + 1) * size, indices.shape[axis])), axis) for i in range(parts)
    ]


def local_array(whole: Array, spread: MeshPlacement, coordinate: Sequence[int]) -> Array:
    """What the rank at that coordinate has in memory, cut step by step as a DTensor would be."""
    found = whole if spread.box is None else whole[inside(spread.box)]
    for split in spread.splits:
        parts, index = spread.mesh.shape[split.mesh_dim], coordinate[split.mesh_dim]
        found = np.concatenate(
            [chunk(piece, parts, split.axis)[index] for piece in chunk(found, split.factor, split.axis)],
            axis=split.axis,
        )
    return np.ascontiguousarray(found).reshape(found.shape)


def memory_of(
    leaves: Sequence[LeafLayout], state: Mapping[str, Array], rank: int
) -> dict[tuple[str, int], Array]:
    """All arrays of a rank, by leaf and number of the spread."""
    found: dict[tuple[str, int], Array] = {}
    for leaf in leaves:
        for number, spread in enumerate(leaf.placements):
            coordinate = spread.mesh.coordinate(rank)
            if coordinate is not None:
                found[leaf.name, number] = local_array(state[leaf.name], spread, coordinate)
    return found


def random_state(leaves: Sequence[LeafLayout], seed: int = 0) -> dict[str, Array]:
    """Arrays of random bits: NaNs and all."""
    random = np.random.default_rng(seed)
    return {
        leaf.name: np.frombuffer(
            random.bytes(math.prod(leaf.shape) * leaf.itemsize), DTYPES[leaf.dtype]
        ).reshape(leaf.shape)
        for leaf in leaves
    }


class Disk:
    """Files in memory, and the parts that say what is in them."""

    def __init__(self) -> None:
        self.files: dict[tuple[int, int], bytes] = {}
        self.parts: list[Part] = []

    def write(
        self, rank: int, leaves: Sequence[LeafLayout], volumes: Sequence[Sequence[tuple[Owned, bytes]]]
    ) -> None:
        """One rank's fragments, one file for each volume."""
        fragments: dict[int, list[Fragment]] = {}
        shards: list[ShardFile] = []
        for volume, items in enumerate(volumes):
            data = bytearray(b"header")
            for item, content in items:
                assert len(content) == item.nbytes
                box = item.piece.box
                fragments.setdefault(item.leaf, []).append(
                    Fragment(box.start, box.shape, volume, len(data), item.nbytes, "")
                )
                data += content
            self.files[rank, volume] = bytes(data)
            shards.append(ShardFile(f"r{rank:05d}.v{volume}.safetensors", len(data), 6, "0" * 16))
        self.parts.append(
            Part(
                rank,
                1 << 20,
                tuple(shards),
                tuple(
                    Leaf(
                        leaves[number].name, leaves[number].dtype, leaves[number].shape, "numpy", tuple(found)
                    )
                    for number, found in fragments.items()
                ),
                (),
            )
        )


def save(plan: WritePlan, state: Mapping[str, Array], speeds: Sequence[float] = (1.0,)) -> Disk:
    """Every rank writes its share out of its own memory."""
    disk = Disk()
    for rank in range(plan.topology.world):
        memory = memory_of(plan.leaves, state, rank)
        disk.write(
            rank,
            plan.leaves,
            [
                [(item, np.ascontiguousarray(taken(memory, plan.leaves, item)).tobytes()) for item in items]
                for items in stripe(plan.fragments(rank), speeds, block_nbytes=1)
            ],
        )
    return disk


def taken(memory: Mapping[tuple[str, int], Array], leaves: Sequence[LeafLayout], item: Owned) -> Array:
    array = memory[leaves[item.leaf].name, item.placement]
    assert array.shape == item.piece.within
    return array[inside(item.piece.local)]


def wants_of(leaves: Iterable[LeafLayout], rank: int) -> Iterator[Wanted]:
    """Everything a rank holds in a layout, as something to be read."""
    for leaf in leaves:
        for _, piece in pieces_of(leaf, rank):
            yield Wanted(leaf.name, piece)


def load(
    disk: Disk,
    leaves: Sequence[LeafLayout],
    rank: int,
    parts: Iterable[Part] | None = None,
    gap_nbytes: int = 0,
) -> tuple[dict[tuple[str, int], Array], ReadPlan]:
    """A rank reads what it holds in another layout; every element must be written exactly once."""
    index = StoredIndex(disk.parts if parts is None else parts)
    wanted = list(wants_of(leaves, rank))
    plan = plan_reads(index, wanted, gap_nbytes=gap_nbytes)
    by_name = {leaf.name: leaf for leaf in leaves}
    filled = {
        (want.leaf, number): np.zeros(want.piece.within, dtype=DTYPES[by_name[want.leaf].dtype])
        for want, number in _with_spread(wanted, leaves, rank)
    }
    times = {key: np.zeros(array.shape, dtype=int) for key, array in filled.items()}
    numbers = [number for _, number in _with_spread(wanted, leaves, rank)]
    for read in plan.reads:
        data = disk.files[read.part, read.file][read.start : read.stop]
        assert len(data) == read.nbytes
        for copy in read.copies:
            leaf = by_name[wanted[copy.wanted].leaf]
            copy_out(
                data,
                read.start,
                copy.source.box,
                copy.source.offset,
                copy.target,
                leaf,
                filled,
                numbers[copy.wanted],
            )
            times[leaf.name, numbers[copy.wanted]][inside(copy.target.local)] += 1
    if not plan.missing:
        assert all((count == 1).all() for count in times.values())
    return filled, plan


def copy_out(
    data: bytes,
    start: int,
    box: Box,
    offset: int,
    target: LocalBox,
    leaf: LeafLayout,
    filled: Mapping[tuple[str, int], Array],
    number: int,
) -> None:
    """Takes the elements of a target out of a range of a file, by way of an array of the whole fragment."""
    dtype = np.dtype(DTYPES[leaf.dtype])
    nbytes = box.volume * dtype.itemsize
    fragment = np.zeros(nbytes, dtype=np.uint8)
    known = np.zeros(nbytes, dtype=bool)
    low, high = max(start, offset), min(start + len(data), offset + nbytes)
    fragment[low - offset : high - offset] = np.frombuffer(data, np.uint8)[low - start : high - start]
    known[low - offset : high - offset] = True
    place = inside(
        Box(tuple(a - b for a, b in zip(target.box.start, box.start, strict=True)), target.box.shape)
    )
    assert known.reshape(*box.shape, dtype.itemsize)[place].all(), (
        "a copy needs bytes its read does not cover"
    )
    filled[leaf.name, number][inside(target.local)] = fragment.view(dtype).reshape(box.shape)[place]


def _with_spread(
    wanted: Sequence[Wanted], leaves: Sequence[LeafLayout], rank: int
) -> list[tuple[Wanted, int]]:
    numbers = [number for leaf in leaves for number, _ in pieces_of(leaf, rank)]
    return list(zip(wanted, numbers, strict=True))


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def holds_all_of(
    leaves: Sequence[LeafLayout], state: Mapping[str, Array], rank: int, filled: Mapping[Any, Array]
) -> bool:
    """Whether what was loaded is what the rank should have; arrays with no elements need not be loaded."""
    expected = memory_of(leaves, state, rank)
    return (
        all(same(filled[key], array) for key, array in expected.items() if array.size)
        and filled.keys() <= expected.keys()
    )


# ---- drawn worlds


@st.composite
def meshes(draw: st.DrawFn, world: int) -> Mesh:
    """1 to 4 dimensions over some ranks of a world: in order, strided, or in any order at all."""
    shape = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda dims: math.prod(dims) <= world)
    )
    size = math.prod(shape)
    kind = draw(st.sampled_from(["grid", "stepped", "any"]))
    if kind == "grid":
        return Mesh.grid(*shape, first=draw(st.integers(0, world - size)))
    if kind == "stepped":
        step = draw(st.integers(1, max(1, (world - 1) // max(1, size - 1))))
        return Mesh.of(np.arange(size).reshape(shape) * step)
    return Mesh.of(np.array(draw(st.permutations(range(world)))[:size]).reshape(shape))


@st.composite
def spreads(draw: st.DrawFn, world: int, shape: tuple[int, ...], box: Box | None = None) -> MeshPlacement:
    mesh = draw(meshes(world))
    splits: list[Split] = []
    if shape:
        for dim in draw(st.permutations(range(len(mesh.shape)))):
            if draw(st.booleans()):
                splits.append(
                    Split(draw(st.integers(0, len(shape) - 1)), dim, draw(st.sampled_from([1, 1, 1, 2, 3])))
                )
    return MeshPlacement(mesh, tuple(splits), box)


@st.composite
def leaf_layouts(draw: st.DrawFn, world: int, name: str, dtype: str, shape: tuple[int, ...]) -> LeafLayout:
    """One spread, or (a leaf cut in two) two of different boxes."""
    if shape and shape[0] >= 2 and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, shape[0]))
        rest = (0,) * (len(shape) - 1)
        boxes = (Box((0, *rest), (at, *shape[1:])), Box((at, *rest), (shape[0] - at, *shape[1:])))
        return LeafLayout(name, dtype, shape, tuple(draw(spreads(world, shape, box)) for box in boxes))
    return LeafLayout(name, dtype, shape, (draw(spreads(world, shape)),))


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(0, 300))


@st.composite
def leaf_kinds(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (f"leaf.{number}", draw(st.sampled_from(sorted(DTYPES))), draw(shapes))
        for number in range(draw(st.integers(0, 6)))
    ]


@st.composite
def layouts(
    draw: st.DrawFn, kinds: Sequence[tuple[str, str, tuple[int, ...]]], world: int
) -> list[LeafLayout]:
    return [draw(leaf_layouts(world, *kind)) for kind in kinds]


@st.composite
def topologies(draw: st.DrawFn, world: int) -> Topology:
    nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=world, max_size=world)))
    sockets = tuple(draw(st.lists(st.integers(0, 1), min_size=world, max_size=world)))
    return Topology(nodes, sockets)
