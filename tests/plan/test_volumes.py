"""Fragments over volumes: everything once, in order, in proportion to speed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.format.geometry import Box
from everystep.plan.placement import LeafLayout, LocalBox, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.replica_groups import Owned
from everystep.plan.topology import Topology
from everystep.plan.volumes import stripe
from support.worlds.simulated_worlds import inside


def fragment(number: int, shape: tuple[int, ...], itemsize: int = 4) -> Owned:
    """A box in the middle of a larger leaf and a larger array."""
    ones = (1,) * len(shape)
    within = tuple(n + 2 for n in shape)
    piece = LocalBox(Box((5,) * len(shape), shape), Box(ones, shape), within)
    return Owned(number, 0, piece, math.prod(shape) * itemsize)


fragments = st.lists(
    st.lists(st.integers(1, 40), max_size=3).map(tuple).filter(lambda shape: math.prod(shape) < 5000),
    max_size=12,
).map(lambda shapes: [fragment(number, shape) for number, shape in enumerate(shapes)])

speeds = st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda found: max(found) > 0.01)


@given(fragments, speeds, st.sampled_from([1, 64, 4096]))
def test_every_element_goes_to_one_volume_in_order(items: list[Owned], fast: list[float], block: int) -> None:
    striped = stripe(items, fast, block_nbytes=block)
    assert len(striped) == len(fast)
    order = [(part.leaf, number) for volume, parts in enumerate(striped) for number, part in enumerate(parts)]
    assert [leaf for leaf, _ in order] == sorted(leaf for leaf, _ in order)
    for item in items:
        times = np.zeros(item.piece.within, dtype=int)
        for part in (part for parts in striped for part in parts if part.leaf == item.leaf):
            times[inside(part.piece.local)] += 1
            assert part.nbytes == part.piece.box.volume * 4
            assert part.piece.within == item.piece.within
            # Where it lies in the leaf and where in memory have moved alike.
            assert [a - b for a, b in zip(part.piece.box.start, part.piece.local.start, strict=True)] == [
                4
            ] * times.ndim
        assert times.sum() == item.piece.box.volume
        assert (times[inside(item.piece.local)] == 1).all()


@pytest.mark.parametrize("fast", [(1.0,), (1.0, 1.0), (3.0, 1.0), (0.5, 2.5, 1.0), (7.0, 7.1, 2.2, 0.9)])
def test_shares_follow_the_speeds(fast: tuple[float, ...]) -> None:
    items = [fragment(number, (1000 + 37 * number, 1024)) for number in range(20)]
    total = sum(item.nbytes for item in items)
    for parts, speed in zip(stripe(items, fast), fast, strict=True):
        share = sum(part.nbytes for part in parts)
        assert abs(share - total * speed / sum(fast)) <= total / 100


def test_a_volume_of_no_speed_gets_nothing_and_little_data_stays_together() -> None:
    items = [fragment(0, (500, 1024)), fragment(1, (3,))]
    assert stripe(items, (0.0, 1.0, 0.0)) == ((), tuple(items), ())
    assert stripe(items[1:], (1.0, 2.0, 1.5)) == ((), (items[1],), ())
    assert stripe([], (1.0, 2.0)) == ((), ())


@pytest.mark.parametrize("fast", [(), (0.0,), (1.0, -1.0), (math.nan, 1.0), (math.inf,)])
def test_speeds_that_make_no_sense_are_refused(fast: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="speeds"):
        stripe([fragment(0, (3,))], fast)


def test_a_strided_shard_stays_what_it_is() -> None:
    spread = MeshPlacement(Mesh.grid(2), (Split(0, 0, factor=2),))
    plan = WritePlan([LeafLayout("leaf", "F32", (4096, 256), (spread,))], Topology.regular(2))
    items = plan.fragments(1)
    assert [item.piece.box.start for item in items] == [(1024, 0), (3072, 0)]
    first, second = stripe(items, (1.0, 1.0))
    assert (first, second) == ((items[0],), (items[1],))
