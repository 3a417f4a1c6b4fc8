"""The bytes of leaves, a bounded window at a time: many small leaves together, large ones in pieces.

It does not interpret the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.engine import Memory
from everystep.format.dtypes import itemsize
from everystep.format.geometry import boxes_of_range, whole
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.requests import BoxRequest

WINDOW_NBYTES = 16 << 20
"""A multiple of the checksums' chunk, so that no chunk is read twice."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class LeafSize:
    """The size of a leaf, and of an element of it."""

    nbytes: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class LeafRange:
    """A range of the bytes of the leaf at place `index`; `whole`: it is all of them."""

    index: int
    start: int
    stop: int
    whole: bool

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def windows(leaves: Iterable[LeafSize], limit: int = WINDOW_NBYTES) -> Iterator[tuple[LeafRange, ...]]:
    """Cuts leaves into windows of at most `limit` bytes, in order, between elements."""
    gathered: list[LeafRange] = []
    left = limit
    for index, leaf in enumerate(leaves):
        if leaf.nbytes > left and gathered:
            yield tuple(gathered)
            gathered, left = [], limit
        step = max(limit // leaf.itemsize, 1) * leaf.itemsize if leaf.itemsize else limit
        for start in range(0, leaf.nbytes, step):
            stop = min(start + step, leaf.nbytes)
            gathered.append(LeafRange(index, start, stop, whole=stop - start == leaf.nbytes))
            left -= stop - start
            if left <= 0 or stop < leaf.nbytes:
                yield tuple(gathered)
                gathered, left = [], limit
    if gathered:
        yield tuple(gathered)


class WindowReader:
    """Reads windows of one checkpoint. `verify`: compares what it reads with the checksums."""

    def __init__(self, checkpoint: Checkpoint, *, verify: bool = True) -> None:
        self._checkpoint = checkpoint
        self._verify = verify

    def read(self, ranges: Sequence[LeafRange], names: Sequence[str], memory: Bytes | None = None) -> Bytes:
        """The ranges' bytes, one after the other; `names` are the stored leaves that their indexes mean.

        They are at the start of `memory` if there is room, otherwise in new memory.
        """
        nbytes = sum(span.nbytes for span in ranges)
        if memory is None or len(memory) < nbytes:
            memory = np.empty(nbytes, np.uint8)
        buffer = memory[:nbytes]
        wanted: list[BoxRequest] = []
        first: dict[tuple[str, int], int] = {}  # leaf, start -> its place in the buffer: none is read twice
        again: list[tuple[slice, int]] = []
        at = 0
        for span in ranges:
            key = names[span.index], span.start
            if key in first:
                again.append((slice(at, at + span.nbytes), first[key]))
            else:
                first[key] = at
                wanted += self._wanted(names[span.index], span, buffer, at)
            at += span.nbytes
        self._checkpoint._reader.fetch(wanted, verify=self._verify)
        for place, start in again:
            buffer[place] = buffer[start : start + place.stop - place.start]
        return buffer

    def _wanted(self, name: str, span: LeafRange, buffer: Bytes, at: int) -> Iterator[BoxRequest]:
        """A range of a leaf as boxes, which follow each other in the buffer."""
        info = self._checkpoint._parts.leaf_infos[name]
        size = itemsize(info.dtype)
        boxes = [whole(info.shape)]
        if not span.whole:
            boxes = boxes_of_range(info.shape, span.start // size, span.stop // size)
        for box in boxes:
            nbytes = size * box.volume
            yield BoxRequest(name, box, Memory(buffer.ctypes.data + at, nbytes, buffer))
            at += nbytes
