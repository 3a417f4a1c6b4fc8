"""What several ranks want from a checkpoint, so that each byte is read once per node.

Every rank says how it wants each leaf: as a whole array, as a box, or placed on a mesh. Leaves that several
ranks want in exactly the same way are shared (`everystep.plan.read_sharing`). A rank reads everything else by
itself. This is pure arithmetic on the same input, so every rank gets the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everystep.format.geometry import Box
from everystep.plan.fragments import part_of_destination
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, local_sizes
from everystep.plan.read_sharing import ReadGroup, SharePlan
from everystep.plan.topology import Topology
from everystep.plan.world import Seen, View
from everystep.store.ranks.exchange import LocalArray
from everystep.store.read.requests import BoxRequest


@dataclass(frozen=True, slots=True)
class Common:
    """A leaf as some ranks want it. Of a box, `layout` is that of the box alone, which starts at `origin`."""

    seen: Seen
    layout: LeafLayout
    origin: tuple[int, ...]


class Sharing:
    """What a rank reads, for itself and for others of its node, of what is wanted in common.

    `places` are the arrays of this rank, by how it wants the leaf that goes there.
    """

    def __init__(
        self, commons: Sequence[Common], topology: Topology, rank: int, places: Mapping[Seen, LocalArray]
    ) -> None:
        self._commons = commons
        self._places = places
        self._rank = rank
        self.shared: frozenset[Seen] = frozenset(common.seen for common in commons)
        plan = SharePlan([common.layout for common in commons], topology)
        self.groups: tuple[ReadGroup, ...] = plan.groups(rank)

    def place(self, number: int) -> LocalArray:
        """The array of a leaf's number in the groups."""
        return self._places[self._commons[number].seen]

    def reads(self) -> Iterator[BoxRequest]:
        """What this rank reads."""
        for group in self.groups:
            for share in group.shares:
                for item in share.pieces if share.reader == self._rank else ():
                    common, place = self._commons[item.leaf], self.place(item.leaf)
                    start = tuple(a + b for a, b in zip(item.piece.box.start, common.origin, strict=True))
                    yield BoxRequest(
                        common.seen.name,
                        Box(start, item.piece.box.shape),
                        part_of_destination(place.where, place.shape, place.itemsize, item.piece.local),
                    )


def common_wishes(views: Mapping[View, Sequence[int]]) -> list[Common]:
    """The leaves that can be shared, from each different view of what is wanted and the ranks that have it.

    In the order of the lowest ranks' views, the same on all ranks. A leaf that is wanted in several ways is
    there several times, once for those who want it in each of them. Takes time in the number of leaves, and
    in that of ranks for each different kind of them only.
    """
    ordered = sorted(views.items(), key=lambda entry: min(entry[1]))
    listed_in: dict[Seen, list[int]] = {}
    for number, (view, _) in enumerate(ordered):
        for seen in view:
            listed_in.setdefault(seen, []).append(number)
    meshes: dict[tuple[int, ...], Mesh] = {}
    complete: dict[tuple[MeshPlacement, tuple[int, ...], tuple[int, ...]], bool] = {}
    found: list[Common] = []
    for seen, numbers in listed_in.items():
        holders = tuple(numbers)
        if holders not in meshes:
            meshes[holders] = Mesh.of(sorted(rank for number in holders for rank in ordered[number][1]))
        if seen.placement is not None:
            layout = LeafLayout(seen.name, seen.dtype, seen.shape, (seen.placement,), seen.framework)
            # Without a rank of the mesh that has some of it, the others cannot count on the plan.
            kind = seen.placement, seen.shape, holders
            if kind not in complete:
                complete[kind] = set(_having(layout, seen.placement)) <= set(meshes[holders].ranks().tolist())
            if complete[kind]:
                found.append(Common(seen, layout, (0,) * len(seen.shape)))
        elif len(seen.boxes) <= 1:
            placement = MeshPlacement(meshes[holders])
            shape, origin = seen.shape, (0,) * len(seen.shape)
            if seen.boxes:
                shape, origin = seen.boxes[0].shape, seen.boxes[0].start
            layout = LeafLayout(seen.name, seen.dtype, shape, (placement,), seen.framework)
            found.append(Common(seen, layout, origin))
    return found


def _having(layout: LeafLayout, placement: MeshPlacement) -> list[int]:
    """The ranks that have elements of a leaf: shards may be empty."""
    sizes = np.broadcast_to(local_sizes(layout, placement), placement.mesh.shape)
    ranks: list[int] = placement.mesh.ranks()[sizes > 0].tolist()
    return ranks
