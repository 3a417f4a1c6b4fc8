"""How the ranks of a world come together: meetings that the coordinator opens and closes.

The store keeps everything and the processes nothing, so it does not matter what a rank missed before. When
they have left, nothing of its meeting stays in the store.

1. The coordinator opens a meeting: a message with a random token.
2. A rank that arrives joins the open meeting, or waits for the next one. It answers with its card (machine,
   process, socket).
3. The coordinator closes the meeting when all have answered, or when its time is over. It removes the first
   message, so that no more ranks join, and leaves another for all: the cards, or who is missing.
4. A rank that answered too late goes on to the next meeting, while it has time.

Their messages have the token in their keys, so a message of an earlier meeting is never read.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass

import msgspec

from everystep.errors import RankFailed, RankTimeout
from everystep.format.checksums import digest
from everystep.store.names import sendable
from everystep.store.ranks.machines import machine, numa_node
from everystep.store.ranks.message_store import MessageStore, MessageTimeout

GRACE_SECONDS = 2.0
"""How much longer others wait than the coordinator, who tells them how it ended."""
_ADVICE = ". All ranks must make this call, with the same path"
_OPEN = "open"
_LOOK_SECONDS = 0.05


class MemberInfo(msgspec.Struct, frozen=True):
    """Who a rank is."""

    host: str
    machine: str
    pid: int
    socket: int


class _Opening(msgspec.Struct, frozen=True):
    token: str
    timeout: float


class _Closing(msgspec.Struct, frozen=True):
    heard: tuple[int, ...]
    cards: tuple[MemberInfo, ...] = ()
    failure: str = ""
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Membership:
    """A meeting that everybody came to."""

    cards: tuple[MemberInfo, ...]
    token: str
    keys: tuple[str, ...]
    """What is left of it in the purpose's mail, to be forgotten when nobody needs it any more."""


def purpose_prefix(purpose: str) -> str:
    """Purposes are texts for people, of any length; keys are short."""
    data = purpose.encode()
    return f"{digest(data)}{len(data):x}"


def meet(
    mail: MessageStore, board: StatusKeys, rank: int, world: int, purpose: str, timeout: float
) -> Membership:
    """Come together with all ranks; `mail` is that of this purpose."""
    board.say(rank, f"meeting for {purpose}")
    card = MemberInfo(socket.gethostname(), machine(), os.getpid(), numa_node())
    if rank == 0:
        met = _hold(mail, board, world, card, purpose, timeout)
    else:
        met = _attend(mail, board, rank, card, purpose, timeout)
    board.say(rank, f"after the meeting for {purpose}")
    return met


class StatusKeys:
    """What each rank of the world said last that it is at, for the error messages of others."""

    def __init__(self, mail: MessageStore) -> None:
        self._mail = mail

    def say(self, rank: int, what: str) -> None:
        self._mail.post(f"at/{rank}", sendable(what).encode()[:2000])

    def look(self, ranks: tuple[int, ...]) -> dict[int, str]:
        keys = {f"at/{rank}": rank for rank in ranks}
        found = self._mail.collect(list(keys), 0.0)
        return {keys[key]: data.decode(errors="replace") for key, data in found.items()}

    def describe(self, ranks: tuple[int, ...]) -> str:
        """A sentence part: what these ranks said last, as far as known; empty if nothing is."""
        some = self.look(ranks[:8])
        return "".join(f"; last report of rank {rank}: {what}" for rank, what in some.items())


def name_ranks(ranks: tuple[int, ...]) -> str:
    """``rank 3``, ``ranks 1, 2``, with an end."""
    some = ", ".join(map(str, ranks[:8]))
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {some}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
    )


def _hold(
    mail: MessageStore, board: StatusKeys, world: int, card: MemberInfo, purpose: str, timeout: float
) -> Membership:
    token = secrets.token_hex(8)
    keys = {f"answer/{token}/{rank}": rank for rank in range(1, world)}
    closing = _Closing(
        tuple(range(world)), failure=f"rank 0 abandoned the meeting for {purpose}", missing=(0,)
    )
    try:
        mail.post(_OPEN, msgspec.msgpack.encode(_Opening(token, timeout)))
        answers = {keys[key]: data for key, data in mail.collect(list(keys), timeout).items()}
        missing = tuple(rank for rank in range(1, world) if rank not in answers)
        heard = tuple(sorted([0, *answers]))
        if missing:
            failure = (
                f"{name_ranks(missing)} did not come to the meeting for {purpose} within {timeout:g} s"
                f"{board.describe(missing)}{_ADVICE}"
            )
            closing = _Closing(heard, failure=failure, missing=missing)
            raise RankTimeout(failure, ranks=missing)
        cards = (card, *(msgspec.msgpack.decode(answers[rank], type=MemberInfo) for rank in range(1, world)))
        closing = _Closing(heard, cards)
    finally:
        # In this order: who reads that it is closed and comes again must not find it open.
        if not mail.forget([_OPEN]):
            mail.post(_OPEN, b"")
        mail.post(f"closed/{token}", msgspec.msgpack.encode(closing))
    return Membership(cards, token, (f"closed/{token}",))


def _attend(
    mail: MessageStore, board: StatusKeys, rank: int, card: MemberInfo, purpose: str, timeout: float
) -> Membership:
    end = time.monotonic() + timeout + GRACE_SECONDS
    while True:
        try:
            opening = _find_open(mail, end)
        except MessageTimeout:
            raise RankTimeout(
                f"rank 0 did not open the meeting for {purpose} within {timeout:g} s{board.describe((0,))}"
                f"{_ADVICE}",
                ranks=(0,),
            ) from None
        answer = f"answer/{opening.token}/{rank}"
        mail.post(answer, msgspec.msgpack.encode(card))
        try:
            data = mail.read(f"closed/{opening.token}", opening.timeout + GRACE_SECONDS)
        except MessageTimeout:
            raise RankTimeout(
                f"rank 0 opened the meeting for {purpose} and did not close it within {opening.timeout:g} s"
                f"{board.describe((0,))}",
                ranks=(0,),
            ) from None
        finally:
            mail.forget([answer])
        closing = msgspec.msgpack.decode(data, type=_Closing)
        if rank not in closing.heard:
            continue
        if closing.failure:
            kind = RankFailed if 0 in closing.missing else RankTimeout
            raise kind(closing.failure, ranks=closing.missing)
        if closing.cards[rank] != card:  # of a process that had this rank before
            continue
        return Membership(closing.cards, opening.token, (f"closed/{opening.token}",))


def _find_open(mail: MessageStore, end: float) -> _Opening:
    """The meeting that is open, as soon as there is one; `MessageTimeout` when none is until the end."""
    while not (data := mail.read(_OPEN, end - time.monotonic())):
        # Of a meeting that is over, in a store that cannot remove messages: it does not tell of changes.
        if time.monotonic() >= end:
            raise MessageTimeout("no meeting is open")
        time.sleep(_LOOK_SECONDS)
    return msgspec.msgpack.decode(data, type=_Opening)
