"""How the ranks of a world come together as a team: meetings that the coordinator opens and closes.

Everything is kept by the store, nothing by the processes, so it does not matter what a rank missed before.
For each purpose there are two numbers, of the last meeting opened and of the last one closed.

1. The coordinator opens the next meeting: a message with a random token.
2. A rank that arrives attends the meeting that is open, or waits for the next to be opened. It answers with
   its card (machine, process, socket).
3. The coordinator closes the meeting when everybody has answered, or its time is over, with one message for
   all: the cards, or who is missing.
4. A rank that answered too late to be on that list goes on to the next meeting, as long as it has time.

Messages of the team go under the token, so no message of an earlier team is ever read.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass

import msgspec

from holdfast.errors import RankFailed
from holdfast.format.checksums import digest
from holdfast.team.mail import Mail, Silence, sendable
from holdfast.team.places import machine, numa_node

GRACE_SECONDS = 2.0
"""How much longer others wait than the coordinator, who tells them how it ended."""
_ADVICE = ". All ranks must call it, with the same path"


class Card(msgspec.Struct, frozen=True):
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
    cards: tuple[Card, ...] = ()
    failure: str = ""
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Met:
    """A meeting that everybody came to."""

    cards: tuple[Card, ...]
    token: str
    keys: tuple[str, ...]
    """What is left of it in the purpose's mail, to be forgotten when nobody needs it any more."""


def purpose_prefix(purpose: str) -> str:
    """Purposes are texts for people, of any length; keys are short."""
    data = purpose.encode()
    return f"{digest(data)}{len(data):x}"


def meet(mail: Mail, board: Board, rank: int, world: int, purpose: str, timeout: float) -> Met:
    """Come together with all ranks; `mail` is that of this purpose."""
    board.say(rank, f"meeting for {purpose}")
    card = Card(socket.gethostname(), machine(), os.getpid(), numa_node())
    if rank == 0:
        met = _hold(mail, board, world, card, purpose, timeout)
    else:
        met = _attend(mail, board, rank, card, purpose, timeout)
    board.say(rank, f"after the meeting for {purpose}")
    return met


class Board:
    """What each rank of the world said last that it is at, for the error messages of others."""

    def __init__(self, mail: Mail) -> None:
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
        return "".join(f"; rank {rank} said last: {what}" for rank, what in some.items())


def name_ranks(ranks: tuple[int, ...]) -> str:
    """``rank 3``, ``ranks 1, 2``, with an end."""
    some = ", ".join(map(str, ranks[:8]))
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {some}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
    )


def _hold(mail: Mail, board: Board, world: int, card: Card, purpose: str, timeout: float) -> Met:
    number = mail.count("opened")
    token = secrets.token_hex(8)
    keys = {f"answer/{number}/{rank}": rank for rank in range(1, world)}
    closing = _Closing(tuple(range(world)), failure=f"rank 0 gave up the meeting for {purpose}", missing=(0,))
    try:
        mail.post(f"open/{number}", msgspec.msgpack.encode(_Opening(token, timeout)))
        answers = {keys[key]: data for key, data in mail.collect(list(keys), timeout).items()}
        missing = tuple(rank for rank in range(1, world) if rank not in answers)
        heard = tuple(sorted([0, *answers]))
        if missing:
            failure = (
                f"{name_ranks(missing)} did not come to the meeting for {purpose} within {timeout:g} s"
                f"{board.describe(missing)}{_ADVICE}"
            )
            closing = _Closing(heard, failure=failure, missing=missing)
            raise RankFailed(failure, ranks=missing)
        cards = (card, *(msgspec.msgpack.decode(answers[rank], type=Card) for rank in range(1, world)))
        closing = _Closing(heard, cards)
    finally:
        # First the number: who reads the message and comes again must not find this meeting open.
        mail.post("closed", b"%d" % number)
        mail.post(f"closed/{number}", msgspec.msgpack.encode(closing))
    return Met(cards, token, (f"open/{number}", f"closed/{number}"))


def _attend(mail: Mail, board: Board, rank: int, card: Card, purpose: str, timeout: float) -> Met:
    end = time.monotonic() + timeout + GRACE_SECONDS
    while True:
        # Read in this order: a meeting that closes in between counts as open, and is found to be closed.
        closed = int(mail.collect(["closed"], 0.0).get("closed", b"0"))
        opened = mail.count("opened", 0)
        number = opened if opened > closed else closed + 1
        try:
            data = mail.read(f"open/{number}", end - time.monotonic())
        except Silence:
            raise RankFailed(
                f"rank 0 did not open the meeting for {purpose} within {timeout:g} s{board.describe((0,))}"
                f"{_ADVICE}",
                ranks=(0,),
            ) from None
        opening = msgspec.msgpack.decode(data, type=_Opening)
        answer = f"answer/{number}/{rank}"
        mail.post(answer, msgspec.msgpack.encode(card))
        try:
            data = mail.read(f"closed/{number}", opening.timeout + GRACE_SECONDS)
        except Silence:
            raise RankFailed(
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
            raise RankFailed(closing.failure, ranks=closing.missing)
        if closing.cards[rank] != card:  # of a process that had this rank before
            continue
        return Met(closing.cards, opening.token, (f"open/{number}", f"closed/{number}"))
