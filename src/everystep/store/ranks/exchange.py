"""Passing bytes between the ranks of one node, after each has read its share from storage.

The groups of `everystep.plan.read_sharing` say which rank reads what, and where it goes in all arrays.
The caller has made sure that every reader has read successfully. `everystep.store.ranks.channel` transfers
the messages.

Bytes travel straight out of and into the memory of the arrays where that is contiguous. Small pieces travel
packed together. Pieces with strides or in device memory go through a few buffers. How pieces are cut into
messages depends on their sizes only, so both ends know it without asking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from everystep.engine import ByteSource, Consumed, Destination, Memory, Produced, Strided, WritePiece, copy
from everystep.engine.buffers import Bytes, view, view_strided
from everystep.errors import UnsupportedState
from everystep.format.geometry import Box, boxes_of_range
from everystep.plan.fragments import part_of_destination, part_of_source
from everystep.plan.read_sharing import ReadGroup
from everystep.store.ranks.channel import Channel, Message, carry

MESSAGE_NBYTES = 8 << 20
"""No message is larger, so that a buffer for one is not, either. A multiple of the size of any element."""
SMALL_NBYTES = 64 << 10
"""Pieces below this are packed: a message of their own would cost more than the copy."""
PACKED_NBYTES = 1 << 20
"""A message of packed pieces is sent once it has this much."""


@dataclass(frozen=True, slots=True)
class LocalArray:
    """An array of this rank that takes part: where its bytes are, its shape and the size of an element."""

    where: Destination
    shape: tuple[int, ...]
    itemsize: int


def hand_out(
    channel: Channel,
    rank: int,
    groups: Sequence[ReadGroup],
    place_of: Callable[[int], LocalArray],
    timeout: float,
) -> int:
    """Give the others of each group what this rank has read for them, and take what they have read.

    To be called by all ranks of the groups, after all have read; `place_of` gives the array of a leaf's
    number. Returns the bytes received. A rank that is gone, or from which nothing comes in `timeout` seconds,
    is named by `RankFailed`; arrays are then partly filled.
    """
    return carry(channel, _messages(rank, groups, place_of), timeout)


@dataclass(frozen=True, slots=True)
class BoxBytes:
    """Bytes `start` to `stop` of a piece: of a box of an array, in C order."""

    place: LocalArray
    box: Box
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BoxMessage(Message):
    """A message whose bytes lie in arrays of this rank."""

    spans: tuple[BoxBytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def direct(self) -> Bytes | None:
        return _direct(self.spans)

    def gather(self, buffer: Bytes) -> None:
        _gather(self.spans, buffer)

    def scatter(self, buffer: Bytes) -> None:
        _scatter(self.spans, buffer)


def _messages(
    rank: int, groups: Sequence[ReadGroup], place_of: Callable[[int], LocalArray]
) -> list[BoxMessage]:
    """All messages that this rank sends or receives."""
    channels: dict[tuple[int, int], list[tuple[LocalArray, Box, int]]] = {}
    for group in groups:
        others = [other for other in group.ranks if other != rank]
        for share in group.shares:
            mine = share.reader == rank
            ends = [(rank, other) for other in others] if mine else [(share.reader, rank)]
            pieces = [(place_of(item.leaf), item.piece.local, item.nbytes) for item in share.pieces]
            for end in ends:
                channels.setdefault(end, []).extend(pieces)
    return [
        BoxMessage(number, sender, receiver, sender == rank, _spans(pieces, part))
        for (sender, receiver), pieces in channels.items()
        for number, part in enumerate(cut([nbytes for *_, nbytes in pieces], MESSAGE_NBYTES))
    ]


def _spans(
    pieces: Sequence[tuple[LocalArray, Box, int]], part: Iterable[tuple[int, int, int]]
) -> tuple[BoxBytes, ...]:
    return tuple(BoxBytes(*pieces[index][:2], start, stop) for index, start, stop in part)


def cut(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """The messages for pieces of these sizes: of each, which pieces, from which byte on to which.

    None has more than `most` bytes, unless it is packed of small pieces.
    """
    packed: list[tuple[int, int, int]] = []
    packed_nbytes = 0
    for index, nbytes in enumerate(sizes):
        if nbytes >= SMALL_NBYTES:
            for start in range(0, nbytes, most):
                yield [(index, start, min(start + most, nbytes))]
        elif nbytes:
            packed.append((index, 0, nbytes))
            packed_nbytes += nbytes
            if packed_nbytes >= PACKED_NBYTES:
                yield packed
                packed, packed_nbytes = [], 0
    if packed:
        yield packed


def _direct(spans: Sequence[BoxBytes]) -> Bytes | None:
    """The memory of a message that lies in one row on the host; None where it needs a buffer."""
    if len(spans) != 1:
        return None
    (span,) = spans
    where = part_of_destination(span.place.where, span.place.shape, span.place.itemsize, span.box)
    return view(where.address + span.start, span.nbytes) if isinstance(where, Memory) else None


def _gather(spans: Sequence[BoxBytes], buffer: Bytes) -> None:
    pieces: list[WritePiece] = []
    at = 0
    for span in spans:
        for source in _sources(span):
            pieces.append(WritePiece(at, source))
            at += source.nbytes
    copy(pieces, buffer)


def _sources(span: BoxBytes) -> Iterator[ByteSource]:
    place = span.place
    whole = place.where
    if isinstance(whole, Consumed):
        yield _fetched(whole, span)
        return
    part = part_of_source(whole, place.shape, place.itemsize, span.box)
    if isinstance(part, Memory):
        yield Memory(part.address + span.start, span.nbytes, part.owner)
        return
    for box in _boxes(span):
        yield part_of_source(part, span.box.shape, place.itemsize, box)


def _fetched(where: Consumed, span: BoxBytes) -> Produced:
    """Bytes back out of device memory."""
    fetch = where.fetch
    if fetch is None:
        raise UnsupportedState("device memory that cannot be read back cannot be sent to other ranks")
    # Fetching runs of bytes is like draining them, in the other direction.
    both = Consumed(where.nbytes, fetch)
    part = part_of_destination(both, span.place.shape, span.place.itemsize, span.box)
    assert isinstance(part, Consumed)
    fill = part.drain
    return Produced(span.nbytes, lambda window, offset: fill(window, span.start + offset))


def _scatter(spans: Sequence[BoxBytes], buffer: Bytes) -> None:
    at = 0
    for span in spans:
        place = span.place
        where = part_of_destination(place.where, place.shape, place.itemsize, span.box)
        data = buffer[at : at + span.nbytes]
        at += span.nbytes
        if isinstance(where, Memory):
            np.copyto(view(where.address + span.start, span.nbytes), data)
        elif isinstance(where, Consumed):
            where.drain(data.data, span.start)
        else:
            _scatter_strided(where, span, data)


def _scatter_strided(where: Strided, span: BoxBytes, data: Bytes) -> None:
    at = 0
    for box in _boxes(span):
        part = part_of_destination(where, span.box.shape, where.itemsize, box)
        assert not isinstance(part, Consumed)
        nbytes = part.nbytes
        if isinstance(part, Strided):
            target = view_strided(part)
            np.copyto(target, data[at : at + nbytes].view(target.dtype).reshape(part.shape))
        else:
            np.copyto(view(part.address, nbytes), data[at : at + nbytes])
        at += nbytes


def _boxes(span: BoxBytes) -> list[Box]:
    """A span as boxes of its piece."""
    size = span.place.itemsize
    if span.nbytes == size * math.prod(span.box.shape):
        return [Box((0,) * len(span.box.shape), span.box.shape)]
    return boxes_of_range(span.box.shape, span.start // size, span.stop // size)
