"""The pieces of a read: with padding they cover their file from its data's start to its end, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everystep.engine import ReadColumns


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=12), st.integers(0, 3))
def test_pieces_and_padding_together_are_everything(spans: list[tuple[int, int]], after: int) -> None:
    start = at = 4096
    offsets: list[int] = []
    for gap, nbytes in spans:
        offsets.append(at + gap)
        at += gap + nbytes
    sizes = [nbytes for _, nbytes in spans]
    names = [f"{number}" for number in range(len(spans))]
    columns = ReadColumns.to_memory(offsets, sizes, list(range(len(spans))), names)
    padded, numbers = columns.padded(start, at + after)
    reach = start
    found: list[str] = []
    for piece, number in enumerate(numbers):
        assert padded.columns.offsets[piece] == reach
        reach += padded.columns.nbytes[piece]
        is_padding = padded.columns.places[piece] == 4
        assert is_padding == (number >= len(columns))
        assert not is_padding or padded.columns.nbytes[piece] > 0
        if not is_padding:
            found.append(padded.checksums[piece])
            assert padded.columns.addresses[piece] == number
    assert reach == at + after
    assert found == names
