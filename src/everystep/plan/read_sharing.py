"""Reading once per node: which of the ranks that want the same bytes reads which of them.

Ranks of one node that hold copies of a stream (`everystep.plan.replica_groups`) share it evenly: each
reads its share from storage and hands it to the others over the process group. Like writing, this is
arithmetic on the description of the wanted layout, so peers know without asking what they will get from whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everystep.plan.placement import LeafLayout
from everystep.plan.replica_groups import Owned, ReplicaGroup, replica_groups_of
from everystep.plan.topology import Topology

BLOCK_NBYTES = 1 << 20
"""The least worth a reader of its own: handing bytes around has a price, too."""


@dataclass(frozen=True, slots=True)
class ReadShare:
    """What `reader` reads for all of a group's ranks. Places in `pieces` hold for every one of them."""

    reader: int
    pieces: tuple[Owned, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.pieces)


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Ranks of one node that want the same bytes, and how they share the reading. Alone: no exchange."""

    ranks: tuple[int, ...]
    shares: tuple[ReadShare, ...]


class SharePlan:
    """Who reads what, for ranks that want the layout described by `leaves`."""

    def __init__(
        self, leaves: Sequence[LeafLayout], topology: Topology, *, block_nbytes: int = BLOCK_NBYTES
    ) -> None:
        if block_nbytes < 1:
            raise ValueError(f"block_nbytes must be positive, not {block_nbytes}")
        self.leaves = tuple(leaves)
        self._topology = topology
        self._block_nbytes = block_nbytes
        self._replica_groups = replica_groups_of(self.leaves)

    def groups(self, rank: int) -> tuple[ReadGroup, ...]:
        """The groups a rank belongs to, in the same order on all their ranks.

        Linear in the rank's leaves, plus the ranks of its node.
        """
        peers = self._topology.peers(rank)
        found = (self._group(replica_group, rank, peers) for replica_group in self._replica_groups)
        return tuple(group for group in found if group is not None)

    def reads(self, rank: int) -> tuple[Owned, ...]:
        """What a rank reads from storage, for itself and its peers, in the order of leaves."""
        items = [
            item
            for group in self.groups(rank)
            for share in group.shares
            if share.reader == rank
            for item in share.pieces
        ]
        items.sort(key=lambda item: (item.leaf, item.placement))
        return tuple(items)

    def _group(self, replica_group: ReplicaGroup, rank: int, peers: Iterable[int]) -> ReadGroup | None:
        coordinate = replica_group.mesh.coordinate(rank)
        if coordinate is None:
            return None
        mine = tuple(coordinate[dim] for dim in replica_group.split_dims)
        ranks: list[int] = []
        for peer in peers:
            place = replica_group.mesh.coordinate(peer)
            if place is not None and tuple(place[dim] for dim in replica_group.split_dims) == mine:
                ranks.append(peer)
        number = replica_group.stream_number(dict(enumerate(coordinate)))
        byte_stream = replica_group.stream(number).byte_stream
        if not byte_stream.nbytes:
            return None
        readers = max(1, min(len(ranks), byte_stream.nbytes // self._block_nbytes))
        tolerance = max(self._block_nbytes, byte_stream.nbytes // readers // 100) // 4
        # Different groups of a node begin with different ranks, or the first would read all that is small.
        turn = number % len(ranks)
        cuts = [byte_stream.snap(byte_stream.nbytes * n // readers, tolerance) for n in range(readers + 1)]
        return ReadGroup(
            tuple(ranks),
            tuple(
                ReadShare(
                    ranks[(turn + n) % len(ranks)], tuple(replica_group.cut(number, cuts[n], cuts[n + 1]))
                )
                for n in range(readers)
            ),
        )
