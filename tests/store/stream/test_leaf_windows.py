"""Leaves in bounded windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import everystep
from everystep.store.read.checkpoint import open_newest
from everystep.store.stream.leaf_windows import LeafSize, WindowReader, windows

EXTENTS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 2, 3, 8, 20])).map(
        lambda drawn: LeafSize(drawn[0] * drawn[1], drawn[1])
    ),
    max_size=12,
)


@given(EXTENTS, st.integers(1, 40))
def test_windows_cover_every_byte_once_in_order_within_the_limit(sizes: list[LeafSize], limit: int) -> None:
    at = [0] * len(sizes)
    last = -1
    for window in windows(sizes, limit):
        assert window
        largest = max(sizes[span.index].itemsize for span in window)
        assert sum(span.nbytes for span in window) <= max(limit, largest)
        for span in window:
            assert span.index >= last
            last = span.index
            assert span.start == at[span.index]
            assert span.nbytes > 0
            assert span.nbytes % sizes[span.index].itemsize == 0
            assert span.whole == (span.nbytes == sizes[span.index].nbytes)
            at[span.index] = span.stop
    assert at == [extent.nbytes for extent in sizes]


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {
        f"w{i}": rng.integers(0, 256, size, dtype=np.uint8)
        for i, size in enumerate([3, 0, 5000, 70, 3_000_000])
    }
    everystep.save(tmp_path / "one", state)
    with open_newest(tmp_path / "one") as checkpoint:
        names = list(state)
        reader = WindowReader(checkpoint)
        for limit in (64, 1 << 20):
            sizes = [LeafSize(array.nbytes, 1) for array in state.values()]
            if limit == 64:
                sizes[-1] = LeafSize(0, 1)  # would take tens of thousands of windows
            parts = [reader.read(window, names) for window in windows(sizes, limit)]
            expected = [array for array, extent in zip(state.values(), sizes, strict=True) if extent.nbytes]
            assert np.array_equal(np.concatenate(parts), np.concatenate(expected))
