"""What ranks want in common: found from what each wants, not relied on where a rank wants it otherwise."""

from __future__ import annotations

from everystep.engine import Memory
from everystep.format.geometry import Box
from everystep.plan.placement import Mesh, MeshPlacement, Split
from everystep.plan.topology import Topology
from everystep.plan.world import Seen
from everystep.store.ranks.exchange import LocalArray
from everystep.store.ranks.read_shares import Sharing, common_wishes

_GRID = Mesh.grid(2, 2)


def _whole(name: str, shape: tuple[int, ...] = (8, 4)) -> Seen:
    return Seen(name, "F32", shape)


def _rows(name: str, shape: tuple[int, ...] = (8, 4), mesh: Mesh = _GRID, dim: int = 1) -> Seen:
    return Seen(name, "F32", shape, MeshPlacement(mesh, (Split(0, dim),)))


def _reads(views: dict[tuple[Seen, ...], tuple[int, ...]], world: int) -> dict[int, list[tuple[str, Box]]]:
    """What each rank reads for itself and others."""
    found = {}
    for view, ranks in views.items():
        for rank in ranks:
            places = {seen: LocalArray(Memory(4096, 1 << 20, None), _local(seen), 4) for seen in view}
            sharing = Sharing(common_wishes(views), Topology.regular(world), rank, places)
            found[rank] = [(want.leaf, want.box) for want in sharing.reads()]
    return found


def _local(seen: Seen) -> tuple[int, ...]:
    if seen.boxes:
        return seen.boxes[0].shape
    if seen.placement is None:
        return seen.shape
    parts = seen.placement.mesh.shape[seen.placement.splits[0].mesh_dim]
    return (seen.shape[0] // parts, *seen.shape[1:])


def test_what_all_want_alike_is_read_once() -> None:
    found = _reads({(_whole("a"), _whole("b")): (0, 1, 2)}, 3)
    assert sorted(item for reads in found.values() for item in reads) == [
        ("a", Box((0, 0), (8, 4))),
        ("b", Box((0, 0), (8, 4))),
    ]


def test_copies_of_shards_are_read_once_for_each_shard() -> None:
    found = _reads({(_rows("a"),): (0, 1, 2, 3)}, 4)
    assert sorted(box.start for reads in found.values() for _, box in reads) == [(0, 0), (4, 0)]


def test_a_leaf_wanted_in_two_ways_is_shared_by_ranks_that_want_it_alike() -> None:
    pair = Mesh.of([2, 3])
    views = {(_whole("a"),): (0, 1), (_rows("a", mesh=pair, dim=0),): (2, 3)}
    found = _reads(views, 4)
    boxes = sorted(box.shape for reads in found.values() for _, box in reads)
    assert boxes == [(4, 4), (4, 4), (8, 4)]


def test_a_mesh_of_which_a_rank_wants_nothing_is_not_relied_on() -> None:
    seen = _rows("a")
    assert common_wishes({(seen,): (0, 1, 2)}) == []
    assert [common.seen for common in common_wishes({(seen,): (0, 1, 2, 3)})] == [seen]
    # One that wants it in another way is no better.
    views = {(seen,): (0, 1, 2), (_whole("a"),): (3,)}
    assert [common.seen for common in common_wishes(views)] == [_whole("a")]


def test_ranks_whose_shards_are_empty_need_not_want_them() -> None:
    seen = _rows("few", (1, 4))  # of two shards the second is empty: ranks 1 and 3 have nothing
    assert common_wishes({(seen,): (0, 2), (): (1, 3)})[0].seen == seen
    assert common_wishes({(seen,): (0,), (): (1, 2, 3)}) == []


def test_equal_boxes_are_shared_and_keep_their_place_in_the_leaf() -> None:
    left = Seen("a", "F32", (8, 4), boxes=(Box((0, 0), (8, 2)),))
    right = Seen("a", "F32", (8, 4), boxes=(Box((0, 2), (8, 2)),))
    found = _reads({(left,): (0, 2), (right,): (1, 3)}, 4)
    assert sorted((box.start, box.shape) for reads in found.values() for _, box in reads) == [
        ((0, 0), (8, 2)),
        ((0, 2), (8, 2)),
    ]


def test_nodes_do_not_share() -> None:
    places = {_whole("a"): LocalArray(Memory(4096, 128, None), (8, 4), 4)}
    commons = common_wishes({(_whole("a"),): (0, 1, 2, 3)})
    readers = [
        rank for rank in range(4) if list(Sharing(commons, Topology.regular(4, 2), rank, places).reads())
    ]
    assert len(readers) == 2
    assert {rank // 2 for rank in readers} == {0, 1}
