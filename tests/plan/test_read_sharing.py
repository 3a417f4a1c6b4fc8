"""Reading once per node: peers read different bytes, and together what each of them wants."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split, pieces_of
from everystep.plan.read_sharing import SharePlan
from everystep.plan.topology import Topology
from support.worlds.named_layouts import NAMED
from support.worlds.simulated_worlds import inside, layouts, leaf_kinds, topologies


@settings(deadline=None)
@given(st.data())
def test_peers_agree_and_everyone_gets_everything_once(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 12))
    leaves = data.draw(layouts(data.draw(leaf_kinds()), world))
    topology = data.draw(topologies(world))
    plan = SharePlan(leaves, topology, block_nbytes=data.draw(st.sampled_from([1, 60, 5000])))
    groups = [plan.groups(rank) for rank in range(world)]
    for rank in range(world):
        got = {leaf.name: np.zeros(leaf.shape, dtype=int) for leaf in leaves}
        for group in groups[rank]:
            assert rank in group.ranks
            for share in group.shares:
                assert share.reader in group.ranks
                assert share.nbytes == sum(item.nbytes for item in share.pieces)
                for item in share.pieces:
                    got[leaves[item.leaf].name][inside(item.piece.box)] += 1
            for peer in group.ranks:
                assert topology.nodes[peer] == topology.nodes[rank]
                assert group in groups[peer]
        for leaf in leaves:
            wanted = np.zeros(leaf.shape, dtype=int)
            for _, piece in pieces_of(leaf, rank):
                wanted[inside(piece.box)] += 1
            assert (got[leaf.name] == wanted).all()


def test_a_node_reads_replicated_state_once_and_evenly() -> None:
    topology = Topology.regular(8, ranks_per_node=4)
    leaves = [LeafLayout(f"leaf.{n}", "F32", (1000, 1024), (MeshPlacement(Mesh.grid(8)),)) for n in range(7)]
    plan = SharePlan(leaves, topology)
    total = 7 * 1000 * 1024 * 4
    for node in (range(4), range(4, 8)):
        loads = [sum(item.nbytes for item in plan.reads(rank)) for rank in node]
        assert sum(loads) == total
        assert max(loads) - min(loads) <= 1 << 20


def test_ranks_with_nothing_in_common_read_their_own() -> None:
    plan = SharePlan(NAMED["fsdp"](4)[:-1], Topology.regular(4))
    for rank in range(4):
        assert all(group.ranks == (rank,) for group in plan.groups(rank))


def test_copies_on_other_nodes_do_not_count() -> None:
    mesh = Mesh.grid(2, 2, 2)  # node, copy, shard
    leaves = [LeafLayout("leaf", "F32", (4096, 1024), (MeshPlacement(mesh, (Split(0, 2),)),))]
    plan = SharePlan(leaves, Topology.regular(8, ranks_per_node=4))
    assert [group.ranks for group in plan.groups(5)] == [(5, 7)]
    assert sum(item.nbytes for rank in range(4) for item in plan.reads(rank)) == 4096 * 1024 * 4


def test_little_is_read_by_one_and_not_always_by_the_first() -> None:
    mesh = Mesh.grid(4, 4)
    leaves = [LeafLayout("leaf", "F32", (64,), (MeshPlacement(mesh, (Split(0, 0),)),))]
    plan = SharePlan(leaves, Topology.regular(16))
    readers = [group.shares[0].reader for rank in range(0, 16, 4) for group in plan.groups(rank)]
    assert readers == [0, 5, 10, 15]
