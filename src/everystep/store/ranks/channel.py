"""Bytes from rank to rank: a gloo process group, and messages over it in one order for all.

Owns the transfer only. The maker of a message says what it holds, and where its bytes come from and go to.

This never deadlocks, whatever the messages are. Both ends of a message give it the same number: first its
position among all messages from this sender to this receiver, then sender and receiver. That is a total order
of all messages of the world. Every rank posts its own messages in this order, sends and receives alike, and
waits for the oldest that it has posted. Consider the first message of the order that is not done. All before
it are done, so neither of its ends waits for another message, and both have posted it or are about to. Then
it is transferred, because the process group moves what both ends have posted without their help. Both ends
post the messages between them in the same order, so each meets its counterpart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from everystep.engine.buffers import Bytes
from everystep.errors import RankTimeout
from everystep.store.ranks.transport import Subgroup

MAX_POSTED = 32
"""Messages under way at a time."""
MAX_STAGED_NBYTES = 32 << 20
"""Bytes of all buffers under way."""

_TAG = 0x401D


@dataclass(frozen=True, slots=True)
class Message(ABC):
    """Bytes from one rank to another. `outward`: this rank sends. `number` counts those of the two."""

    number: int
    sender: int
    receiver: int
    outward: bool

    @property
    def peer(self) -> int:
        return self.receiver if self.outward else self.sender

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def direct(self) -> Bytes | None:
        """Its memory, where that lies in one row on the host; None where it needs a buffer."""

    @abstractmethod
    def gather(self, buffer: Bytes) -> None:
        """Fills the buffer of a message that is sent."""

    @abstractmethod
    def scatter(self, buffer: Bytes) -> None:
        """Takes what was received to its places."""


class Channel:
    """The way to the memory of other ranks: a gloo process group.

    Make it where all ranks do (`open` may create a group, which is a collective act), once per training.
    """

    def __init__(self, group: Any = None, ranks: Sequence[int] | None = None) -> None:
        """`group` is a gloo group of all ranks; None for the default one.

        `ranks`: of a subgroup, the number in the world of each of its ranks.
        """
        self._group = group
        self._ranks = ranks
        self._ours = False
        self._times = 0

    @classmethod
    def open(cls, timeout: float = 600.0, subgroup: Subgroup | None = None) -> Channel:
        """The channel of all ranks: their group if it moves host memory by gloo, else a new one."""
        import torch.distributed as dist

        handle, ranks = (None, None) if subgroup is None else (subgroup.handle, subgroup.ranks)
        if _by_gloo(dist.get_backend_config(handle)):
            return cls(handle, ranks)
        made = dist.new_group(
            None if ranks is None else list(ranks),
            backend="gloo",
            timeout=timedelta(seconds=timeout),
            use_local_synchronization=ranks is not None,  # ranks outside of a subgroup do not take part
        )
        channel = cls(made, ranks)
        channel._ours = True
        return channel

    def close(self) -> None:
        """Ends a group that was made for this channel: it has threads and connections of its own."""
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

        return dist.isend(torch.from_numpy(memory), dst=self._in_world(peer), group=self._group, tag=tag)

    def receive(self, memory: Bytes, peer: int, tag: int) -> Any:
        import torch
        import torch.distributed as dist

        return dist.irecv(torch.from_numpy(memory), src=self._in_world(peer), group=self._group, tag=tag)

    def _in_world(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]


def _by_gloo(backends: str) -> bool:
    """Whether host memory goes by gloo, in torch's words: ``gloo``, or ``cpu:gloo,cuda:nccl``."""
    for entry in backends.split(","):
        device, _, backend = entry.rpartition(":")
        if device in ("", "cpu"):
            return backend == "gloo"
    return False


def carry(channel: Channel, messages: Iterable[Message], timeout: float) -> int:
    """Transfer all messages of this rank, whose peers do the same; the bytes received.

    A rank that is gone, or from which nothing comes in `timeout` seconds, is named by `RankTimeout`; arrays
    are then partly filled.
    """
    flow = _Flow(channel, timeout)
    for message in sorted(messages, key=lambda message: (message.number, message.sender, message.receiver)):
        flow.post(message)
    flow.finish()
    return flow.received_nbytes


@dataclass(frozen=True, slots=True)
class _Posted:
    message: Message
    work: Any
    memory: Bytes
    staged: bool


class _Flow:
    """Messages under way: posted in the order given, and waited for in the same.

    From a rank that failed nothing more is expected, but all others still get what they wait for: so they,
    too, find out which rank it was.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._link = channel
        self._tag = channel.next_tag()
        self._timeout = timeout
        self._posted: deque[_Posted] = deque()
        self._staged_nbytes = 0
        self._lost: dict[int, RankTimeout] = {}
        self.received_nbytes = 0

    def post(self, message: Message) -> None:
        if message.peer in self._lost:
            return
        memory = message.direct()
        staged = memory is None
        nbytes = message.nbytes if staged else 0
        while self._posted and (
            len(self._posted) >= MAX_POSTED or self._staged_nbytes + nbytes > MAX_STAGED_NBYTES
        ):
            self._complete()
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
            if message.outward:
                message.gather(memory)
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
                message.scatter(posted.memory)

    def _lose(self, message: Message, error: RuntimeError) -> None:
        what = (
            f"sending bytes to rank {message.receiver}"
            if message.outward
            else f"receiving bytes that rank {message.sender} has read"
        )
        said = str(error).strip().splitlines() or [type(error).__name__]
        failed = RankTimeout(
            f"{what} failed ({said[0]}). That rank has ended, or was not ready within {self._timeout:g} s. "
            "The state is only partly restored: launch again"
        )
        failed.__cause__ = error
        self._lost[message.peer] = failed
