"""Who holds what: the description gives what torch's own splitting gives, without listing ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.format.geometry import Box
from everystep.plan.placement import (
    Holding,
    LeafLayout,
    Mesh,
    MeshPlacement,
    Split,
    holding,
    local_sizes,
    pieces_of,
    shards_meeting,
)
from support.worlds.simulated_worlds import inside, leaf_layouts, local_array, meshes, shapes


def coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh.shape)))


leaves = shapes.flatmap(lambda shape: leaf_layouts(12, "leaf", "I64", shape))


@given(meshes(12))
def test_a_mesh_finds_every_rank_where_it_stands(mesh: Mesh) -> None:
    ranks = mesh.ranks()
    assert ranks.shape == mesh.shape
    for coordinate in coordinates(mesh):
        assert mesh.rank(coordinate) == ranks[coordinate]
        found = mesh.coordinate(mesh.rank(coordinate))
        assert found == coordinate
    assert all(mesh.coordinate(rank) is None for rank in range(-2, 16) if rank not in ranks)


def test_a_mesh_of_regular_ranks_needs_no_table() -> None:
    ranks = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert Mesh.of(ranks) == Mesh.grid(2, 3, 4)
    assert Mesh.of(ranks[:, 1, :]).table is None  # one pipeline stage of three
    assert Mesh.of(ranks.transpose(2, 0, 1)).table is None
    assert Mesh.of(ranks.transpose(2, 0, 1)).coordinate(13) == (1, 1, 0)
    assert Mesh.of([3, 1, 2]).coordinate(2) == (2,)


@pytest.mark.parametrize("ranks", [[0, 0], [[0, 1], [1, 2]], [1, 2, 1]])
def test_a_rank_stands_in_a_mesh_once(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        Mesh.of(ranks)


@given(leaves)
def test_each_rank_holds_what_splitting_the_array_gives_it(leaf: LeafLayout) -> None:
    whole = np.arange(np.prod(leaf.shape, dtype=int)).reshape(leaf.shape)
    for spread in leaf.placements:
        sizes = np.broadcast_to(local_sizes(leaf, spread), spread.mesh.shape)
        for coordinate in coordinates(spread.mesh):
            expected = local_array(whole, spread, coordinate)
            held = holding(leaf, spread, coordinate)
            assert sizes[coordinate] == expected.size
            if not expected.size:
                assert list(held.pieces()) == []
                continue
            assert held.shape == expected.shape
            found = np.full(expected.shape, -1)
            for piece in held.pieces():
                assert piece.within == expected.shape
                assert (found[inside(piece.local)] == -1).all()
                found[inside(piece.local)] = whole[inside(piece.box)]
            assert (found == expected).all()


@given(leaves, st.data())
def test_the_shards_that_meet_a_box_are_found_without_looking_at_all(
    leaf: LeafLayout, data: st.DataObject
) -> None:
    start = tuple(data.draw(st.integers(0, n)) for n in leaf.shape)
    box = Box(start, tuple(data.draw(st.integers(0, n - s)) for s, n in zip(start, leaf.shape, strict=True)))
    for spread in leaf.placements:
        found = {}
        for where, held in shards_meeting(leaf, spread, box):
            key = tuple(where[dim] for dim in spread.split_dims)
            assert key not in found
            found[key] = sorted((piece.box.start, piece.box.shape) for piece in held.inside(box))
        expected = {}
        for coordinate in coordinates(spread.mesh):
            held = holding(leaf, spread, coordinate)
            inner = sorted((piece.box.start, piece.box.shape) for piece in held.inside(box))
            if inner:
                expected[tuple(coordinate[dim] for dim in spread.split_dims)] = inner
        assert found == expected


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    leaf = LeafLayout("leaf", "F32", (4,), (MeshPlacement(Mesh.grid(2, first=2), (Split(0, 0),)),))
    assert list(pieces_of(leaf, 0)) == []
    assert [piece.box for _, piece in pieces_of(leaf, 3)] == [Box((2,), (2,))]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0,), (3,))], "each of its elements once"),
        ([Box((0,), (3,)), Box((2,), (1,))], "each of its elements once"),
        ([Box((0,), (5,))], "has no box"),
        ([Box((0, 0), (2, 2))], "has no box"),
    ],
)
def test_a_leaf_must_be_held_completely(boxes: list[Box], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LeafLayout("leaf", "F32", (4,), tuple(MeshPlacement(Mesh.grid(1), (), box) for box in boxes))


def test_splits_must_fit_mesh_and_leaf() -> None:
    with pytest.raises(ValueError, match="do not fit a mesh"):
        MeshPlacement(Mesh.grid(2, 2), (Split(0, 0), Split(1, 0)))
    with pytest.raises(ValueError, match="do not fit a mesh"):
        MeshPlacement(Mesh.grid(2), (Split(0, 1),))
    with pytest.raises(ValueError, match="make no sense"):
        MeshPlacement(Mesh.grid(2), (Split(0, 0, factor=0),))
    with pytest.raises(ValueError, match="cannot be split"):
        LeafLayout("leaf", "F32", (4,), (MeshPlacement(Mesh.grid(2), (Split(1, 0),)),))


@pytest.mark.parametrize(("length", "same"), [(12, True), (14, True), (7, False)])
def test_a_strided_shard_is_the_other_order_only_where_sizes_divide(length: int, same: bool) -> None:
    """Of 7 rows on 3 x 2 ranks, the last goes to (2, 1) in one order, to (2, 0) as torch spells the other."""
    mesh = Mesh.grid(3, 2)
    strided = MeshPlacement(mesh, (Split(0, 0, factor=2), Split(0, 1)))
    other = MeshPlacement(mesh, (Split(0, 1), Split(0, 0)))
    leaf = LeafLayout("leaf", "U8", (length,), (strided,))
    held = [(holding(leaf, strided, at), holding(leaf, other, at)) for at in coordinates(mesh)]
    assert all(a == b for a, b in held) == same
    if not same:
        assert held[4] == (Holding((((6, 7),),)), Holding(((),)))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 24, 25])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 3), (4, 2), (3, 3)])
def test_torch_cuts_in_the_same_places(length: int, dp: int, tp: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    cases = [
        ([Shard(0), Shard(0)], (Split(0, 0), Split(0, 1))),
        ([_StridedShard(0, split_factor=tp), Shard(0)], (Split(0, 0, factor=tp), Split(0, 1))),
    ]
    for placements, splits in cases:
        spread = MeshPlacement(Mesh.grid(dp, tp), splits)
        leaf = LeafLayout("leaf", "I64", (length,), (spread,))
        for coordinate in coordinates(spread.mesh):
            local = torch.arange(length)
            for placement, parts, index in zip(placements, spread.mesh.shape, coordinate, strict=True):
                local = placement._split_tensor(local, parts, with_padding=False)[0][index]
            held = holding(leaf, spread, coordinate)
            found = [i for piece in held.pieces() for i in range(piece.box.start[0], piece.box.stop[0])]
            assert found == local.tolist()
