"""The pieces of a read: with padding they cover their file from its data's start to its end, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from everystep import engine
from everystep.engine import READING, Pieces
from support.states.random_pieces import checksums, random_bytes

START = 4096


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=12), st.integers(0, 3))
def test_pieces_and_padding_together_are_everything(
    folder: Path, spans: list[tuple[int, int]], after: int
) -> None:
    content = random_bytes(START + sum(gap + nbytes for gap, nbytes in spans) + after, seed=1)
    offsets, gaps, edges = [], [], set()
    at = START
    for gap, nbytes in [*spans, (after, 0)]:
        content[at : at + gap] = 0
        gaps += range(at, at + gap)
        offsets.append(at + gap)
        at += gap + nbytes
        edges |= {offsets[-1] - gap, offsets[-1] - 1, offsets[-1], at - 1}
    sizes = [nbytes for _, nbytes in spans]
    stored = [content[offset : offset + nbytes] for offset, nbytes in zip(offsets, sizes, strict=False)]
    read = [np.zeros_like(array) for array in stored]
    pieces = Pieces.to_memory(
        offsets[:-1], sizes, [array.ctypes.data for array in read], [checksums(array) for array in stored]
    )
    padded, numbers = pieces.padded(START, at)
    assert len(padded) == len(numbers)
    assert (padded.nbytes, pieces.nbytes) == (at - START, sum(sizes))
    assert [number for number in numbers if number < len(pieces)] == list(range(len(spans)))

    path = folder / "padded"
    content.tofile(path)
    assert engine.read(path, padded, tuning=READING) == []
    assert all((found == array).all() for found, array in zip(read, stored, strict=True))
    for place in edges & set(range(START, at)):
        content[place] ^= 1
        content.tofile(path)
        (damage,) = engine.read(path, padded, tuning=READING)
        number = numbers[damage.piece]
        assert (number >= len(pieces)) == (place in gaps)
        if place not in gaps:
            assert offsets[number] <= place < offsets[number] + sizes[number]
        content[place] ^= 1
