"""DTensor's placements as splits: what its own splitting gives, and what fully_shard really holds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.plan.dtensor import splits_of
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split, holding
from support.worlds.simulated_worlds import chunk


def test_plain_shards_keep_their_order() -> None:
    assert splits_of((2, 3, 4), [(0, 1), None, (0, 1)]) == (Split(0, 0), Split(0, 2))
    assert splits_of((2, 3, 4), [(1, 1), (0, 1), (1, 1)]) == (Split(0, 1), Split(1, 0), Split(1, 2))
    assert splits_of((2,), [None]) == ()


def test_strided_shards_come_after_what_they_were_put_on_top_of() -> None:
    assert splits_of((4, 2), [(0, 2), (0, 1)]) == (Split(0, 1), Split(0, 0))
    # Sharded twice on top of tensor parallel over 2, the outer of them last.
    assert splits_of((4, 3, 2), [(0, 6), (0, 2), (0, 1)]) == (Split(0, 2), Split(0, 1), Split(0, 0))
    # On top of the first of two only.
    assert splits_of((4, 3, 2), [(0, 3), (0, 1), (0, 1)]) == (Split(0, 1), Split(0, 0), Split(0, 2))


def test_a_factor_that_nothing_explains_stays_strided() -> None:
    assert splits_of((2,), [(0, 3)]) == (Split(0, 0, 3),)
    assert splits_of((4, 2), [(0, 2), (1, 1)]) == (Split(0, 0, 2), Split(1, 1))
    with pytest.raises(ValueError, match="2 placements on a mesh of 1"):
        splits_of((2,), [None, None])


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.none() | st.integers(0, 1), st.sampled_from([1, 2, 3, 4, 6])),
        max_size=4,
    )
)
def test_where_sizes_divide_it_is_what_reading_from_left_to_right_gives(
    dims: list[tuple[int, int | None, int]],
) -> None:
    mesh_shape = tuple(size for size, _, _ in dims)
    placements = [None if axis is None else (axis, factor) for _, axis, factor in dims]
    total = math.prod(mesh_shape) * math.prod(factor for _, _, factor in dims)
    numbers = np.arange(total)
    leaf_shape = (total, total)
    spread = MeshPlacement(Mesh.grid(*mesh_shape), splits_of(mesh_shape, placements))
    leaf = LeafLayout("leaf", "U8", leaf_shape, (spread,))
    for coordinate in itertools.product(*map(range, mesh_shape)):
        expected = [numbers, numbers]
        for placement, parts, index in zip(placements, mesh_shape, coordinate, strict=True):
            if placement is not None:
                axis, factor = placement
                pieces = chunk(expected[axis], factor, 0)
                expected[axis] = np.concatenate([chunk(piece, parts, 0)[index] for piece in pieces])
        held = holding(leaf, spread, coordinate)
        for intervals, wanted in zip(held.axes, expected, strict=True):
            assert [i for low, high in intervals for i in range(low, high)] == wanted.tolist()


@pytest.mark.parametrize("length", range(0, 30))
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 4), (4, 3)])
def test_fully_shard_on_tensor_parallel_holds_a_chunk_of_a_chunk(length: int, dp: int, tp: int) -> None:
    spread = MeshPlacement(Mesh.grid(dp, tp), splits_of((dp, tp), [(0, tp), (0, 1)]))
    leaf = LeafLayout("leaf", "U8", (length,), (spread,))
    for i, j in itertools.product(range(dp), range(tp)):
        expected = chunk(chunk(np.arange(length), tp, 0)[j], dp, 0)[i].tolist()
        held = holding(leaf, spread, (i, j))
        assert [n for low, high in held.axes[0] for n in range(low, high)] == expected
