"""The messages of ranks that save together: one numbered call per save, and who says what in it.

Owns the conversation, not its subject. Call number n has these messages, under keys that begin with n:

1. ``call``, from the coordinator (rank 0), in the training's thread: which step to save, or that none is due.
2. ``here/R``, from each other rank, in the same thread: which plan it can use for its state.
3. ``plan``, from the coordinator, when all are here: whether all ranks make a new plan.
4. ``open``, from the coordinator: the directory to write into.
5. ``done/R``, from each other rank: its part is durable, with size and digest; or what went wrong.
6. ``end``, from the coordinator: committed, or what went wrong.

A rank that fails says so in all its remaining messages, so no rank waits for them in vain. A rank that dies
is noticed by its silence, after the time-out. A save costs a rank at most ten small requests to the store,
whatever the size of state and world.

Ranks that missed a call, or made one twice, meet again by the step. A rank ahead of the coordinator says in
the older call that it does not take part, and goes on to the next. A rank behind the coordinator raises, and
leaves the call for later. A rank that comes to a call that has already failed learns why.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from everystep.errors import RankFailed, RanksDisagree, RankTimeout, SaveFailed
from everystep.store.commit.round import Committed, Opened, Round, ShareWritten
from everystep.store.ranks.errors import RankError, worst
from everystep.store.ranks.message_store import MessageTimeout
from everystep.store.ranks.transport import Transport

GRACE_SECONDS: Final = 10.0
"""Others wait so much longer than the coordinator, which itself waits for the slowest; but not more than
twice the time-out."""

STRAGGLER_SECONDS: Final = 5.0
"""What others write after a failure is removed once they have ended. Who takes longer leaves it for the next
save."""

_MANY: Final = 4096
"""Calls of which nobody was asked to say anything: their messages are forgotten when there are more. A rank
may be so many steps behind the coordinator, where the training itself does not keep them together."""

_AT_ONCE: Final = 16
"""So many of them at a time: the training waits meanwhile."""


class Call(Struct, frozen=True, tag="call"):
    """What is saved. Not `due`: nothing is. `signal`: the training is to end after it."""

    what: str
    step: int
    id: str = ""
    created: float = 0.0
    due: bool = True
    signal: str | None = None


class Ready(Struct, frozen=True, tag="here"):
    """A rank is ready to write. `plan`: the fingerprint of the plan that it has for leaves like its own;
    empty if it has none. `structure`: a digest of the structure of its state."""

    plan: str
    structure: str


class Plan(Struct, frozen=True, tag="plan"):
    """Whether views are exchanged anew."""

    anew: bool


_Message = RankError | Call | Ready | Plan | Opened | ShareWritten | Committed
_decoder: msgspec.json.Decoder[_Message] = msgspec.json.Decoder(_Message)
_M = TypeVar("_M", Call, Plan, Opened, Committed)
_Said = TypeVar("_Said", Ready, ShareWritten)


class Calls:
    """The calls of all ranks, as one of its ranks takes part in them."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport = transport
        self.timeout = timeout
        self.grace = min(GRACE_SECONDS, timeout)
        self._lock = threading.Lock()
        self._next = 0
        self._kept = 0
        """The first call whose messages are still there."""
        self._ended = -1
        self._due: set[int] = set()
        self._under_way: set[int] = set()
        self._ahead = -1
        """The call that this rank was told of before it got there."""

    def begin(self, what: str, step: int, call: Call | None = None) -> SaveRound:
        """Joins the next call, in which the coordinator says `call`. All are to come for the same thing."""
        self.transport.say(f"{what}, step {step}")
        return self._join(what, step) if call is None else self._hold(call)

    @property
    def next(self) -> int:
        """The number of the next call."""
        with self._lock:
            return self._next

    def go_on_from(self, number: int) -> None:
        """By everybody, when all begin anew, perhaps at an older step: calls before this one are over.

        Their messages stay, for ranks that are still on their way through them.
        """
        with self._lock:
            self._next = max(self._next, number)
            self._ahead = -1
            self._under_way = {other for other in self._under_way if other >= number}

    def close(self, number: int, *, heard: bool) -> None:
        """By the coordinator: a call has ended. `heard`: all have taken part in it to the end, and so have
        read all that was said before it.
        """
        with self._lock:
            self._under_way = {other for other in self._under_way if other > number}
            unneeded = self._end(number, number if heard else 0)
        self.transport.mail.forget(unneeded)

    def rest(self) -> list[str]:
        """The keys of all messages that are still there, when there will be no more calls."""
        with self._lock:
            return ["ended", *self._keys(self._kept, self._next)]

    def _keys(self, first: int, stop: int) -> list[str]:
        """Of the messages of these calls; of one in which nothing was due, there is but one."""
        names = ["plan", "open", "end"]
        names += [f"{name}/{rank}" for name in ("here", "done") for rank in range(1, self.transport.world)]
        due = [number for number in range(first, stop) if number in self._due]
        keys = [f"{number}/call" for number in range(first, stop)]
        return keys + [f"{number}/{name}" for number in due for name in names]

    def _hold(self, call: Call) -> SaveRound:
        with self._lock:
            number = self._next
            self._next += 1
            unneeded: list[str] = []
            if number - self._kept >= _MANY + _AT_ONCE:
                upto = min([number - _MANY, *self._under_way])
                unneeded = self._end(upto - 1, upto)
            if call.due:
                self._due.add(number)
                self._under_way.add(number)
        self.transport.mail.forget(unneeded)
        self.transport.mail.post(f"{number}/call", msgspec.json.encode(call))
        return SaveRound(self, number, call)

    def _join(self, what: str, step: int) -> SaveRound:
        mail = self.transport.mail
        ended, kept = _numbers(mail.read("ended", 0.0)) if mail.has("ended") else (-1, 0)
        self._next = max(self._next, kept)
        end = time.monotonic() + self.timeout
        older: Call | None = None
        while True:
            over = self._next <= ended
            save_round = SaveRound(self, self._next, Call(what, step))
            try:
                found = save_round.hear("call", Call, 0.0 if over else end - time.monotonic())
            except MessageTimeout:
                if over:  # forgotten meanwhile
                    self._next += 1
                    continue
                if older is not None:
                    raise self._disagreement(save_round.call, older) from None
                raise save_round.silence([0]) from None
            told, self._ahead = self._ahead == self._next, -1
            if found.step > step and not (told and over):
                self._ahead = self._next
                raise self._disagreement(save_round.call, found)
            self._next += 1
            if found.step == step and not (told and over):
                save_round.call = found
                if not (found.due and over):
                    return save_round
                save_round.check()  # raises what it failed with
            # One that this rank has missed.
            if found.due and not over:
                older = found
                save_round.failed(self._disagreement(save_round.call, found))

    def _disagreement(self, mine: Call, leading: Call) -> RanksDisagree:
        rank = self.transport.rank
        return RanksDisagree(
            f"rank {rank} called {mine.what} with step {mine.step}, but rank 0 called {leading.what} with "
            f"step {leading.step}. All ranks must save the same steps",
            ranks=(0, rank),
        )

    def _end(self, number: int, unneeded: int) -> list[str]:
        """Tells that the calls up to a number have ended; the messages of those before `unneeded`, which are
        to be forgotten: by the caller, so that nobody waits for the lock meanwhile.
        """
        first, self._kept = self._kept, max(self._kept, unneeded)
        self._ended = max(self._ended, number)
        # First this, or who is behind would wait for what is no more.
        self.transport.mail.post("ended", f"{self._ended} {self._kept}".encode())
        found = self._keys(first, self._kept)
        self._due = {due for due in self._due if due >= self._kept}
        return found


class SaveRound(Round):
    """One call."""

    def __init__(self, calls: Calls, number: int, call: Call) -> None:
        self.rank, self.world = calls.transport.rank, calls.transport.world
        self.call = call
        self.number = number
        self.rejected = False
        self._calls = calls
        self._transport = calls.transport
        self._unsaid = ["plan", "open", "end"] if self._transport.is_coordinator else ["here", "done"]

    @property
    def what(self) -> str:
        return f"{self.call.what} of step {self.call.step}"

    # --- the commit (`Round`)

    def open(self, opened: Opened | None) -> Opened:
        if opened is None:
            return self.read("open", Opened)
        self.say("open", opened)
        return opened

    def collect(self, written: ShareWritten) -> list[ShareWritten]:
        if self.rank == 0:
            return [written, *self._collect("done", ShareWritten)]
        self._unsaid.clear()
        self._post(f"done/{self.rank}", written)
        return []

    def end(self, committed: Committed | None) -> Committed:
        """What the coordinator says last. It is durable: a rank that cannot be told finds out."""
        if committed is None:
            return self.read("end", Committed)
        with contextlib.suppress(RankFailed):
            self.say("end", committed)
            self._calls.close(self.number, heard=True)
        return committed

    # --- saying

    def say(self, key: str, message: Plan | Opened | Committed) -> None:
        """The coordinator's next message."""
        self._unsaid.remove(key)
        self._post(key, message)

    def here(self, message: Ready) -> None:
        self._unsaid.remove("here")
        self._post(f"here/{self._transport.rank}", message)

    def failed(self, error: BaseException, *, maybe_committed: bool = False) -> None:
        """Tells the others, as far as they still listen. Who is told nothing finds out by the silence."""
        unsaid, self._unsaid = self._unsaid, []
        failure = RankError.of(self._transport.rank, error, maybe_committed=maybe_committed)
        with contextlib.suppress(RankFailed):  # the store has gone: there is nobody to tell
            for key in unsaid:
                self._post(
                    key if self._transport.is_coordinator else f"{key}/{self._transport.rank}", failure
                )
            if self._transport.is_coordinator and unsaid:
                # Others may still be at the end of the call before.
                self._calls.close(self.number, heard=False)

    def _post(self, key: str, message: _Message) -> None:
        self._transport.mail.post(f"{self.number}/{key}", msgspec.json.encode(message))

    # --- hearing

    def read(self, key: str, kind: type[_M]) -> _M:
        """The coordinator's message of that name. Raises what the coordinator failed with, or its silence."""
        try:
            return self.hear(key, kind, self._calls.timeout + self._calls.grace)
        except MessageTimeout:
            raise self.silence([0], committed=None if key == "end" else False) from None

    def hear(self, key: str, kind: type[_M], timeout: float) -> _M:
        """As `read`, but silence is for the caller to deal with."""
        message = _decoder.decode(self._transport.mail.read(f"{self.number}/{key}", timeout))
        if isinstance(message, RankError):
            self._unsaid = []
            self.rejected = not message.maybe_committed
            raise message.error(self.what)
        assert isinstance(message, kind), f"{key} is a {type(message).__name__}"
        return message

    def check(self) -> None:
        """Raises what the coordinator failed with, if it has said so."""
        with contextlib.suppress(MessageTimeout):
            self.hear("end", Committed, 0.0)

    def await_others(self) -> None:
        """By the coordinator, after it has failed: returns when nobody is at work any more, or soon."""
        ranks = range(1, self._transport.world)
        with contextlib.suppress(RankFailed):
            seconds = min(STRAGGLER_SECONDS, self._calls.timeout)
            self._transport.mail.collect([f"{self.number}/done/{rank}" for rank in ranks], seconds)

    def gather(self) -> list[Ready]:
        """By the coordinator, in the training's thread: returns when all others are ready to write."""
        return self._collect("here", Ready)

    def _collect(self, key: str, kind: type[_Said]) -> list[_Said]:
        """What all others say, in the order of ranks. Raises when one failed, or was not heard of in time."""
        ranks = range(1, self._transport.world)
        keys = {f"{self.number}/{key}/{rank}": rank for rank in ranks}
        found = self._transport.mail.collect(list(keys), self._calls.timeout)
        messages = {keys[key]: _decoder.decode(data) for key, data in found.items()}
        failures = [message for message in messages.values() if isinstance(message, RankError)]
        if failures:
            raise worst(failures).error(self.what)
        silent = [rank for rank in ranks if rank not in messages]
        if silent:
            raise self.silence(silent)
        return [message for _, message in sorted(messages.items()) if isinstance(message, kind)]

    def silence(self, ranks: Sequence[int], *, committed: bool | None = False) -> RankTimeout:
        """The error when ranks were not heard of. `committed` None: that is not known."""
        where = self._transport.whereabouts(ranks[:8])
        some = ", ".join(
            f"rank {rank} (last at: {where[rank]})" if rank in where else f"rank {rank}" for rank in ranks[:8]
        )
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        fate = "" if committed is False else ". It is not known whether the save was committed"
        return RankTimeout(
            f"{self.what} failed: nothing heard from {some}{more} within {self._calls.timeout:g} s; it has "
            f"ended, hangs, or does not save this step{fate}. Earlier checkpoints are untouched",
            ranks=ranks,
        )


def _numbers(data: bytes) -> tuple[int, int]:
    try:
        ended, kept = map(int, data.split())
    except ValueError as error:
        raise SaveFailed(f"cannot decode a message of another rank: {data[:40]!r}") from error
    return ended, kept
