"""Leaves in bounded windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import everystep
from everystep.store.read.checkpoint import open_newest
from everystep.store.stream.leaf_windows import Extent, WindowReader, windows

EXTENTS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 2, 3, 8, 20])).map(
        lambda drawn: Extent(drawn[0] * drawn[1], drawn[1])
    ),
    max_size=12,
)


@given(EXTENTS, st.integers(1, 40))
def test_windows_cover_every_byte_once_in_order_within_the_limit(extents: list[Extent], limit: int) -> None:
    at = [0] * len(extents)
    last = -1
    for window in windows(extents, limit):
        assert window
        largest = max(extents[span.index].itemsize for span in window)
        assert sum(span.nbytes for span in window) <= max(limit, largest)
        for span in window:
            assert span.index >= last
            last = span.index
            assert span.start == at[span.index]
            assert span.nbytes > 0
            assert span.nbytes % extents[span.index].itemsize == 0
            assert span.whole == (span.nbytes == extents[span.index].nbytes)
            at[span.index] = span.stop
    assert at == [extent.nbytes for extent in extents]


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
            extents = [Extent(array.nbytes, 1) for array in state.values()]
            if limit == 64:
                extents[-1] = Extent(0, 1)  # would take tens of thousands of windows
            parts = [reader.read(window, names) for window in windows(extents, limit)]
            expected = [array for array, extent in zip(state.values(), extents, strict=True) if extent.nbytes]
            assert np.array_equal(np.concatenate(parts), np.concatenate(expected))
