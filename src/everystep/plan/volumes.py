"""A rank's fragments striped over several volumes, so that all of them finish at the same time.

Bytes go in proportion to measured speed. Each volume gets one stretch of the rank's fragments, cut where
`everystep.plan.byte_stream` finds it best, and so at most one fragment in two pieces per volume. Which volume
holds what is recorded in the part, so ranks need not agree and the speeds may change from save to save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everystep.format.geometry import Box, boxes_of_range
from everystep.plan.byte_stream import ByteStream
from everystep.plan.replica_groups import Owned

BLOCK_NBYTES = 1 << 20
"""A volume that would get less than this gets nothing: opening and syncing a file takes longer."""


def stripe(
    fragments: Sequence[Owned], speeds: Sequence[float], *, block_nbytes: int = BLOCK_NBYTES
) -> tuple[tuple[Owned, ...], ...]:
    """What goes to each volume, given how fast each is (in any unit). Keeps the order of fragments.

    A volume whose speed is 0 gets nothing. Linear in fragments.
    """
    if not any(speeds) or not all(math.isfinite(speed) and speed >= 0 for speed in speeds):
        raise ValueError(f"speeds of volumes must be finite, not negative, and not all 0: {tuple(speeds)}")
    if block_nbytes < 1:
        raise ValueError(f"block_nbytes must be positive, not {block_nbytes}")
    # A box may be part of a larger array in memory; the stream has the elements of the box only.
    shapes = [item.piece.box.shape for item in fragments]
    itemsizes = [max(1, item.nbytes // max(1, item.piece.box.volume)) for item in fragments]
    stream = ByteStream(shapes, itemsizes)
    used = _worthwhile(stream.nbytes, speeds, block_nbytes)
    tolerance = max(block_nbytes, stream.nbytes // 100) // 4
    total = math.fsum(speeds[volume] for volume in used)
    result: list[tuple[Owned, ...]] = [()] * len(speeds)
    done, start = 0.0, 0
    for volume in used:
        done += speeds[volume]
        last = volume == used[-1]
        stop = stream.nbytes if last else stream.snap(int(stream.nbytes * (done / total)), tolerance)
        result[volume] = tuple(
            part
            for number, first, end in stream.between(start, max(start, stop))
            for part in _cut(fragments[number], itemsizes[number], first, end)
        )
        start = max(start, stop)
    return tuple(result)


def _worthwhile(nbytes: int, speeds: Sequence[float], block_nbytes: int) -> list[int]:
    """The fastest volumes that get a block or more, or the fastest one; in their own order."""
    by_speed = sorted((v for v, speed in enumerate(speeds) if speed > 0), key=lambda v: (-speeds[v], v))
    while len(by_speed) > 1:
        if nbytes * (speeds[by_speed[-1]] / math.fsum(speeds[v] for v in by_speed)) >= block_nbytes:
            break
        by_speed.pop()
    return sorted(by_speed)


def _cut(item: Owned, itemsize: int, first: int, last: int) -> list[Owned]:
    """The elements `first` to `last` of a fragment."""
    box = item.piece.box
    if last - first == box.volume:
        return [item]
    parts: list[Owned] = []
    for inner in boxes_of_range(box.shape, first, last):
        moved = Box(tuple(a + b for a, b in zip(box.start, inner.start, strict=True)), inner.shape)
        parts.append(Owned(item.leaf, item.placement, item.piece.part(moved), inner.volume * itemsize))
    return parts
