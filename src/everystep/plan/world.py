"""From what each rank sees to who holds what in the world.

A rank knows its own arrays. Of a DTensor it knows how all of it lies on its mesh; of a plain array only that
it is here, whole or a box of something larger. Views are exchanged once per layout, and equal ones once for
all their ranks (a data-parallel world has a single view), so merging takes time in the number of *different*
views, not of ranks.

Ranks that list the same plain array under the same name hold copies of it: whether these are equal is for the
store to find out, by digests. Where a leaf is described in more than one way (tied embeddings on the first
and the last pipeline stage), the view of the lowest rank counts, and the other holders write none of it: they
are listed by `besides`, so that what they hold can be compared with what is written.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from everystep.errors import RanksDisagree
from everystep.format.geometry import Box, disjoint, subtract, whole
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.state import Framework


@dataclass(frozen=True, slots=True)
class Seen:
    """A leaf as one rank sees it: with its placement if it is a DTensor, else as the boxes it has.

    No boxes and no placement: the whole array. `shape` is that of the whole leaf in any case.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: MeshPlacement | None = None
    boxes: tuple[Box, ...] = ()
    framework: Framework = "torch"


View = tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """A leaf that ranks hold in another way than the one that counts, and write none of.

    `leaf` is its number in the list of leaves. `ranks` list it as `placement` says; the mesh may have more.
    """

    leaf: int
    placement: MeshPlacement
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Holders:
    """The ranks that have the same view. Compared by number: there may be thousands, and as many leaves."""

    number: int
    ranks: tuple[int, ...] = field(compare=False)


_Found = Sequence[tuple[Seen, _Holders]]


def merge_views(views: Mapping[View, Sequence[int]]) -> list[LeafLayout]:
    """The world's leaves, from each different view and the ranks that have it.

    The same on every rank: leaves come in the order of the lowest ranks' views.
    """
    by_leaf: dict[str, list[tuple[Seen, _Holders]]] = {}
    in_order = sorted(views.items(), key=lambda entry: min(entry[1]))
    for number, (view, ranks) in enumerate(in_order):
        holders = _Holders(number, tuple(sorted(ranks)))
        names: set[str] = set()
        for seen in view:
            if seen.name in names:
                raise RanksDisagree("listed twice in one view", leaf=seen.name, ranks=holders.ranks[:8])
            names.add(seen.name)
            by_leaf.setdefault(seen.name, []).append((seen, holders))
    meshes: dict[tuple[Hashable, ...], Mesh] = {}
    return [_merge(found, meshes) for found in by_leaf.values()]


def besides(views: Mapping[View, Sequence[int]], leaves: Sequence[LeafLayout]) -> tuple[Beside, ...]:
    """Who holds something of a leaf in another way than the one that counts: of the views that `leaves` were
    merged from. The same on every rank."""
    if len(views) == 1:
        return ()
    numbers = {leaf.name: number for number, leaf in enumerate(leaves)}
    counted = _all_counted(leaves)
    others: dict[tuple[int, MeshPlacement | Box | None], list[int]] = {}
    for view, ranks in sorted(views.items(), key=lambda entry: min(entry[1])):
        for seen in view:
            number = numbers[seen.name]
            absent = [rank for rank in ranks if rank not in counted[number]]
            ways: tuple[MeshPlacement | Box | None, ...] = (
                seen.boxes if seen.placement is None else (seen.placement,)
            )
            for way in (ways or (None,)) if absent else ():
                others.setdefault((number, way), []).extend(absent)
    found: list[Beside] = []
    for (number, way), ranks in others.items():
        holders = tuple(sorted(ranks))
        placement = way if isinstance(way, MeshPlacement) else MeshPlacement(Mesh.of(holders), (), way)
        if leaves[number].box_of(placement).volume:
            found.append(Beside(number, placement, holders))
    return tuple(found)


def _all_counted(leaves: Sequence[LeafLayout]) -> list[frozenset[int]]:
    """The ranks that hold each leaf in the way that counts. Most leaves lie on the same few meshes."""
    known: dict[tuple[int, ...], frozenset[int]] = {}
    found: list[frozenset[int]] = []
    for leaf in leaves:
        key = tuple(id(placement.mesh) for placement in leaf.placements)
        if key not in known:
            known[key] = frozenset(
                int(rank) for placement in leaf.placements for rank in placement.mesh.ranks().flat
            )
        found.append(known[key])
    return found


def _merge(found: _Found, meshes: dict[tuple[Hashable, ...], Mesh]) -> LeafLayout:
    first, its = found[0]
    for seen, others in found[1:]:
        if (seen.dtype, seen.shape) != (first.dtype, first.shape):
            raise RanksDisagree(
                f"{first.dtype} of shape {list(first.shape)} on rank {its.ranks[0]}, "
                f"{seen.dtype} of shape {list(seen.shape)} on rank {others.ranks[0]}",
                leaf=first.name,
                ranks=(its.ranks[0], others.ranks[0]),
            )
    if first.placement is not None:
        placements: tuple[MeshPlacement, ...] = (_stacked(first, first.placement, found, meshes),)
    else:
        placements = _from_boxes(first, found, meshes)
    return LeafLayout(first.name, first.dtype, first.shape, placements, first.framework)


def _stacked(
    first: Seen,
    placement: MeshPlacement,
    found: _Found,
    meshes: dict[tuple[Hashable, ...], Mesh],
) -> MeshPlacement:
    """The placement of a DTensor. Includes other ranks that have it in the same way on meshes of their own.

    That is how data parallel copies of a tensor-parallel model look: each copy has a mesh to itself. Together
    these are one mesh with one dimension more, along which it is replicated.
    """
    if sum(
        len(holders.ranks) for seen, holders in found if seen.placement == placement
    ) == placement.mesh.size and all(seen.placement in (None, placement) for seen, _ in found):
        return placement  # as a rule, and without a look at thousands of ranks
    alike = [placement]
    taken = set(placement.mesh.ranks().flat)
    for seen, _ in found[1:]:
        other = seen.placement
        if other is None or other in alike:
            continue
        ranks = set(other.mesh.ranks().flat)
        same = (other.mesh.shape, other.splits, other.box) == (
            placement.mesh.shape,
            placement.splits,
            placement.box,
        )
        if same and taken.isdisjoint(ranks):
            alike.append(other)
            taken |= ranks
    listed = {rank for seen, holders in found if seen.placement in alike for rank in holders.ranks}
    absent = sorted(int(rank) for rank in taken - listed)
    if absent:
        some = ", ".join(map(str, absent[:8]))
        raise RanksDisagree(
            f"distributed over {len(taken)} ranks, but rank {some}{', ...' if len(absent) > 8 else ''} "
            "does not save it in that way",
            leaf=first.name,
            ranks=absent[:8],
        )
    if len(alike) == 1:
        return placement
    key = tuple(int(rank) for one in alike for rank in one.mesh.ranks().flat)
    mesh = meshes.get(key)
    if mesh is None or mesh.shape[1:] != placement.mesh.shape:
        mesh = meshes[key] = Mesh.of(np.stack([one.mesh.ranks() for one in alike]))
    splits = tuple(Split(split.axis, split.mesh_dim + 1, split.factor) for split in placement.splits)
    return MeshPlacement(mesh, splits, placement.box)


def _from_boxes(
    first: Seen, found: _Found, meshes: dict[tuple[Hashable, ...], Mesh]
) -> tuple[MeshPlacement, ...]:
    """One placement for each different box, over the ranks that have it."""
    everything = whole(first.shape)
    holders: dict[Box, list[_Holders]] = {}
    for seen, its in found:
        if seen.placement is None:
            for box in seen.boxes or (everything,):
                holders.setdefault(box, []).append(its)
    if everything in holders:
        # Some rank has all of it: ranks that have a part need not write any.
        holders = {everything: holders[everything]}
    boxes = [box for box in holders if box.volume] or list(holders)[:1]
    if not disjoint(boxes):
        raise RanksDisagree(
            "boxes of different ranks overlap without being the same",
            leaf=first.name,
            ranks=_ranks_of(its for some in holders.values() for its in some)[:8],
        )
    if sum(box.volume for box in boxes) != math.prod(first.shape):
        gone = subtract(everything, boxes)
        place = (
            f"start {list(gone[0].start)}, shape {list(gone[0].shape)}" if gone else "outside of its shape"
        )
        raise RanksDisagree(
            f"no rank has all of it; missing: {place}",
            leaf=first.name,
            ranks=_ranks_of(its for some in holders.values() for its in some)[:8],
        )
    return tuple(
        MeshPlacement(_mesh(holders[box], meshes), (), None if box == everything else box) for box in boxes
    )


def _mesh(holders: Sequence[_Holders], meshes: dict[tuple[Hashable, ...], Mesh]) -> Mesh:
    key = tuple(dict.fromkeys(holders))
    found = meshes.get(key)
    if found is None:
        found = meshes[key] = Mesh.of(_ranks_of(key))
    return found


def _ranks_of(holders: Iterable[_Holders]) -> tuple[int, ...]:
    return tuple(sorted({rank for its in holders for rank in its.ranks}))
