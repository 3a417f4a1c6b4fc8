"""Which bytes a request needs: never too few, never those of other rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from everystep.plan import ByteRange, rows_to_read


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[range, ...]]:
    """A shape and a box inside it that holds at least one element."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(range(start, draw(st.integers(start + 1, size))))
    return shape, tuple(box)


@given(boxes(), st.sampled_from([1, 2, 8, 3]), st.integers(0, 500))
def test_the_rows_hold_exactly_the_box(
    request: tuple[tuple[int, ...], tuple[range, ...]], itemsize: int, coarse: int
) -> None:
    """Reading what is yielded, and cutting the inner dimensions, gives what numpy gives."""
    shape, box = request
    array = np.arange(math.prod(shape) * itemsize, dtype=np.uint32).reshape(*shape, itemsize)
    flat = array.reshape(-1)
    out = np.full((*(len(span) for span in box), itemsize), -1, np.int64)
    for prefix, span in rows_to_read(shape, box, itemsize, coarse):
        assert 0 <= span.start < span.stop <= flat.size
        depth = len(prefix)
        place = tuple(index - axis.start for index, axis in zip(prefix, box, strict=False))
        row = flat[span.start : span.stop]
        if depth == len(shape):
            out[place] = row
            continue
        rows = row.reshape(len(box[depth]), *shape[depth + 1 :], itemsize)
        assert (out[place] == -1).all()  # nothing is yielded twice
        out[place] = rows[(slice(None), *(slice(axis.start, axis.stop) for axis in box[depth + 1 :]))]
    expected = array[tuple(slice(axis.start, axis.stop) for axis in box)]
    assert np.array_equal(out, expected)


@given(boxes(), st.integers(1, 8), st.integers(0, 500))
def test_too_much_is_read_only_where_rows_are_short(
    request: tuple[tuple[int, ...], tuple[range, ...]], itemsize: int, coarse: int
) -> None:
    shape, box = request
    needed = itemsize * math.prod(len(span) for span in box)
    spans = [span for _, span in rows_to_read(shape, box, itemsize, coarse)]
    total = sum(span.nbytes for span in spans)
    assert total >= needed
    if coarse == 0:
        # Down to single rows: what is left over is inside the innermost dimension that is read whole.
        assert total == needed
    # Spans come in the order of the file and never overlap, so that nothing is read twice.
    assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))


def test_whole_rows_of_a_large_array_are_one_range() -> None:
    assert list(rows_to_read((10**6, 10**6), (range(5, 9), range(10**6)), 4, 1 << 20)) == [
        ((), ByteRange(5 * 4 * 10**6, 9 * 4 * 10**6))
    ]


def test_columns_are_read_row_by_row_only_when_rows_are_long() -> None:
    narrow = list(rows_to_read((4, 1000), (range(0, 4), range(10, 20)), 4, 1 << 20))
    assert narrow == [((), ByteRange(0, 16_000))]
    long = list(rows_to_read((4, 10**7), (range(1, 3), range(10, 20)), 4, 1 << 20))
    row = 4 * 10**7
    assert long == [((1,), ByteRange(row + 40, row + 80)), ((2,), ByteRange(2 * row + 40, 2 * row + 80))]


def test_offsets_beyond_four_gigabytes() -> None:
    ((_, span),) = rows_to_read((10**5, 10**5), (range(99_999, 10**5), range(10**5)), 4, 1 << 20)
    assert span == ByteRange(99_999 * 4 * 10**5, 4 * 10**10)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700), st.integers(0, 3000))
def test_rounding_out_covers_the_range_with_whole_chunks(
    start: int, nbytes: int, chunk: int, more: int
) -> None:
    span = ByteRange(start, start + nbytes)
    limit = span.stop + more
    outer = span.rounded_out(chunk, limit)
    assert outer.start <= span.start
    assert span.stop <= outer.stop <= limit
    assert outer.start % chunk == 0
    assert outer.stop % chunk == 0 or outer.stop == limit
    assert span.start - outer.start < chunk
    assert outer.stop - span.stop < chunk
