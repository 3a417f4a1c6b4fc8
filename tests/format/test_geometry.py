from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.format.geometry import (
    Box,
    Runs,
    TooTangled,
    boxes_of_range,
    contains,
    contiguous_runs,
    disjoint,
    intersect,
    subtract,
    whole,
)


def boxes(rank: int, limit: int = 6) -> st.SearchStrategy[Box]:
    index = st.tuples(*[st.integers(0, limit)] * rank)
    return st.builds(Box, index, index)


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*[range(s, s + n) for s, n in zip(box.start, box.shape, strict=True)]))


pairs = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank)))


@given(pairs)
def test_intersection_is_that_of_the_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    both = intersect(a, b)
    assert (cells(both) if both else set()) == cells(a) & cells(b)
    assert both == intersect(b, a)
    assert both is None or (contains(a, both) and contains(b, both) and both.volume == len(cells(both)))


@given(pairs)
def test_containment_is_that_of_the_elements(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    if inner.volume:
        assert contains(outer, inner) == (cells(inner) <= cells(outer))
    else:
        assert not contains(outer, inner) or all(
            a <= b <= c for a, b, c in zip(outer.start, inner.start, outer.stop, strict=True)
        )


def test_boxes_that_make_no_sense_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="length"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((-1,), (1,))
    with pytest.raises(ValueError, match="do not meet"):
        intersect(Box((0,), (1,)), Box((), ()))
    with pytest.raises(ValueError, match="inside"):
        contiguous_runs(Box((0,), (3,)), Box((1,), (3,)))


@st.composite
def nested(draw: st.DrawFn) -> tuple[Box, Box]:
    outer = draw(st.integers(0, 4).flatmap(lambda rank: boxes(rank, 5)))
    start, shape = [], []
    for s, n in zip(outer.start, outer.shape, strict=True):
        start.append(draw(st.integers(s, s + n)))
        shape.append(draw(st.integers(0, s + n - start[-1])))
    return outer, Box(tuple(start), tuple(shape))


@given(nested())
def test_runs_read_exactly_the_inner_box_in_order(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    flat = np.arange(outer.volume)
    window = tuple(
        slice(b - a, b - a + n) for a, b, n in zip(outer.start, inner.start, inner.shape, strict=True)
    )
    expected = flat.reshape(outer.shape)[window].ravel()
    runs = contiguous_runs(inner, outer)
    offsets = list(runs.offsets())
    got = [flat[at : at + runs.length] for at in offsets]
    assert np.array_equal(np.concatenate([*got, flat[:0]]), expected)
    assert len(offsets) == runs.number
    begin, end = runs.span
    if inner.volume:
        assert (begin, end) == (expected[0], expected[-1] + 1)
    else:
        assert begin == end
    # As few as there can be: two runs that touch would have been one.
    assert all(b > a + runs.length for a, b in itertools.pairwise(offsets))


def test_a_slice_of_rows_is_one_run_and_of_columns_one_per_row() -> None:
    array = whole((1000, 8, 4))
    assert contiguous_runs(Box((10, 0, 0), (20, 8, 4)), array) == Runs(320, 640, (), ())
    assert contiguous_runs(Box((0, 2, 0), (1000, 3, 4)), array) == Runs(8, 12, (1000,), (32,))
    assert contiguous_runs(whole(()), whole(())) == Runs(0, 1, (), ())


def test_runs_of_a_huge_array_take_no_memory() -> None:
    runs = contiguous_runs(Box((0, 5), (2**40, 1)), whole((2**40, 7)))
    assert runs.number == 2**40
    assert runs.span == (5, 7 * (2**40 - 1) + 6)
    assert list(itertools.islice(runs.offsets(), 3)) == [5, 12, 19]


@given(st.integers(0, 3).flatmap(lambda rank: st.lists(boxes(rank), max_size=14)))
def test_disjoint_is_what_counting_the_elements_says(some: list[Box]) -> None:
    counted = sum(len(cells(box)) for box in some) == len(set().union(*map(cells, some)))
    assert disjoint(some) == counted


@given(st.data())
def test_any_way_of_cutting_an_array_is_disjoint_and_one_more_box_is_not(data: st.DataObject) -> None:
    pieces = [whole(data.draw(st.tuples(*[st.integers(1, 40)] * 3)))]
    for _ in range(data.draw(st.integers(0, 30))):
        box = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        axis = data.draw(st.integers(0, 2))
        at = data.draw(st.integers(0, box.shape[axis]))
        first, second = list(box.shape), list(box.shape)
        first[axis], second[axis] = at, box.shape[axis] - at
        moved = list(box.start)
        moved[axis] += at
        pieces += [Box(box.start, tuple(first)), Box(tuple(moved), tuple(second))]
    assert disjoint(pieces)
    taken = next(box for box in pieces if box.volume)
    assert not disjoint([*pieces, Box(taken.start, (1, 1, 1))])


def test_a_large_grid_is_checked_at_once() -> None:
    grid = [Box((7 * i, 3 * j), (7, 3)) for i in range(200) for j in range(200)]
    assert disjoint(grid)
    assert not disjoint([*grid, Box((7 * 100 + 6, 3 * 100 + 2), (2, 1))])


def test_a_pinwheel_that_no_plane_separates_is_still_decided() -> None:
    wheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    tiled = [
        Box((3 * i + r, 3 * j + c), b.shape)
        for i in range(9)
        for j in range(9)
        for b in wheel
        for r, c in [b.start]
    ]
    assert disjoint(tiled)
    assert sum(box.volume for box in tiled) == math.prod((27, 27))


def test_a_tangle_is_given_up_in_bounded_time() -> None:
    # Rods along all three axes, interlocked: none overlap, yet every plane between them cuts a rod.
    def lattice(side: int) -> list[Box]:
        rods = []
        for i, j in itertools.product(range(0, side, 2), range(1, side, 2)):
            rods += [Box((0, i, j), (side, 1, 1)), Box((j, 0, i), (1, side, 1)), Box((i, j, 0), (1, 1, side))]
        return rods

    assert disjoint(lattice(8))
    with pytest.raises(TooTangled):
        disjoint(lattice(48))


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_a_range_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    volume = math.prod(shape)
    start = data.draw(st.integers(0, volume))
    stop = data.draw(st.integers(start, volume))
    found = boxes_of_range(shape, start, stop)
    numbers = np.arange(volume).reshape(shape)
    held = [
        int(numbers[cell]) for box in found for cell in itertools.product(*map(range, box.start, box.stop))
    ]
    assert held == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(contiguous_runs(box, whole(shape)).number == 1 for box in found)


def test_whole_rows_of_an_array_are_one_box() -> None:
    assert boxes_of_range((6, 4), 4, 20) == [Box((1, 0), (4, 4))]
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((3,), 2, 2) == []
    with pytest.raises(ValueError, match="not one of an array"):
        boxes_of_range((3,), 2, 4)


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), st.lists(boxes(rank), max_size=4))))
def test_what_is_left_of_a_box_is_disjoint_and_all_of_it(case: tuple[Box, list[Box]]) -> None:
    box, holes = case
    left = subtract(box, holes)
    expected = cells(box).difference(*map(cells, holes))
    assert sum(piece.volume for piece in left) == len(expected)
    assert set().union(*map(cells, left)) == expected
