"""Who writes what: every byte once, by one that holds it, evenly, and the same on every rank."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.engine import ALIGNMENT
from everystep.format.geometry import Box, contiguous_runs, whole
from everystep.plan import replica_groups
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import BLOCK_NBYTES, WritePlan, level
from everystep.plan.topology import Topology, Writers
from support.worlds.named_layouts import NAMED
from support.worlds.simulated_worlds import (
    inside,
    layouts,
    leaf_kinds,
    memory_of,
    random_state,
    taken,
    topologies,
)


@st.composite
def plans(draw: st.DrawFn) -> WritePlan:
    world = draw(st.integers(1, 12))
    writers: Writers = draw(st.sampled_from(["all", "node", "socket", 1, 2, 5]))
    return WritePlan(
        draw(layouts(draw(leaf_kinds()), world)),
        draw(topologies(world)),
        writers=writers,
        block_nbytes=draw(st.sampled_from([1, 40, 1000])),
    )


def written(plan: WritePlan) -> list[int]:
    """Bytes written by each rank."""
    return [sum(item.nbytes for item in plan.fragments(rank)) for rank in range(plan.topology.world)]


def replicated(sizes: Sequence[int], world: int) -> list[LeafLayout]:
    return [
        LeafLayout(f"leaf.{n}", "U8", (size,), (MeshPlacement(Mesh.grid(world)),))
        for n, size in enumerate(sizes)
    ]


@settings(deadline=None)
@given(plans())
def test_every_element_is_written_once_by_a_rank_that_holds_it(plan: WritePlan) -> None:
    state = random_state(plan.leaves)
    times = {leaf.name: np.zeros(leaf.shape, dtype=int) for leaf in plan.leaves}
    for rank in range(plan.topology.world):
        memory = memory_of(plan.leaves, state, rank)
        for item in plan.fragments(rank):
            leaf = plan.leaves[item.leaf]
            place = inside(item.piece.box)
            # What the rank has there is what belongs there: it holds it, and in the right order.
            assert taken(memory, plan.leaves, item).tobytes() == state[leaf.name][place].tobytes()
            assert item.nbytes == item.piece.box.volume * leaf.itemsize > 0
            times[leaf.name][place] += 1
    assert all((count == 1).all() for count in times.values())


@settings(deadline=None)
@given(plans(), st.data())
def test_the_writers_of_any_box_are_found_from_the_description(plan: WritePlan, data: st.DataObject) -> None:
    if not plan.leaves:
        return
    number = data.draw(st.integers(0, len(plan.leaves) - 1))
    leaf = plan.leaves[number]
    start = tuple(data.draw(st.integers(0, n)) for n in leaf.shape)
    box = Box(start, tuple(data.draw(st.integers(0, n - s)) for s, n in zip(start, leaf.shape, strict=True)))
    found = np.full(leaf.shape, -1)
    for rank, piece in plan.sources(leaf.name, box):
        assert (found[inside(piece)] == -1).all()
        found[inside(piece)] = rank
    expected = np.full(leaf.shape, -1)
    for rank in range(plan.topology.world):
        for item in plan.fragments(rank):
            if item.leaf == number:
                expected[inside(item.piece.box)] = rank
    assert (found[inside(box)] == expected[inside(box)]).all()
    found[inside(box)] = -1
    assert (found == -1).all()


@given(
    st.lists(st.integers(0, 40_000), max_size=40),
    st.integers(1, 12),
    st.sampled_from([16, 512, 4096]),
    st.sampled_from(["all", "node", "socket", 3]),
)
def test_replicated_state_is_shared_evenly(
    sizes: list[int], world: int, block: int, writers: Writers
) -> None:
    topology = Topology.regular(world, ranks_per_node=4, sockets_per_node=2)
    plan = WritePlan(replicated(sizes, world), topology, writers=writers, block_nbytes=block)
    loads = written(plan)
    assert sum(loads) == sum(sizes)
    chosen = topology.writers(writers)
    assert not any(load for load, may in zip(loads, chosen, strict=True) if not may)
    shares = [load for load, may in zip(loads, chosen, strict=True) if may]
    assert max(shares) - min(shares) <= max(block, sum(sizes) / len(shares) / 100)


def test_a_large_model_is_shared_within_one_percent() -> None:
    sizes = [7, 4096 * 1024 * 4, 4096 * 4, 50_257 * 1024 * 2, 12, *[1024 * 1024 * 4, 1024] * 12]
    for world in (2, 3, 8, 64):
        loads = written(WritePlan(replicated(sizes, world), Topology.regular(world)))
        assert max(loads) / min(loads) < 1.01
        assert sum(loads) == sum(sizes)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("world", [1, 3, 8, 12])
def test_no_rank_of_a_usual_layout_does_more_than_its_copies_allow(name: str, world: int) -> None:
    leaves = NAMED[name](world)
    plan = WritePlan(leaves, Topology.regular(world), block_nbytes=16)
    loads = written(plan)
    assert sum(loads) == sum(leaf.itemsize * math.prod(leaf.shape) for leaf in leaves)
    # Cuts move by a quarter of a block (or an element) each, and every replica group has two.
    groups = len({(spread.mesh, spread.split_dims) for leaf in leaves for spread in leaf.placements})
    assert np.abs(plan.loads - loads).max() <= groups * 2 * 8


def test_holders_that_have_more_to_write_of_their_own_get_less_of_what_is_shared() -> None:
    mesh = Mesh.grid(4)
    leaves = [
        LeafLayout("uneven", "U8", (10_000,), (MeshPlacement(mesh, (Split(0, 0),)),)),
        LeafLayout("alone", "U8", (3_000,), (MeshPlacement(Mesh.grid(1, first=2)),)),
        LeafLayout("shared", "U8", (9_000,), (MeshPlacement(mesh),)),
    ]
    assert written(WritePlan(leaves, Topology.regular(4), block_nbytes=1)) == [5500] * 4


def test_copies_on_several_nodes_share_each_shard() -> None:
    mesh = Mesh.grid(3, 4)  # three copies of four shards
    leaves = [LeafLayout("leaf", "F32", (4_000, 10), (MeshPlacement(mesh, (Split(0, 1),)),))]
    plan = WritePlan(leaves, Topology.regular(12, ranks_per_node=4), block_nbytes=4096)
    loads = written(plan)
    assert max(loads) - min(loads) <= 4096
    for rank in range(12):
        (item,) = plan.fragments(rank)  # cut between rows: one box
        assert rank % 4 * 1000 <= item.piece.box.start[0] < item.piece.box.stop[0] <= (rank % 4 + 1) * 1000


def test_shards_that_no_chosen_writer_holds_are_written_by_their_holders() -> None:
    leaves = NAMED["fsdp"](4)
    chosen = WritePlan(leaves, Topology.regular(4), writers="node", block_nbytes=1)
    everyone = WritePlan(leaves, Topology.regular(4), block_nbytes=1)
    assert [
        item for rank in range(4) for item in chosen.fragments(rank) if plan_is_split(leaves, item.leaf)
    ] == [item for rank in range(4) for item in everyone.fragments(rank) if plan_is_split(leaves, item.leaf)]


def plan_is_split(leaves: Sequence[LeafLayout], number: int) -> bool:
    return bool(leaves[number].placements[0].splits)


def test_what_is_small_stays_whole_and_goes_to_few() -> None:
    plan = WritePlan(replicated([8] * 500, 64), Topology.regular(64))
    fragments = [item for rank in range(64) for item in plan.fragments(rank)]
    assert len(fragments) == 500
    assert sum(1 for load in written(plan) if load) == 1


def test_cuts_are_no_more_than_writers_and_fall_on_rows_and_blocks() -> None:
    world = 16
    rows, columns = 3_000, 1_024
    leaves = [
        LeafLayout(f"leaf.{n}", "F32", (rows, columns), (MeshPlacement(Mesh.grid(world)),)) for n in range(5)
    ]
    plan = WritePlan(leaves, Topology.regular(world))
    fragments = [plan.fragments(rank) for rank in range(world)]
    assert sum(map(len, fragments)) <= len(leaves) + world - 1  # each cut adds one
    for item in (item for own in fragments for item in own):
        runs = contiguous_runs(item.piece.local, whole(item.piece.within))
        assert runs.number == 1  # in one piece in memory
        assert runs.offset * 4 % ALIGNMENT == 0
        assert item.piece.box.shape[1] == columns


def test_a_leaf_without_rows_is_cut_at_blocks() -> None:
    plan = WritePlan(replicated([10_000_019], 7), Topology.regular(7))
    starts = [item.piece.box.start[0] for rank in range(7) for item in plan.fragments(rank)]
    assert len(starts) == 7
    assert all(start % ALIGNMENT == 0 for start in starts)


@settings(deadline=None)
@given(plans())
def test_the_same_description_gives_the_same_plan(plan: WritePlan) -> None:
    again = WritePlan(plan.leaves, plan.topology, block_nbytes=100)
    other = WritePlan(list(plan.leaves), plan.topology, block_nbytes=100)
    # Asking for other ranks first gives the same answers.
    ranks = range(plan.topology.world)
    assert [again.fragments(rank) for rank in ranks] == [other.fragments(rank) for rank in reversed(ranks)][
        ::-1
    ]


def test_plans_agree_between_processes_whose_hashes_differ() -> None:
    script = (
        "from everystep.plan.ranks import WritePlan;from everystep.plan.topology import Topology;"
        "from support.worlds.named_layouts import NAMED;"
        "print([[(i.leaf, i.piece) for i in WritePlan(NAMED[n](6), Topology.regular(6, 2), writers=4,"
        "block_nbytes=64).fragments(r)] for n in NAMED for r in range(6)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=True,
            capture_output=True,
            timeout=240,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert b"LocalBox" in found.pop()


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 200),
    st.integers(1, 8),
)
def test_levelling_is_what_giving_byte_after_byte_to_the_least_loaded_would_do(
    holders: list[tuple[int, bool]], total: int, active: int
) -> None:
    loads = [load for load, _ in holders]
    allowed = [may for _, may in holders]
    if not any(allowed):
        allowed = [True] * len(allowed)
    active = min(active, sum(allowed))
    shares = level(
        np.array([loads], dtype=np.int64),
        np.array([total], dtype=np.int64),
        np.array([allowed]),
        np.array([active], dtype=np.int64),
    )[0].tolist()
    taking = sorted((n for n in range(len(loads)) if allowed[n]), key=lambda n: loads[n])[:active]
    expected = Counter({n: loads[n] for n in taking})
    for _ in range(total):
        expected[min(taking, key=lambda n: (expected[n], taking.index(n)))] += 1
    assert sum(shares) == total
    assert all(share == 0 for n, share in enumerate(shares) if n not in taking)
    assert sorted(loads[n] + shares[n] for n in taking) == sorted(expected.values())


def test_planning_for_one_rank_never_goes_through_ranks_times_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("holding", "local_sizes"):
        real = getattr(replica_groups, name)

        def counted(*arguments: Any, real: Any = real, name: str = name) -> Any:
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(replica_groups, name, counted)
    placement = MeshPlacement(Mesh.grid(4, 1024), (Split(0, 1),))
    leaves = [LeafLayout(f"leaf.{n}", "F32", (4096 + n % 3, 8), (placement,)) for n in range(300)]
    plan = WritePlan(leaves, Topology.regular(4096))
    assert plan.fragments(1234)
    assert calls == {"holding": 3, "local_sizes": 3}  # once for each kind of leaf


def test_what_makes_no_sense_is_refused() -> None:
    leaves = replicated([4], 4)
    with pytest.raises(ValueError, match="outside of a world of 3"):
        WritePlan(leaves, Topology.regular(3))
    with pytest.raises(ValueError, match="same name"):
        WritePlan([*leaves, *leaves], Topology.regular(4))
    with pytest.raises(ValueError, match="positive"):
        WritePlan(leaves, Topology.regular(4), block_nbytes=0)
    with pytest.raises(ValueError, match="writers must be"):
        WritePlan(leaves, Topology.regular(4), writers=0)
    assert BLOCK_NBYTES % ALIGNMENT == 0


def test_chosen_writers_are_spread_over_nodes_and_sockets() -> None:
    topology = Topology.regular(16, ranks_per_node=8, sockets_per_node=2)
    assert np.flatnonzero(topology.writers("node")).tolist() == [0, 8]
    assert np.flatnonzero(topology.writers("socket")).tolist() == [0, 4, 8, 12]
    assert np.flatnonzero(topology.writers(1)).tolist() == [0]
    assert np.flatnonzero(topology.writers(4)).tolist() == [0, 4, 8, 12]
    assert np.flatnonzero(topology.writers(6)).tolist() == [0, 1, 4, 8, 9, 12]
    assert topology.writers(99).all()
    assert topology.peers(9) == tuple(range(8, 16))
