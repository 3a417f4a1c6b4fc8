"""What is written in one layout is read in any other, bit for bit, each byte once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import CorruptCheckpoint
from everystep.format.geometry import Box
from everystep.format.records import Fragment, Leaf, Part, ShardFile
from everystep.plan.placement import LeafLayout, LocalBox, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.resharding import MissingBox, StoredIndex, Wanted, plan_reads
from everystep.plan.topology import Topology
from support.worlds.named_layouts import NAMED, staged
from support.worlds.simulated_worlds import (
    holds_all_of,
    layouts,
    leaf_kinds,
    load,
    random_state,
    save,
    topologies,
    wants_of,
)


@settings(deadline=None)
@given(st.data())
def test_any_layout_is_read_back_in_any_other(data: st.DataObject) -> None:
    kinds = data.draw(leaf_kinds())
    before, after = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    plan = WritePlan(
        data.draw(layouts(kinds, before)),
        data.draw(topologies(before)),
        writers=data.draw(st.sampled_from(["all", "node", 2])),
        block_nbytes=data.draw(st.sampled_from([1, 50, 5000])),
    )
    state = random_state(plan.leaves)
    disk = save(plan, state, data.draw(st.sampled_from([(1.0,), (3.0, 1.0), (1.0, 0.0, 2.5)])))
    wanted = data.draw(layouts(kinds, after))
    gap = data.draw(st.sampled_from([0, 16, 1 << 20]))
    for rank in range(after):
        # Only the parts that the description says are needed.
        needed = {
            source for want in wants_of(wanted, rank) for source, _ in plan.sources(want.leaf, want.piece.box)
        }
        parts = [part for part in disk.parts if part.rank in needed]
        filled, reading = load(disk, wanted, rank, parts, gap)
        assert not reading.missing
        assert {read.part for read in reading.reads} == needed
        assert holds_all_of(wanted, state, rank, filled)


@pytest.mark.parametrize("after", NAMED)
@pytest.mark.parametrize("before", NAMED)
def test_table_of_layouts(before: str, after: str) -> None:
    for world, other in ((1, 4), (4, 1), (4, 3), (6, 4)):
        plan = WritePlan(NAMED[before](world), Topology.regular(world, 2), block_nbytes=64)
        state = random_state(plan.leaves, seed=world)
        disk = save(plan, state, (2.0, 1.0))
        wanted = NAMED[after](other)
        for rank in range(other):
            filled, reading = load(disk, wanted, rank)
            assert not reading.missing
            assert holds_all_of(wanted, state, rank, filled)


def test_a_pipeline_may_be_cut_at_another_layer() -> None:
    plan = WritePlan(staged(6, 3), Topology.regular(6))
    state = random_state(plan.leaves)
    disk = save(plan, state)
    for rank in range(6):
        filled, _ = load(disk, staged(6, 2), rank)
        assert holds_all_of(staged(6, 2), state, rank, filled)


def one_part(rank: int, *fragments: tuple[Box, int], shape: tuple[int, ...], dtype: str = "U8") -> Part:
    stored = tuple(Fragment(box.start, box.shape, 0, offset, box.volume, "") for box, offset in fragments)
    file = ShardFile(f"r{rank:05d}.v0.safetensors", 1 << 30, 8, "0" * 16)
    return Part(rank, 1 << 20, (file,), (Leaf("leaf", dtype, shape, "torch", stored),), ())


def want(box: Box) -> Wanted:
    return Wanted("leaf", LocalBox(box, Box((0,) * len(box.shape), box.shape), box.shape))


def test_what_is_missing_is_named() -> None:
    index = StoredIndex(
        [
            one_part(0, (Box((0, 0), (2, 6)), 8), shape=(4, 6)),
            one_part(3, (Box((3, 0), (1, 4)), 8), shape=(4, 6)),
        ]
    )
    plan = plan_reads(index, [want(Box((1, 1), (3, 5)))])
    assert {(gone.leaf, gone.box) for gone in plan.missing} == {
        ("leaf", Box((2, 1), (1, 5))),
        ("leaf", Box((3, 4), (1, 2))),
    }
    assert {read.part for read in plan.reads} == {0, 3}
    nothing = plan_reads(index, [Wanted("other", want(Box((0,), (3,))).piece)])
    assert nothing.missing == (MissingBox("other", Box((0,), (3,))),)
    assert nothing.reads == ()
    assert "leaf" in index
    assert "other" not in index


def test_neighbours_in_a_file_are_read_together() -> None:
    part = one_part(
        0,
        (Box((0,), (100,)), 1000),
        (Box((100,), (100,)), 1100),  # touches
        (Box((200,), (100,)), 1240),  # 40 bytes further on
        (Box((300,), (100,)), 9000),
        shape=(400,),
    )
    index = StoredIndex([part])
    everything = [want(Box((0,), (250,))), want(Box((250,), (150,)))]
    ranges = lambda gap: [  # noqa: E731
        (read.start, read.stop) for read in plan_reads(index, everything, gap_nbytes=gap).reads
    ]
    assert ranges(0) == [(1000, 1200), (1240, 1340), (9000, 9100)]
    assert ranges(40) == [(1000, 1340), (9000, 9100)]
    assert ranges(1 << 20) == [(1000, 9100)]


def test_columns_of_a_matrix_are_read_in_one_go_or_row_by_row() -> None:
    index = StoredIndex([one_part(0, (Box((0, 0), (50, 1000)), 0), shape=(50, 1000))])
    column = [want(Box((0, 10), (50, 5)))]
    together = plan_reads(index, column, gap_nbytes=995)
    assert [(read.start, read.stop) for read in together.reads] == [(10, 49 * 1000 + 15)]
    apart = plan_reads(index, column, gap_nbytes=994)
    assert [(read.start, read.stop) for read in apart.reads] == [
        (row * 1000 + 10, row * 1000 + 15) for row in range(50)
    ]
    assert apart.nbytes == 250
    assert together.nbytes == 49_005


def test_fragments_that_say_the_same_twice_are_damage() -> None:
    index = StoredIndex(
        [one_part(1, (Box((0,), (6,)), 8), shape=(10,)), one_part(2, (Box((5,), (5,)), 8), shape=(10,))]
    )
    with pytest.raises(CorruptCheckpoint, match=r"ranks 1, 2") as caught:
        plan_reads(index, [want(Box((0,), (10,)))])
    assert caught.value.leaf == "leaf"
    # A reader of other elements does not notice.
    assert not plan_reads(index, [want(Box((0,), (5,)))]).missing


def test_parts_that_disagree_about_a_leaf_are_damage() -> None:
    parts = [one_part(0, shape=(10,)), one_part(7, shape=(10,), dtype="F32")]
    with pytest.raises(CorruptCheckpoint, match="rank 7") as caught:
        StoredIndex(parts)
    assert caught.value.leaf == "leaf"


@settings(deadline=None)
@given(st.data())
def test_the_index_finds_what_comparing_with_all_finds(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30)))
    box = st.tuples(*(st.integers(0, n - 1) for n in shape)).flatmap(
        lambda start: st.builds(
            Box,
            st.just(start),
            st.tuples(*(st.integers(1, n - s) for s, n in zip(start, shape, strict=True))),
        )
    )
    stored = data.draw(st.lists(box, max_size=30))
    index = StoredIndex([one_part(0, *((found, number) for number, found in enumerate(stored)), shape=shape)])
    asked = data.draw(box)
    found = sorted(item.offset for item in index.meeting("leaf", asked))
    cells = np.zeros(shape, dtype=bool)
    cells[asked.start[0] : asked.stop[0], asked.start[1] : asked.stop[1]] = True
    assert found == [
        number
        for number, one in enumerate(stored)
        if cells[one.start[0] : one.stop[0], one.start[1] : one.stop[1]].any()
    ]


def test_a_rank_looks_at_few_parts_of_many() -> None:
    shape = (4096, 8)
    before = [LeafLayout("leaf", "F32", shape, (MeshPlacement(Mesh.grid(1024), (Split(0, 0),)),))]
    after = [LeafLayout("leaf", "F32", shape, (MeshPlacement(Mesh.grid(768), (Split(0, 0),)),))]
    plan = WritePlan(before, Topology.regular(1024))
    for rank in (0, 100, 682):
        (mine,) = wants_of(after, rank)
        assert {source for source, _ in plan.sources("leaf", mine.piece.box)} == {
            row // 4 for row in range(rank * 6, min(rank * 6 + 6, 4096))
        }
    assert list(wants_of(after, 683)) == []  # chunks of 6 rows: the last ranks have none
