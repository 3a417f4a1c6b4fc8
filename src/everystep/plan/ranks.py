"""Which rank writes which bytes: every byte once, by a rank that holds it, in equal shares.

1. Leaves are grouped into streams that the same ranks hold (`everystep.plan.replica_groups`).
2. Streams with the fewest holders come first, since there is nothing to choose for a shard only one rank has.
   Each stream's bytes go to the least loaded of its holders first, until all have the same load. Where one
   set of holders contains the other, as along a mesh's dimensions, no other order gives a lower maximum.
3. Shares become cuts of the stream, moved to where an array, a row or a block ends
   (`everystep.plan.byte_stream`).

All of it is integer arithmetic on the same description, so ranks agree without communication. The loads of
all ranks together take O(kinds of leaves x world) steps of numpy; the fragments of one rank take time in the
number of its own leaves. Nothing is ever listed rank by leaf.

How even: the loads of holders that share everything differ by at most 1%, or by one block for each replica
group, if that is more. A stream of less than half a block per holder goes to fewer of them, because a file
costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from everystep.format.geometry import Box, boxes_of_range, contiguous_runs, intersect, whole
from everystep.plan.placement import LeafLayout, LocalBox, shards_meeting
from everystep.plan.replica_groups import Owned, ReplicaGroup, replica_groups_of
from everystep.plan.topology import Topology, Writers

BLOCK_NBYTES = 64 << 10
"""How far apart loads may be, however small they are; half of it is the least worth a writer of its own."""


class WritePlan:
    """Who writes what of a world's leaves. Equal arguments give equal plans, on any rank.

    `writers` narrows down who writes; bytes that none of these hold are written by those who do.
    """

    def __init__(
        self,
        leaves: Sequence[LeafLayout],
        topology: Topology,
        *,
        writers: Writers = "all",
        block_nbytes: int = BLOCK_NBYTES,
    ) -> None:
        if block_nbytes < 1:
            raise ValueError(f"block_nbytes must be positive, not {block_nbytes}")
        self.leaves = tuple(leaves)
        self.topology = topology
        self.writers: Writers = writers
        self.block_nbytes = block_nbytes
        self._numbers = {leaf.name: number for number, leaf in enumerate(self.leaves)}
        if len(self._numbers) != len(self.leaves):
            raise ValueError("two leaves have the same name")
        self._replica_groups = [
            _Shared(replica_group, block_nbytes, topology.world)
            for replica_group in replica_groups_of(self.leaves)
        ]
        self._replica_group_of = {
            member: shared for shared in self._replica_groups for member in shared.replica_group.members
        }
        loads = np.zeros(topology.world, dtype=np.int64)
        may = topology.writers(writers)
        for shared in self._replica_groups:
            shared.fill(loads, may)
        self._loads = loads

    @property
    def loads(self) -> npt.NDArray[np.int64]:
        """The bytes meant for every rank. What it writes differs from that by no more than cuts may move."""
        return np.array(self._loads)

    def leaf(self, name: str) -> LeafLayout | None:
        """The leaf of that name, None when there is none."""
        number = self._numbers.get(name)
        return None if number is None else self.leaves[number]

    def fragments(self, rank: int) -> tuple[Owned, ...]:
        """What a rank writes, in the order of leaves, and of elements inside of each."""
        owned: list[Owned] = []
        for shared in self._replica_groups:
            coordinate = shared.replica_group.mesh.coordinate(rank)
            if coordinate is not None:
                stream = shared.replica_group.stream_number(dict(enumerate(coordinate)))
                copy = shared.replica_group.copy_number(coordinate)
                owned.extend(
                    shared.replica_group.cut(
                        stream, shared.place(stream, copy), shared.place(stream, copy + 1)
                    )
                )
        owned.sort(key=lambda item: (item.leaf, item.placement))  # stable: keeps the order of elements
        return tuple(owned)

    def sources(self, name: str, box: Box) -> Iterator[tuple[int, Box]]:
        """Which rank writes which elements of a box: (rank, box) for each piece of it.

        Takes time in proportion to the pieces found (plus that of making the streams they lie on).
        """
        number = self._numbers[name]
        leaf = self.leaves[number]
        for placement, way in enumerate(leaf.placements):
            shared = self._replica_group_of[number, placement]
            for coordinates, held in shards_meeting(leaf, way, box):
                for piece in held.inside(box):
                    yield from shared.writers_of(number, placement, coordinates, piece, leaf.itemsize)


class _Shared:
    """A replica group whose streams have been shared out among their holders."""

    def __init__(self, replica_group: ReplicaGroup, block_nbytes: int, world: int) -> None:
        self.replica_group = replica_group
        self._block_nbytes = block_nbytes
        self._ranks = replica_group.ranks()
        if self._ranks.size and not 0 <= int(self._ranks.min()) <= int(self._ranks.max()) < world:
            raise ValueError(f"a mesh has ranks outside of a world of {world}")
        self._cuts = np.zeros((0, 0), dtype=np.int64)
        self._tolerances = np.zeros(0, dtype=np.int64)

    def fill(self, loads: npt.NDArray[np.int64], may: npt.NDArray[np.bool_]) -> None:
        """Share the streams out, and add the shares to the loads of the world."""
        totals = self.replica_group.totals()
        allowed = may[self._ranks]
        allowed |= ~allowed.any(axis=1, keepdims=True)
        # Half a block each: at most one when cuts have moved, so that those with none are level, too.
        active = np.clip(-(-2 * totals // self._block_nbytes), 1, allowed.sum(axis=1))
        shares = level(loads[self._ranks], totals, allowed, active)
        loads[self._ranks] += shares
        self._cuts = np.zeros((len(totals), self.replica_group.copies + 1), dtype=np.int64)
        np.cumsum(shares, axis=1, out=self._cuts[:, 1:])
        # A share lies between two cuts, and is compared with another: four of them may move.
        self._tolerances = np.maximum(self._block_nbytes, totals // active // 100) // 4

    def place(self, stream: int, cut: int) -> int:
        """Where the cut before a holder's share falls."""
        byte_stream = self.replica_group.stream(stream).byte_stream
        return byte_stream.snap(int(self._cuts[stream, cut]), int(self._tolerances[stream]))

    def writers_of(
        self, leaf: int, placement: int, coordinates: dict[int, int], piece: LocalBox, itemsize: int
    ) -> Iterator[tuple[int, Box]]:
        """Who writes a piece that lies in one shard, and which elements of it each of them."""
        stream = self.replica_group.stream_number(coordinates)
        copies = self.replica_group.copies
        if copies == 1:
            yield int(self._ranks[stream, 0]), piece.box
            return
        base = self.replica_group.stream(stream).byte_stream.start(self.replica_group.place(leaf, placement))
        first, last = contiguous_runs(piece.local, whole(piece.within)).span
        begin, end = base + first * itemsize, base + last * itemsize
        # Cuts move by their tolerance or an element: begin at one that surely lies before.
        slack = int(self._tolerances[stream]) + itemsize
        cuts = self._cuts[stream]
        copy = max(int(np.searchsorted(cuts, begin - slack, side="left")) - 1, 0)
        low = self.place(stream, copy)
        while copy < copies and low < end:
            # Holders without a share may be many: go to the next one that has some.
            copy = int(np.searchsorted(cuts, cuts[copy], side="right")) - 1
            high = self.place(stream, copy + 1)
            if low < high and high > begin:
                rank = int(self._ranks[stream, copy])
                if low <= begin and end <= high:
                    yield rank, piece.box  # all of it, as a rule: cuts fall between arrays where they can
                    return
                lower, upper = max(low, begin) - base, min(high, end) - base
                for local in boxes_of_range(piece.within, lower // itemsize, upper // itemsize):
                    both = intersect(local, piece.local)
                    if both is not None:
                        yield rank, _outward(piece, both)
            low = high
            copy += 1


def level(
    loads: npt.NDArray[np.int64],
    totals: npt.NDArray[np.int64],
    allowed: npt.NDArray[np.bool_],
    active: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Share `totals` out, row by row, so that the `active` least loaded of those allowed come out level.

    Rows are independent of each other: the loads of a stream's holders. O(n log n) in the size of `loads`.
    """
    width = loads.shape[1]
    # Those who may not take part stand last in the order, and `active` never reaches them.
    order = np.lexsort((loads, ~allowed), axis=1)
    floor = np.take_along_axis(loads, order, axis=1)
    below = np.cumsum(floor, axis=1)
    count = np.arange(1, width + 1, dtype=np.int64)
    # Filling the first `count` vessels to the floor of the last of them takes this much.
    needed = count * floor - below
    takes_part = (count <= active[:, None]) & ((needed < totals[:, None]) | (count == 1))
    filled = takes_part.sum(axis=1)
    water = totals + np.take_along_axis(below, filled[:, None] - 1, axis=1)[:, 0]
    height, rest = water // filled, water % filled
    shares = np.where(
        count <= filled[:, None], height[:, None] - floor + (count <= rest[:, None]), np.int64(0)
    )
    result: npt.NDArray[np.int64] = np.empty_like(shares)
    np.put_along_axis(result, order, shares, axis=1)
    return result


def _outward(piece: LocalBox, local: Box) -> Box:
    """From a box of the local array to the box of the leaf."""
    start = tuple(
        at - own + out for at, own, out in zip(local.start, piece.local.start, piece.box.start, strict=True)
    )
    return Box(start, local.shape)
