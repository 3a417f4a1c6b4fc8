"""What ranks see, put together: copies are found by name, boxes must fit, and quarrels are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import RanksDisagree
from everystep.format.geometry import Box
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.plan.world import Beside, Seen, View, besides, merge_views
from support.worlds.named_layouts import MODEL, NAMED
from support.worlds.simulated_worlds import holds_all_of, load, random_state, save


def views_of(seen: dict[int, View]) -> dict[View, list[int]]:
    """By rank, as they would arrive, to one entry per different view."""
    found: dict[View, list[int]] = {}
    for rank, view in seen.items():
        found.setdefault(view, []).append(rank)
    return found


def test_a_data_parallel_world_has_one_view() -> None:
    view = tuple(Seen(name, dtype, shape) for name, dtype, shape in MODEL)
    assert merge_views({view: list(range(8))}) == NAMED["ddp"](8)


@pytest.mark.parametrize("name", ["fsdp", "tp", "fsdp x tp", "hsdp"])
def test_what_dtensors_say_is_taken_over(name: str) -> None:
    leaves = NAMED[name](6)
    view = tuple(Seen(leaf.name, leaf.dtype, leaf.shape, leaf.placements[0]) for leaf in leaves)
    assert merge_views({view: range(6)}) == leaves


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_world_of_plain_arrays_is_saved_and_read_back(data: st.DataObject) -> None:
    """Each leaf on some ranks, in whole or cut in two; what the ranks list is all that is known."""
    world = data.draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, world - 1), min_size=1)
    seen: dict[int, list[Seen]] = {rank: [] for rank in range(world)}
    for number in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(0, 9))
        at = data.draw(st.integers(0, rows))
        pieces = [Box((0, 0), (at, 5)), Box((at, 0), (rows - at, 5))]
        if data.draw(st.booleans()):
            pieces = [Box((0, 0), (rows, 5))]
        held = [data.draw(ranks) for _ in pieces]
        for rank in range(world):
            boxes = tuple(box for box, holders in zip(pieces, held, strict=True) if rank in holders)
            if boxes:
                seen[rank].append(Seen(f"leaf.{number}", "F16", (rows, 5), None, boxes))
    leaves = merge_views(views_of({rank: tuple(view) for rank, view in seen.items()}))
    plan = WritePlan(leaves, Topology.regular(world), block_nbytes=8)
    state = random_state(leaves)
    disk = save(plan, state)
    target = [
        LeafLayout(leaf.name, leaf.dtype, leaf.shape, (MeshPlacement(Mesh.grid(2)),)) for leaf in leaves
    ]
    for rank in range(2):
        filled, reading = load(disk, target, rank)
        assert not reading.missing
        assert holds_all_of(target, state, rank, filled)


def test_the_order_does_not_depend_on_how_views_arrive() -> None:
    views = {
        (Seen("a", "F32", (4,)), Seen("shared", "F32", (3,))): [0, 1],
        (Seen("b", "F32", (4,)), Seen("shared", "F32", (3,))): [3, 2],
    }
    leaves = merge_views(views)
    assert [leaf.name for leaf in leaves] == ["a", "shared", "b"]
    assert leaves[1].placements == (MeshPlacement(Mesh.grid(4)),)
    assert leaves[2].placements == (MeshPlacement(Mesh.grid(2, first=2)),)
    assert merge_views(dict(reversed(views.items()))) == leaves


def test_of_two_descriptions_that_of_the_lowest_rank_counts() -> None:
    here = MeshPlacement(Mesh.grid(2), (Split(0, 0),))
    there = MeshPlacement(Mesh.grid(2, first=2), (Split(1, 0),))
    (leaf,) = merge_views(
        {(Seen("tied", "F32", (4, 4), there),): [2, 3], (Seen("tied", "F32", (4, 4), here),): [0, 1]}
    )
    assert leaf.placements == (here,)


def test_a_rank_with_all_of_it_makes_parts_unnecessary() -> None:
    (leaf,) = merge_views(
        {(Seen("x", "F32", (4,), None, (Box((0,), (2,)),)),): [0], (Seen("x", "F32", (4,)),): [1, 2]}
    )
    assert leaf.placements == (MeshPlacement(Mesh.of([1, 2])),)


SHARDED = MeshPlacement(Mesh.grid(3), (Split(0, 0),))


@pytest.mark.parametrize(
    ("views", "message", "ranks"),
    [
        (
            {(Seen("x", "F32", (4,)),): [0], (Seen("x", "F16", (4,)),): [1, 2]},
            "on rank 0, F16 of shape",
            (0, 1),
        ),
        (
            {(Seen("x", "F32", (4,)),): [3], (Seen("x", "F32", (5,)),): [1]},
            r"\[5\] on rank 1, F32 of shape \[4\]",
            (1, 3),
        ),
        ({(Seen("x", "F32", (4,), SHARDED),): [0, 2]}, "rank 1 does not save it", (1,)),
        (
            {(Seen("x", "F32", (4,), SHARDED),): [0, 2], (Seen("x", "F32", (4,)),): [1]},
            "rank 1 does not",
            (1,),
        ),
        (
            {(Seen("x", "F32", (4,), None, (Box((0,), (3,)),)),): [5]},
            r"missing: start \[3\], shape \[1\]",
            (5,),
        ),
        (
            {
                (Seen("x", "F32", (4,), None, (Box((0,), (3,)),)),): [0],
                (Seen("x", "F32", (4,), None, (Box((2,), (2,)),)),): [1],
            },
            "overlap",
            (0, 1),
        ),
        ({(Seen("x", "F32", (4,), None, (Box((2,), (4,)),)),): [0]}, "has no box", None),
        ({(Seen("x", "F32", (4,)), Seen("x", "F32", (4,))): [7]}, "listed twice", (7,)),
    ],
)
def test_what_cannot_be_true_is_named(
    views: dict[View, list[int]], message: str, ranks: tuple[int, ...] | None
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        merge_views(views)
    if ranks is not None:
        assert isinstance(caught.value, RanksDisagree)
        assert caught.value.leaf == "x"
        assert caught.value.ranks == ranks


def test_copies_on_meshes_of_their_own_are_one_mesh_and_share_the_writing() -> None:
    """Tensor parallel on two ranks, data parallel over three copies: each copy knows only its own mesh."""
    splits = (Split(1, 0),)
    meshes = [Mesh.of([0, 1]), Mesh.of([2, 3]), Mesh.of([4, 5])]
    views = {
        (Seen("w", "F32", (64, 1024), MeshPlacement(mesh, splits)),): mesh.ranks().tolist() for mesh in meshes
    }
    (leaf,) = merge_views(views)
    assert leaf.placements == (MeshPlacement(Mesh.grid(3, 2), (Split(1, 1),)),)
    plan = WritePlan([leaf], Topology.regular(6), block_nbytes=4096)
    assert set(plan.loads.tolist()) == {64 * 1024 * 4 // 6, 64 * 1024 * 4 // 6 + 1}


def test_one_on_a_mesh_of_its_own_that_does_not_list_it_is_named() -> None:
    first, second = (
        MeshPlacement(Mesh.of([0, 1]), (Split(0, 0),)),
        MeshPlacement(Mesh.of([2, 3]), (Split(0, 0),)),
    )
    views = {(Seen("w", "F32", (4,), first),): [0, 1], (Seen("w", "F32", (4,), second),): [2]}
    with pytest.raises(RanksDisagree, match="rank 3 does not save it") as caught:
        merge_views(views)
    assert caught.value.ranks == (3,)


def test_who_holds_a_leaf_in_another_way_than_the_one_that_counts_is_listed() -> None:
    rows, columns = (
        MeshPlacement(Mesh.of([0, 1]), (Split(0, 0),)),
        MeshPlacement(Mesh.of([2, 3]), (Split(1, 0),)),
    )
    half, nothing = Box((0, 0), (2, 8)), Box((0, 0), (0, 8))
    views: dict[View, list[int]] = {
        (Seen("w", "F32", (4, 8), rows), Seen("v", "F32", (4, 8))): [0, 1],
        (Seen("w", "F32", (4, 8), columns),): [2, 3],
        (Seen("w", "F32", (4, 8)), Seen("v", "F32", (4, 8))): [4, 6],
        (Seen("v", "F32", (4, 8), None, (half,)),): [5],
        (Seen("v", "F32", (4, 8), None, (nothing,)),): [7],
    }
    leaves = merge_views(views)
    assert [leaf.name for leaf in leaves] == ["w", "v"]
    assert besides(views, leaves) == (
        Beside(0, columns, (2, 3)),
        Beside(0, MeshPlacement(Mesh.of([4, 6])), (4, 6)),
        Beside(1, MeshPlacement(Mesh.of([5]), (), half), (5,)),
    )
    assert besides(dict(reversed(views.items())), leaves) == besides(views, leaves)


def test_no_rank_is_beside_where_all_hold_a_leaf_in_one_way() -> None:
    boxes = [Box((0,), (3,)), Box((3,), (1,))]
    views: dict[View, list[int]] = {
        (Seen("x", "F32", (4,), None, (box,)), Seen("y", "F32", (4,))): [rank]
        for rank, box in enumerate(boxes)
    }
    assert besides(views, merge_views(views)) == ()
    alone: dict[View, list[int]] = {(Seen("x", "F32", (4,), SHARDED),): [0, 1, 2]}
    assert besides(alone, merge_views(alone)) == ()
