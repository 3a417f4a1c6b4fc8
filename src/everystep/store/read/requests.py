"""What a reader asks of a checkpoint: boxes of leaves, and where their bytes go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from everystep.errors import UnsupportedState
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box, whole
from everystep.plan.fragments import mesh_placement, part_of_destination
from everystep.plan.placement import LeafLayout, LocalBox, holding
from everystep.state import LeafMeta, Restore, Sharding


class BoxRequest(Struct, frozen=True, gc=False):
    """The elements of a box of a leaf, in C order, and where they go."""

    leaf: str
    box: Box
    destination: Any  # Destination | Unkept; msgspec does not look inside


def box_requests(restore: Restore, metas: Mapping[str, LeafMeta], rank: int) -> list[BoxRequest]:
    """What a restore reads straight into the memory of its target, as rank `rank` of the target's meshes.

    New arrays (`Restore.fresh`) are not included: they have no memory yet.
    """
    found: list[BoxRequest] = []
    for name, destination in restore.destinations.items():
        meta = metas[name]
        part = restore.parts.get(name)
        if part is None:
            found.append(BoxRequest(name, whole(meta.shape), destination))
            continue
        sharding, local = part
        size = itemsize(meta.dtype)
        found += [
            BoxRequest(name, piece.box, part_of_destination(destination, local, size, piece.local))
            for piece in _pieces(meta, sharding, local, rank)
            if piece.box.volume
        ]
    return found


def boxes_of_targets(restore: Restore) -> list[BoxRequest]:
    """What a restore reads into arrays of which the target has several boxes, each in its own memory."""
    return [BoxRequest(leaf, box, where) for leaf, box, where in restore.boxes if box.volume]


def _pieces(meta: LeafMeta, sharding: Sharding, local: tuple[int, ...], rank: int) -> Iterator[LocalBox]:
    """The boxes of a leaf that a rank has in an array of shape `local`, and where in it."""
    if sharding.mesh_shape is None:
        box = sharding.box
        if box is None:
            return
        within, pieces = box.shape, iter((LocalBox(box, whole(box.shape), box.shape),))
    else:
        placement = mesh_placement(sharding)
        coordinate = placement.mesh.coordinate(rank)
        if coordinate is None:
            return
        leaf = LeafLayout(meta.name, meta.dtype, meta.shape, (placement,), meta.framework)
        held = holding(leaf, placement, coordinate)
        within, pieces = held.shape, held.pieces()
    if within != local:
        raise UnsupportedState(
            f"{meta.name}: this rank has an array of shape {list(local)}, but by its placements it should "
            f"have {list(within)} of {list(meta.shape)}. Shards of uneven sizes must be cut as torch.chunk "
            "does"
        )
    yield from pieces
