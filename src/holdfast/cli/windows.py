"""The bytes of leaves, a bounded window at a time: many small leaves together, large ones in pieces.

Everything read is verified. What the bytes mean is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.engine import Memory
from holdfast.plan import ByteRange
from holdfast.store import Checkpoint
from holdfast.store.shards import Wanted

WINDOW_NBYTES = 16 << 20
"""A multiple of the checksums' chunk, so that no chunk is read twice."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Extent:
    """How many bytes a leaf has, and of how many an element."""

    nbytes: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Span:
    """A range of the bytes of the leaf at place `index`; `whole`: it is all of them."""

    index: int
    start: int
    stop: int
    whole: bool

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def windows(leaves: Iterable[Extent], limit: int = WINDOW_NBYTES) -> Iterator[tuple[Span, ...]]:
    """Cuts leaves into windows of at most `limit` bytes, in order, between elements. Empty leaves: none."""
    gathered: list[Span] = []
    room = limit
    for index, leaf in enumerate(leaves):
        if leaf.nbytes > room and gathered:
            yield tuple(gathered)
            gathered, room = [], limit
        step = max(limit // leaf.itemsize, 1) * leaf.itemsize if leaf.itemsize else limit
        for start in range(0, leaf.nbytes, step):
            stop = min(start + step, leaf.nbytes)
            gathered.append(Span(index, start, stop, whole=stop - start == leaf.nbytes))
            room -= stop - start
            if room <= 0 or stop < leaf.nbytes:
                yield tuple(gathered)
                gathered, room = [], limit
    if gathered:
        yield tuple(gathered)


class WindowReader:
    """Reads windows of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._shards = checkpoint.shards
        self._leaves = {leaf.name: leaf for leaf in checkpoint.root.part.leaves}

    def read(self, spans: Sequence[Span], names: Sequence[str]) -> Bytes:
        """The spans' bytes, one after the other; `names` are the stored leaves that their indexes mean."""
        if len(spans) == 1 and not spans[0].whole:
            return self._part(spans[0], names)
        buffer: Bytes = np.empty(sum(span.nbytes for span in spans), np.uint8)
        wanted: list[Wanted] = []
        first: dict[str, int] = {}  # leaf -> where in the buffer it goes: none is read twice
        again: list[tuple[slice, int]] = []
        at = 0
        for span in spans:
            name = names[span.index]
            place = slice(at, at + span.nbytes)
            if not span.whole:
                buffer[place] = self._part(span, names)
            elif name in first:
                again.append((place, first[name]))
            else:
                first[name] = at
                wanted.append(
                    Wanted(self._leaves[name], Memory(buffer.ctypes.data + at, span.nbytes, buffer))
                )
            at += span.nbytes
        self._shards.read(wanted, verify=True, whole=False)
        for place, start in again:
            buffer[place] = buffer[start : start + place.stop - place.start]
        return buffer

    def _part(self, span: Span, names: Sequence[str]) -> Bytes:
        leaf = self._leaves[names[span.index]]
        part: Bytes = np.frombuffer(self._shards.read_range(leaf, ByteRange(span.start, span.stop)), np.uint8)
        return part
