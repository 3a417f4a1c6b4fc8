"""What ranks see, as bytes and back, and exchanged between real processes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import RankFailed
from everystep.format.geometry import Box
from everystep.plan.placement import Mesh, MeshPlacement, Split
from everystep.plan.world import Seen, merge_views
from everystep.store.ranks.checks.views import decode_view, encode_view, exchange_views
from support.worlds.launcher import launch, values
from support.worlds.meetings import meet

GRID = MeshPlacement(Mesh.grid(2, 2), (Split(0, 0), Split(1, 1, 2)))
ODD = MeshPlacement(Mesh.of(np.array([[3, 1], [0, 7]])), (Split(0, 1),), Box((2, 0), (4, 4)))
VIEW = (
    Seen("model.weight", "F32", (8, 8), GRID),
    Seen("model.bias", "BF16", (8,), MeshPlacement(Mesh.grid(2, 2))),
    Seen("odd", "F32", (8, 4), ODD),
    Seen("part", "I64", (10,), boxes=(Box((0,), (2,)), Box((8,), (2,))), framework="numpy"),
    Seen("scalar", "F64", (), framework="numpy"),
    Seen("empty", "U8", (0, 3)),
)
_spreads = st.none() | st.sampled_from([GRID, ODD, MeshPlacement(Mesh.grid(3))])
_seen = st.builds(
    Seen,
    st.text(max_size=8),
    st.sampled_from(["F32", "I64", "BOOL"]),
    st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
    _spreads,
    st.lists(st.builds(lambda n: Box((n,), (n,)), st.integers(0, 1 << 40)), max_size=2).map(tuple),
    st.sampled_from(["numpy", "torch"]),
)


@given(st.lists(_seen, max_size=5).map(tuple))
def test_views_survive_and_equal_ones_have_equal_bytes(view):
    data = encode_view(view)
    assert decode_view(data) == view
    assert encode_view(decode_view(data)) == data


def test_a_view_of_everything_survives():
    assert decode_view(encode_view(VIEW)) == VIEW
    assert decode_view(encode_view(())) == ()
    assert encode_view(VIEW) != encode_view(VIEW[::-1])


def test_a_view_is_as_large_as_its_names():
    view = tuple(Seen(f"layer.{n:05}", "F32", (4096, 4096), GRID) for n in range(1000))
    assert len(encode_view(view)) < 40 * len(view)


def _changed(change):
    tree = msgspec.msgpack.decode(encode_view(VIEW))
    change(tree)
    return msgspec.msgpack.encode(tree)


def _no_mesh(tree):
    tree[0].clear()


def _no_spread(tree):
    tree[2][0][4] = 99


def _unknown_dtype(tree):
    tree[2][0][1] = "F33"


def _no_ranks(tree):
    tree[0][0][0] = [0, 2]


def _split_of_no_dimension(tree):
    tree[1][0][1][0] = [0, 9, 1]


def _box_with_a_missing_end(tree):
    tree[2][3][5][0] = [[0], []]


def _too_many_fields(tree):
    tree[2][0].append(1)


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"\x93\x90\x90", encode_view(VIEW)[:-1], encode_view(VIEW) + b"x"]
    + [
        _changed(change)
        for change in (
            _no_mesh,
            _no_spread,
            _unknown_dtype,
            _no_ranks,
            _split_of_no_dimension,
            _box_with_a_missing_end,
            _too_many_fields,
        )
    ],
)
def test_bytes_that_are_no_view_are_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        decode_view(data)


def _exchange():
    rank = dist.get_rank()
    meeting = meet()
    both = MeshPlacement(Mesh.grid(3), (Split(0, 0),))
    view = (Seen("weight", "F32", (9, 2), both),)
    if rank == 2:
        view += (Seen("last", "F32", (3,)),)
    views = exchange_views(meeting, view)
    leaves = merge_views(views)
    if rank == 1:
        meeting.exchange(b"garbage")
        failure = None
    else:
        with pytest.raises(RankFailed) as caught:
            exchange_views(meeting, view)
        failure = str(caught.value), caught.value.ranks
    meeting.leave(wait=True)
    return list(views.values()), [leaf.name for leaf in leaves], leaves, failure


def test_all_ranks_get_the_same_views():
    found = values(launch(3, _exchange))
    for ranks, names, leaves, _ in found:
        assert ranks == [(0, 1), (2,)]
        assert names == ["weight", "last"]
        assert leaves == found[0][2]
    for rank in (0, 2):
        message, ranks = found[rank][3]
        assert message.startswith("cannot decode the view that rank 1 sent")
        assert ranks == (1,)
