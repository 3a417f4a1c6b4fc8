"""Between arrays in memory and boxes of leaves: how a rank sees its arrays, and parts of them to transfer.

A piece of a leaf (`everystep.plan.placement.LocalBox`) lies in a box of a local array. Contiguous boxes stay
plain memory, all others are memory with strides: nothing is copied here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from everystep.engine import ByteSource, Consumed, Destination, Memory, Produced, Strided
from everystep.errors import UnsupportedState
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box, contiguous_runs, whole
from everystep.plan.dtensor import splits_of
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement
from everystep.plan.replica_groups import Owned
from everystep.plan.world import Seen, View
from everystep.state import FragmentPlace, Framework, LeafSource, Sharding


def seen(
    name: str, dtype: str, shape: tuple[int, ...], framework: Framework, sharding: Sharding | None
) -> Seen:
    """A leaf as this rank sees it; `shape` is that of the array which is here."""
    if sharding is None:
        return Seen(name, dtype, shape, framework=framework)
    if sharding.mesh_shape is None:
        boxes = () if sharding.box is None else (sharding.box,)
        return Seen(name, dtype, sharding.shape, boxes=boxes, framework=framework)
    return Seen(name, dtype, sharding.shape, mesh_placement(sharding), framework=framework)


def view_of(leaves: Iterable[LeafSource]) -> View:
    """All leaves as this rank sees them. Boxes of one leaf that lie apart are one entry."""
    found: dict[str, Seen] = {}
    for leaf in leaves:
        its = seen(leaf.name, leaf.dtype, leaf.shape, leaf.framework, leaf.sharding)
        known = found.get(leaf.name)
        found[leaf.name] = its if known is None else replace(known, boxes=known.boxes + its.boxes)
    return tuple(found.values())


def mesh_placement(sharding: Sharding) -> MeshPlacement:
    """The placement of an array that lies on a mesh."""
    shape = sharding.mesh_shape
    assert shape is not None, "only an array on a mesh has a placement"
    return MeshPlacement(_mesh(shape, sharding.mesh_ranks), splits_of(shape, sharding.placements))


def _mesh(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
    import numpy as np

    key = shape, ranks
    found = _meshes.get(key)
    if found is None:
        if len(_meshes) >= 64:
            _meshes.clear()
        found = _meshes[key] = Mesh.of(np.asarray(ranks, np.int64).reshape(shape))
    return found


_meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], Mesh] = {}


def sources(
    owned: Sequence[Owned], leaves: Sequence[LeafLayout], here: Sequence[LeafSource], volume: int = 0
) -> list[LeafSource]:
    """What to write for the pieces that a plan gave this rank, out of the arrays that it has `here`."""
    by_name = {leaf.name: leaf for leaf in here}
    by_box = {(leaf.name, leaf.sharding.box): leaf for leaf in here if leaf.fragment is not None}
    counts: dict[str, int] = {}
    found: list[LeafSource] = []
    for item in owned:
        name = leaves[item.leaf].name
        leaf = by_name[name]
        if leaf.fragment is not None:  # one of several boxes
            leaf = by_box[name, leaves[item.leaf].placements[item.placement].box]
        if item.piece.within != leaf.shape:
            raise UnsupportedState(
                f"{name}: this rank has an array of shape {list(leaf.shape)}, but by its placements it "
                f"should have {list(item.piece.within)} of {list(leaf.whole_shape)}. Shards of uneven sizes "
                "must be cut as torch.chunk does"
            )
        index = counts[name] = counts.get(name, -1) + 1
        source = part_of_source(leaf.source, leaf.shape, itemsize(leaf.dtype), item.piece.local)
        box = item.piece.box
        fragment = FragmentPlace(box.start, leaf.whole_shape, index, volume)
        found.append(LeafSource(name, leaf.dtype, box.shape, leaf.framework, source, None, fragment))
    return found


def part_of_source(source: ByteSource, shape: tuple[int, ...], size: int, box: Box) -> ByteSource:
    """The bytes of a box of an array that lies at `source`."""
    if box.shape == shape:
        return source
    if not isinstance(source, Produced):
        return _part_of_host(source, shape, size, box)
    return Produced(size * box.volume, _in_box(source.fill, shape, size, box), source.owner)


def part_of_destination(where: Destination, shape: tuple[int, ...], size: int, box: Box) -> Destination:
    """The memory of a box of an array whose memory is `where`."""
    if box.shape == shape:
        return where
    if not isinstance(where, Consumed):
        return _part_of_host(where, shape, size, box)
    return Consumed(size * box.volume, _in_box(where.drain, shape, size, box))


def _part_of_host(memory: Memory | Strided, shape: tuple[int, ...], size: int, box: Box) -> Memory | Strided:
    if not box.volume:
        return Memory(memory.address, 0, memory.owner)
    if isinstance(memory, Strided):
        strides = memory.strides
    else:
        strides = tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    address = memory.address + sum(at * step for at, step in zip(box.start, strides, strict=True))
    if isinstance(memory, Memory) and contiguous_runs(box, whole(shape)).number <= 1:
        return Memory(address, size * box.volume, memory.owner)
    return Strided(address, size, box.shape, strides, memory.owner)


MoveBytes = Callable[[memoryview, int], None]
"""Moves the bytes of a window, which begin at so many bytes of an array."""


def _in_box(move: MoveBytes, shape: tuple[int, ...], size: int, box: Box) -> MoveBytes:
    """Moves the bytes of a box of the array that `move` moves the bytes of."""
    runs = contiguous_runs(box, whole(shape))
    first = runs.offset * size
    if runs.number <= 1:
        return lambda window, offset: move(window, first + offset)
    starts = [start * size for start in runs.offsets()]
    length = runs.length * size

    def move_runs(window: memoryview, offset: int) -> None:
        at = 0
        while at < len(window):
            number, inside = divmod(offset + at, length)
            count = min(length - inside, len(window) - at)
            move(window[at : at + count], starts[number] + inside)
            at += count

    return move_runs
