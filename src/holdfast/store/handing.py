"""Handing memory around among the ranks of one node, after each of them has read its share from storage.

Owns the transfer only. Who reads what, and where it lies in everybody's arrays, is in the groups of
`holdfast.plan.sharing`; that every reader has read, and read well, its caller has made sure of.

Bytes travel as *messages* from one rank to another, straight out of and into the arrays' own memory where
that is contiguous. Small pieces travel packed together, and pieces with strides or in device memory through
buffers, of which there are few at a time. How pieces are cut into messages depends on their sizes only, so
that both ends know it without a word, however the arrays lie in their memory.

Why this never blocks for good, whatever the groups are. Both ends of a message give it the same number: first
its place among all from this sender to this receiver, then sender and receiver. That is a total order of all
messages of the world. Every rank posts its own in this order, sends and receives alike, and waits for the
oldest that it has posted. Take the first message of that order which is not done: all before it are, so
neither of its ends waits for another, and both have posted it or are about to. Then it is transferred, since
the process group moves what both ends have posted without their help. What goes from one rank to another is
posted in the same order by both, so it also meets its like.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from holdfast.engine import Consumed, Destination, Memory, Produced, Source, Strided, WritePiece, copy
from holdfast.engine.views import Bytes, view, view_strided
from holdfast.errors import RankFailed, UnsupportedState
from holdfast.format.geometry import Box, boxes_of_range
from holdfast.plan.fragments import part_of_destination, part_of_source
from holdfast.plan.sharing import Group

MESSAGE_NBYTES = 8 << 20
"""No message is larger, so that a buffer for one is not, either. A multiple of the size of any element."""
SMALL_NBYTES = 64 << 10
"""Pieces below this are packed: a message of their own would cost more than the copy."""
PACKED_NBYTES = 1 << 20
"""A message of packed pieces is sent once it has this much."""
MAX_POSTED = 32
"""Messages under way at a time."""
MAX_STAGED_NBYTES = 32 << 20
"""Bytes of all buffers under way."""

_TAG = 0x401D


@dataclass(frozen=True, slots=True)
class Place:
    """An array of this rank that takes part: where its bytes are, its shape and the size of an element."""

    where: Destination
    shape: tuple[int, ...]
    itemsize: int


class Link:
    """The way to the memory of other ranks: a gloo process group.

    Make it where all ranks do (`open` may create a group, which is a collective act), once per training.
    """

    def __init__(self, group: Any = None) -> None:
        """`group` is a gloo group of all ranks; None for the default one."""
        self._group = group
        self._ours = False
        self._times = 0

    @classmethod
    def open(cls, timeout: float = 600.0) -> Link:
        """The link of all ranks: the default group if it moves host memory by gloo, else a new one."""
        import torch.distributed as dist

        if _by_gloo(dist.get_backend_config()):
            return cls()
        link = cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
        link._ours = True
        return link

    def close(self) -> None:
        """Give up a group that was made for this link: it has threads and connections of its own."""
        import torch.distributed as dist

        if self._ours and dist.is_initialized():  # else it has gone with all others
            self._ours = False
            dist.destroy_process_group(self._group)

    def next_tag(self) -> int:
        """A tag of its own for every exchange: what one that failed has left behind must not be met again."""
        self._times += 1
        return _TAG + self._times % (1 << 16)

    def send(self, memory: Bytes, peer: int, tag: int) -> Any:
        import torch
        import torch.distributed as dist

        return dist.isend(torch.from_numpy(memory), dst=peer, group=self._group, tag=tag)

    def receive(self, memory: Bytes, peer: int, tag: int) -> Any:
        import torch
        import torch.distributed as dist

        return dist.irecv(torch.from_numpy(memory), src=peer, group=self._group, tag=tag)


def _by_gloo(backends: str) -> bool:
    """Whether host memory goes by gloo, in torch's words: ``gloo``, or ``cpu:gloo,cuda:nccl``."""
    for entry in backends.split(","):
        device, _, backend = entry.rpartition(":")
        if device in ("", "cpu"):
            return backend == "gloo"
    return False


def hand_out(
    link: Link,
    rank: int,
    groups: Sequence[Group],
    place_of: Callable[[int], Place],
    timeout: float,
) -> int:
    """Give the others of each group what this rank has read for them, and take what they have read.

    To be called by all ranks of the groups, after all have read; `place_of` gives the array of a leaf's
    number. Returns the bytes received. A rank that is gone, or from which nothing comes in `timeout` seconds,
    is named by `RankFailed`; arrays are then partly filled.
    """
    flow = _Flow(link, timeout)
    for message in _messages(rank, groups, place_of):
        flow.post(message)
    flow.finish()
    return flow.received_nbytes


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes `start` to `stop` of a piece: of a box of an array, in C order."""

    place: Place
    box: Box
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Message:
    number: int
    sender: int
    receiver: int
    outward: bool
    spans: tuple[_Span, ...]

    @property
    def peer(self) -> int:
        return self.receiver if self.outward else self.sender

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


def _messages(rank: int, groups: Sequence[Group], place_of: Callable[[int], Place]) -> list[_Message]:
    """All messages that this rank sends or receives, in the order of the world."""
    channels: dict[tuple[int, int], list[tuple[Place, Box, int]]] = {}
    for group in groups:
        others = [other for other in group.ranks if other != rank]
        for stretch in group.stretches:
            mine = stretch.reader == rank
            ends = [(rank, other) for other in others] if mine else [(stretch.reader, rank)]
            pieces = [(place_of(item.leaf), item.piece.local, item.nbytes) for item in stretch.pieces]
            for end in ends:
                channels.setdefault(end, []).extend(pieces)
    found = [
        _Message(number, sender, receiver, sender == rank, spans)
        for (sender, receiver), pieces in channels.items()
        for number, spans in enumerate(_cut(pieces))
    ]
    found.sort(key=lambda message: (message.number, message.sender, message.receiver))
    return found


def _cut(pieces: Sequence[tuple[Place, Box, int]]) -> Iterator[tuple[_Span, ...]]:
    """The messages for pieces of these sizes; nothing but the sizes counts."""
    packed: list[_Span] = []
    packed_nbytes = 0
    for place, box, nbytes in pieces:
        if nbytes >= SMALL_NBYTES:
            for start in range(0, nbytes, MESSAGE_NBYTES):
                yield (_Span(place, box, start, min(start + MESSAGE_NBYTES, nbytes)),)
        elif nbytes:
            packed.append(_Span(place, box, 0, nbytes))
            packed_nbytes += nbytes
            if packed_nbytes >= PACKED_NBYTES:
                yield tuple(packed)
                packed, packed_nbytes = [], 0
    if packed:
        yield tuple(packed)


@dataclass(frozen=True, slots=True)
class _Posted:
    message: _Message
    work: Any
    memory: Bytes
    staged: bool


class _Flow:
    """Messages under way: posted in the order given, and waited for in the same.

    From a rank that failed nothing more is expected, but all others still get what they wait for: so they,
    too, find out which rank it was.
    """

    def __init__(self, link: Link, timeout: float) -> None:
        self._link = link
        self._tag = link.next_tag()
        self._timeout = timeout
        self._posted: deque[_Posted] = deque()
        self._staged_nbytes = 0
        self._lost: dict[int, RankFailed] = {}
        self.received_nbytes = 0

    def post(self, message: _Message) -> None:
        if message.peer in self._lost:
            return
        memory = _direct(message.spans)
        staged = memory is None
        nbytes = message.nbytes if staged else 0
        while self._posted and (
            len(self._posted) >= MAX_POSTED or self._staged_nbytes + nbytes > MAX_STAGED_NBYTES
        ):
            self._complete()
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
            if message.outward:
                _gather(message.spans, memory)
        hand = self._link.send if message.outward else self._link.receive
        try:
            work = hand(memory, message.peer, self._tag)
        except RuntimeError as error:
            self._lose(message, error)
            return
        self._staged_nbytes += nbytes
        self._posted.append(_Posted(message, work, memory, staged))

    def finish(self) -> None:
        while self._posted:
            self._complete()
        for error in self._lost.values():
            error.ranks = tuple(self._lost)
            raise error

    def _complete(self) -> None:
        posted = self._posted.popleft()
        message = posted.message
        if posted.staged:
            self._staged_nbytes -= message.nbytes
        if message.peer in self._lost:
            return
        try:
            posted.work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._lose(message, error)
            return
        if not message.outward:
            self.received_nbytes += message.nbytes
            if posted.staged:
                _scatter(message.spans, posted.memory)

    def _lose(self, message: _Message, error: RuntimeError) -> None:
        what = (
            f"handing bytes to rank {message.receiver}"
            if message.outward
            else f"receiving bytes that rank {message.sender} has read"
        )
        said = str(error).strip().splitlines() or [type(error).__name__]
        failed = RankFailed(
            f"{what} failed ({said[0]}). It is gone, or did not come so far within {self._timeout:g} s; the "
            "state is only partly restored: launch again"
        )
        failed.__cause__ = error
        self._lost[message.peer] = failed


def _direct(spans: Sequence[_Span]) -> Bytes | None:
    """The memory of a message that lies in one row on the host; None where it needs a buffer."""
    if len(spans) != 1:
        return None
    (span,) = spans
    where = part_of_destination(span.place.where, span.place.shape, span.place.itemsize, span.box)
    return view(where.address + span.start, span.nbytes) if isinstance(where, Memory) else None


def _gather(spans: Sequence[_Span], buffer: Bytes) -> None:
    pieces: list[WritePiece] = []
    at = 0
    for span in spans:
        for source in _sources(span):
            pieces.append(WritePiece(at, source))
            at += source.nbytes
    copy(pieces, buffer)


def _sources(span: _Span) -> Iterator[Source]:
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


def _fetched(where: Consumed, span: _Span) -> Produced:
    """Bytes back out of device memory."""
    fetch = where.fetch
    if fetch is None:
        raise UnsupportedState("device memory that cannot be read back cannot be handed to other ranks")
    # Fetching runs of bytes is like draining them, in the other direction.
    both = Consumed(where.nbytes, fetch)
    part = part_of_destination(both, span.place.shape, span.place.itemsize, span.box)
    assert isinstance(part, Consumed)
    fill = part.drain
    return Produced(span.nbytes, lambda window, offset: fill(window, span.start + offset))


def _scatter(spans: Sequence[_Span], buffer: Bytes) -> None:
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


def _scatter_strided(where: Strided, span: _Span, data: Bytes) -> None:
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


def _boxes(span: _Span) -> list[Box]:
    """A span as boxes of its piece."""
    size = span.place.itemsize
    if span.nbytes == size * math.prod(span.box.shape):
        return [Box((0,) * len(span.box.shape), span.box.shape)]
    return boxes_of_range(span.box.shape, span.start // size, span.stop // size)
