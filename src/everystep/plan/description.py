"""A writing plan as bytes: small, so that it can be compared between ranks and kept beside what it describes.

Ranks whose plans have the same `fingerprint` will write each byte once, together; that one digest is all they
need to exchange. And a reader that has the description finds out with `WritePlan.sources` which few of
thousands of parts it needs.

Meshes and placements are listed once and referred to by number, so the size is that of the names. What is
decoded may be damaged or made up: bounds are checked before anything grows with a number found in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from everystep.errors import CorruptCheckpoint
from everystep.format.checksums import digest
from everystep.format.dtypes import is_known
from everystep.format.geometry import Box
from everystep.format.records import MAX_RANK, Count, Index, Rank
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology, Writers
from everystep.state import Framework

FORMAT: Final = "everystep-layout/1"

_MAX_FACTOR = 1 << 16
_T = TypeVar("_T", bound=Hashable)

_Positive = Annotated[int, Meta(ge=1, le=MAX_RANK + 1)]
_Runs = tuple[tuple[Count, _Positive], ...]


class _Mesh(Struct, frozen=True, forbid_unknown_fields=True):
    shape: Annotated[tuple[_Positive, ...], Meta(max_length=64)]
    strides: Annotated[tuple[Rank, ...], Meta(max_length=64)]
    first: Rank
    table: Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANK + 1)] | None


class _Split(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    axis: Annotated[int, Meta(ge=0, le=63)]
    mesh_dim: Annotated[int, Meta(ge=0, le=63)]
    factor: Annotated[int, Meta(ge=1, le=_MAX_FACTOR)]


class _MeshPlacement(Struct, frozen=True, forbid_unknown_fields=True):
    mesh: Count
    splits: tuple[_Split, ...]
    box: tuple[Index, Index] | None


class _Leaf(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: Index
    framework: Framework
    placements: tuple[Count, ...]


class _Plan(Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    nodes: _Runs
    sockets: _Runs
    writers: Writers
    block_nbytes: Annotated[int, Meta(ge=1, le=1 << 62)]
    meshes: tuple[_Mesh, ...]
    placements: tuple[_MeshPlacement, ...] = msgspec.field(name="spreads")  # its name in the format
    leaves: tuple[_Leaf, ...]


_decoder = msgspec.json.Decoder(_Plan)


def encode_plan(plan: WritePlan) -> bytes:
    """The description a plan was made from. Equal plans have equal bytes."""
    meshes: dict[Mesh, int] = {}
    placements: dict[MeshPlacement, int] = {}
    records: list[_MeshPlacement] = []
    leaves: list[_Leaf] = []
    for leaf in plan.leaves:
        for placement in leaf.placements:
            if placement not in placements:
                splits = tuple(_Split(split.axis, split.mesh_dim, split.factor) for split in placement.splits)
                box = None if placement.box is None else (placement.box.start, placement.box.shape)
                records.append(_MeshPlacement(_number(meshes, placement.mesh), splits, box))
                _number(placements, placement)
        numbers = tuple(placements[placement] for placement in leaf.placements)
        leaves.append(_Leaf(leaf.name, leaf.dtype, leaf.shape, leaf.framework, numbers))
    return msgspec.json.encode(
        _Plan(
            FORMAT,
            _runs(plan.topology.nodes),
            _runs(plan.topology.sockets),
            plan.writers,
            plan.block_nbytes,
            tuple(_Mesh(mesh.shape, mesh.strides, mesh.first, mesh.table) for mesh in meshes),
            tuple(records),
            tuple(leaves),
        )
    )


def fingerprint(plan: WritePlan) -> str:
    """Sixteen digits that differ between ranks that would not write the same checkpoint together."""
    return digest(encode_plan(plan))


def decode_plan(data: bytes, where: str) -> WritePlan:
    """The plan that such bytes describe; `where` they come from, for the error message."""
    try:
        found = _decoder.decode(data)
        if found.format != FORMAT:
            raise ValueError(f"format {found.format[:40]!r}; this version reads {FORMAT!r}")
        return _build(found)
    except (ValueError, IndexError) as error:
        raise CorruptCheckpoint(f"not a layout: {str(error)[:400]}", path=where) from None


def _build(found: _Plan) -> WritePlan:
    if sum(count for _, count in found.nodes) > MAX_RANK + 1:
        raise ValueError("more ranks than a world can have")
    topology = Topology(_unrolled(found.nodes), _unrolled(found.sockets))
    for mesh in found.meshes:
        places = 1
        for size in mesh.shape:
            places *= size
            if places > topology.world:
                raise ValueError(f"a mesh of shape {mesh.shape[:8]} in a world of {topology.world}")
    meshes = [Mesh(mesh.shape, mesh.strides, mesh.first, mesh.table) for mesh in found.meshes]
    placements = [
        MeshPlacement(
            meshes[placement.mesh],
            tuple(Split(split.axis, split.mesh_dim, split.factor) for split in placement.splits),
            None if placement.box is None else Box(*placement.box),
        )
        for placement in found.placements
    ]
    leaves: list[LeafLayout] = []
    for leaf in found.leaves:
        if not is_known(leaf.dtype):
            raise ValueError(f"unknown element type {leaf.dtype[:80]!r}")
        ways = tuple(placements[number] for number in leaf.placements)
        leaves.append(LeafLayout(leaf.name, leaf.dtype, leaf.shape, ways, leaf.framework))
    return WritePlan(leaves, topology, writers=found.writers, block_nbytes=found.block_nbytes)


def _number(known: dict[_T, int], item: _T) -> int:
    return known.setdefault(item, len(known))


def _runs(values: Sequence[int]) -> _Runs:
    return tuple((value, len(list(group))) for value, group in itertools.groupby(values))


def _unrolled(runs: _Runs) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(itertools.repeat(value, count) for value, count in runs))
