"""A rank's view of the state (`everystep.plan.world.View`) as bytes, and the exchange of all views.

Equal views have equal bytes, so those of a data-parallel world travel once. Meshes and placements are listed
once and referred to by number, so the names make up the size.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from everystep.errors import RankFailed
from everystep.format.dtypes import is_known
from everystep.format.geometry import Box
from everystep.plan.placement import Mesh, MeshPlacement, Split
from everystep.plan.world import Seen, View
from everystep.state import Framework
from everystep.store.ranks.meeting import Meeting

_Index = tuple[Annotated[int, Meta(ge=0)], ...]
_Box = tuple[_Index, _Index]


class _Mesh(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    shape: _Index
    strides: tuple[int, ...]
    first: int
    table: tuple[int, ...] | None


class _MeshPlacement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    mesh: Annotated[int, Meta(ge=0)]
    splits: tuple[tuple[int, int, int], ...]
    box: _Box | None


class _Seen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: _Index
    framework: Framework
    placement: Annotated[int, Meta(ge=0)] | None
    boxes: tuple[_Box, ...]


class _View(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    meshes: tuple[_Mesh, ...]
    placements: tuple[_MeshPlacement, ...]
    leaves: tuple[_Seen, ...]


_decoder = msgspec.msgpack.Decoder(_View)


def encode_view(view: View) -> bytes:
    """A view as bytes; the same for equal views."""
    meshes: dict[Mesh, int] = {}
    placements: dict[MeshPlacement, int] = {}
    records: list[_MeshPlacement] = []
    leaves: list[_Seen] = []
    for seen in view:
        number = None
        if seen.placement is not None:
            number = placements.setdefault(seen.placement, len(placements))
            if number == len(records):
                mesh = meshes.setdefault(seen.placement.mesh, len(meshes))
                splits = tuple((split.axis, split.mesh_dim, split.factor) for split in seen.placement.splits)
                box = seen.placement.box
                records.append(_MeshPlacement(mesh, splits, None if box is None else (box.start, box.shape)))
        boxes = tuple((box.start, box.shape) for box in seen.boxes)
        leaves.append(_Seen(seen.name, seen.dtype, seen.shape, seen.framework, number, boxes))
    listed = tuple(_Mesh(mesh.shape, mesh.strides, mesh.first, mesh.table) for mesh in meshes)
    return msgspec.msgpack.encode(_View(listed, tuple(records), tuple(leaves)))


def decode_view(data: bytes) -> View:
    """The inverse of `encode_view`; ValueError when the bytes are no view."""
    try:
        found = _decoder.decode(data)
        meshes = [Mesh(mesh.shape, mesh.strides, mesh.first, mesh.table) for mesh in found.meshes]
        placements = [
            MeshPlacement(
                meshes[placement.mesh],
                tuple(Split(*split) for split in placement.splits),
                None if placement.box is None else Box(*placement.box),
            )
            for placement in found.placements
        ]
        return tuple(_seen(leaf, placements) for leaf in found.leaves)
    except (msgspec.MsgspecError, IndexError, RecursionError) as error:
        raise ValueError(f"not a view: {error}") from None


def exchange_views(meeting: Meeting, view: View) -> dict[View, tuple[int, ...]]:
    """Every different view and the ranks that have it, as `everystep.plan.world.merge_views` takes them."""
    mine = encode_view(view)
    found: dict[View, tuple[int, ...]] = {}
    for data, ranks in meeting.exchange(mine).items():
        try:
            its = view if data == mine else decode_view(data)
        except ValueError as error:
            raise RankFailed(
                f"cannot decode the view that rank {ranks[0]} sent ({error}). Do all ranks run the same "
                "version of Everystep?",
                ranks=ranks[:8],
            ) from None
        found[its] = ranks
    return found


def _seen(leaf: _Seen, placements: list[MeshPlacement]) -> Seen:
    if not is_known(leaf.dtype):
        raise ValueError(f"element type {leaf.dtype[:40]!r}")
    placement = None if leaf.placement is None else placements[leaf.placement]
    boxes = tuple(Box(*box) for box in leaf.boxes)
    return Seen(leaf.name, leaf.dtype, leaf.shape, placement, boxes, leaf.framework)
