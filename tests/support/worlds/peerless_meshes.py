"""Worlds of many ranks in one process: meshes without peers, and which elements of an array a rank has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from everystep.format.geometry import Box
from everystep.plan.fragments import mesh_placement
from everystep.plan.placement import LeafLayout, holding
from everystep.state import FlatState, LeafMeta, LeafSource, Restore, Sharding
from support.states.memory_store import Saved, fresh, read, through_json, write

Numbers = np.ndarray[Any, Any]


@contextlib.contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """A process group that never talks to anybody: this process is one rank of many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def part(whole: Numbers, sharding: Sharding, rank: int) -> Numbers:
    """What a rank has of an array, told without torch."""
    assert whole.shape == sharding.shape
    if sharding.mesh_shape is None:
        box = sharding.box
        assert box is not None
        return np.ascontiguousarray(whole[slices(box)])
    placement = mesh_placement(sharding)
    coordinate = placement.mesh.coordinate(rank)
    assert coordinate is not None
    found = holding(LeafLayout("x", "F32", whole.shape, (placement,)), placement, coordinate)
    local = np.empty(found.shape, whole.dtype)
    for piece in found.pieces():
        local[slices(piece.local)] = whole[slices(piece.box)]
    return local


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def numbers(shape: tuple[int, ...], start: float = 0.0) -> torch.Tensor:
    """All elements differ."""
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def contents(leaf: LeafSource) -> Numbers:
    """The local bytes of a leaf of float32."""
    return np.frombuffer(read(leaf.source), np.float32).reshape(leaf.shape)


def as_saved(flat: FlatState, wholes: Mapping[str, Numbers]) -> Saved:
    """A checkpoint of all ranks: the tree of this one, and the whole of every leaf (float32)."""
    leaves = {leaf.name: leaf for leaf in flat.leaves}
    return Saved(
        through_json(flat.tree),
        {
            name: LeafMeta(name, leaves[name].dtype if name in leaves else "F32", whole.shape, "torch")
            for name, whole in wholes.items()
        },
        dict(flat.aliases),
        {name: whole.tobytes() for name, whole in wholes.items()},
    )


def restore_parts(
    into: object, saved: Saved, wholes: Mapping[str, Numbers], rank: int, **options: Any
) -> Restore:
    """Restores as a store does that reads only what this rank has."""
    made = Restore(into, saved.tree, saved.leaves, saved.aliases, **options)
    if made.mismatch:
        raise made.mismatch.error()
    for name, where in made.destinations.items():
        whole = wholes[saved.aliases.get(name, name)]
        if name in made.parts:
            sharding, shape = made.parts[name]
            whole = part(whole, sharding, rank)
            assert whole.shape == shape
        write(where, whole.tobytes())
    made.finish(fresh(saved, made.fresh))
    return made
