"""Where a tape of arrays is cut: near its target, at the best place, and never out of order."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from everystep.plan.byte_stream import ByteStream

arrays = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=3).map(tuple), st.sampled_from([1, 2, 3, 8])), max_size=10
)


def tape_of(found: list[tuple[tuple[int, ...], int]]) -> ByteStream:
    return ByteStream([shape for shape, _ in found], [size for _, size in found])


@given(arrays, st.integers(0, 5000), st.lists(st.integers(-10, 100_000), max_size=20))
def test_cuts_stay_near_their_targets_and_in_order(
    found: list[tuple[tuple[int, ...], int]], tolerance: int, targets: list[int]
) -> None:
    tape = tape_of(found)
    places = [tape.snap(target, tolerance) for target in sorted(targets)]
    assert places == sorted(places)
    for target, place in zip(sorted(targets), places, strict=True):
        inside = min(max(target, 0), tape.nbytes)
        assert abs(place - inside) <= max(tolerance, 8)


@given(arrays, st.data())
def test_between_cuts_lies_every_element_once(
    found: list[tuple[tuple[int, ...], int]], data: st.DataObject
) -> None:
    tape = tape_of(found)
    targets = data.draw(st.lists(st.integers(0, max(tape.nbytes, 1)), max_size=6))
    cuts = sorted({0, tape.nbytes, *(tape.snap(target, 0) for target in targets)})
    held: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise(cuts):
        for number, first, last in tape.between(start, stop):
            assert first < last
            held.extend((number, element) for element in range(first, last))
    assert held == [(n, e) for n, (shape, _) in enumerate(found) for e in range(math.prod(shape))]


def test_a_cut_prefers_the_end_of_an_array_then_of_a_row_then_of_a_block() -> None:
    tape = ByteStream([(1000,), (100, 30, 100), (1 << 20,)], [4, 4, 4])
    assert tape.snap(4100, 200) == 4000
    rows = tape.snap(4000 + 5 * 12_000 + 700, 6_000)
    assert (rows - 4000) % 12_000 == 0
    shorter = tape.snap(4000 + 5 * 12_000 + 700, 300)
    assert (shorter - 4000) % 400 == 0
    blocks = tape.snap(tape.start(2) + 1_000_001, 4096)
    assert (blocks - tape.start(2)) % 4096 == 0
