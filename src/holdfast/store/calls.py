"""The messages of ranks that save together: one numbered call per save, and who has to say what in it.

Owns the conversation, not what it is about. In call number n, under keys that begin with n:

1. ``call``, by the coordinator (rank 0), in the training's thread: which step is saved, or that none is.
2. ``plan``, by the coordinator, there too: whether who writes what is planned anew.
3. ``open``, by the coordinator: the directory to write into.
4. ``done/R``, by each other rank: its part is durable, with size and digest; or what went wrong.
5. ``end``, by the coordinator: committed, or what went wrong.

A coordinator that fails says so in every message that is still to come, so nobody waits for one in vain; a
rank that dies is noticed by its silence, after the time-out. A rank that missed calls (it raised before it
came to them) goes on with the first that has not ended. All in all a rank sends one message per save and
reads five, whatever the size of state and world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from holdfast.errors import RankFailed, RanksDisagree, SaveFailed
from holdfast.format.records import PartRef
from holdfast.team import Silence, Team

GRACE_SECONDS: Final = 10.0
"""Others wait so much longer than the coordinator, which itself waits for the slowest."""


class Failure(Struct, frozen=True, tag="failure"):
    """A rank's error: the name of its type, and what it said."""

    rank: int
    kind: str
    message: str


class Call(Struct, frozen=True, tag="call"):
    """What is saved. Not `due`: nothing is. `signal`: the training is to end after it."""

    what: str
    step: int
    id: str = ""
    created: float = 0.0
    due: bool = True
    signal: str | None = None


class Plan(Struct, frozen=True, tag="plan"):
    """Whether views are exchanged anew."""

    anew: bool


class Open(Struct, frozen=True, tag="open"):
    """Where to write. `recycle`: over files that are there. `live`: checkpoints whose shards are to stay."""

    directory: str
    recycle: bool
    live: tuple[str, ...] = ()


class Done(Struct, frozen=True, tag="done"):
    """A rank's share is durable."""

    ref: PartRef
    files: tuple[str, ...]
    nbytes: int
    stored_nbytes: int
    plan: str
    """Of the plan that it was written by: all must have written by the same."""
    tree: bool
    """Whether the part has a tree of its own."""
    values: Mapping[str, str]
    """Digests of its plain values, by place."""


class End(Struct, frozen=True, tag="end"):
    """Committed."""

    path: str
    nbytes: int
    stored_nbytes: int
    leaves: int


_Message = Failure | Call | Plan | Open | Done | End
_decoder: msgspec.json.Decoder[_Message] = msgspec.json.Decoder(_Message)
_M = TypeVar("_M", Call, Plan, Open, End)


class Calls:
    """The calls of a team, as one of its ranks takes part in them."""

    def __init__(self, team: Team, timeout: float) -> None:
        self.team = team
        self.timeout = timeout
        self._next = 0
        self._kept = 0
        """The first call whose messages are still there."""

    def begin(self, what: str, step: int, call: Call | None = None) -> Conversation:
        """Joins the next call, in which the coordinator says `call`. All are to come for the same thing."""
        team = self.team
        team.say(f"{what}, step {step}")
        if call is not None:
            number = self._next
            self._next += 1
            team.mail.post(f"{number}/call", msgspec.json.encode(call))
            if not call.due and number - self._kept >= _MANY:
                self.forget(number - _MANY // 2)
            return Conversation(self, number, call)
        ended = _number(team.mail.read("ended", 0.0)) if team.mail.has("ended") else -1
        number = max(self._next, ended + 1)
        while True:
            self._next = number  # as long as it has not been held, whatever comes next has this number
            talk = Conversation(self, number, Call(what, step))
            talk.call = found = talk.read("call", Call, self.timeout)
            same = (found.what, found.step) == (what, step)
            number += 1
            if same or found.due:
                break
            # A step that was not saved, and that this rank has missed.
        self._next = number
        if not same:
            said = (
                f"rank {team.rank} called {what} with step {step}, rank 0 {found.what} with step {found.step}"
            )
            talk.fail(Failure(team.rank, RanksDisagree.__name__, said))
            raise RanksDisagree(f"{said}. All ranks must save the same steps", ranks=(0, team.rank))
        return talk

    def forget(self, upto: int) -> None:
        """What was said in the calls before number `upto`."""
        names = ["call", "plan", "open", "end", *(f"done/{rank}" for rank in range(1, self.team.world))]
        self.team.mail.forget([f"{old}/{name}" for old in range(self._kept, upto) for name in names])
        self._kept = max(self._kept, upto)


_MANY = 128


class Conversation:
    """One call."""

    def __init__(self, calls: Calls, number: int, call: Call) -> None:
        self.call = call
        self._calls = calls
        self._team = calls.team
        self._timeout = calls.timeout
        self._number = number
        self._unsaid = ["plan", "open", "end"] if self._team.is_coordinator else ["done"]

    @property
    def what(self) -> str:
        return f"{self.call.what} of step {self.call.step}"

    # --- saying

    def say(self, key: str, message: Plan | Open | End) -> None:
        """The coordinator's next message."""
        self._unsaid.remove(key)
        self._post(key, message)

    def done(self, message: Done) -> None:
        self._unsaid.clear()
        self._post(f"done/{self._team.rank}", message)

    def fail(self, failure: Failure) -> None:
        """Tells the others, as far as they still listen. Who is told nothing finds out by the silence."""
        unsaid, self._unsaid = self._unsaid, []
        with contextlib.suppress(RankFailed):  # the store has gone: there is nobody to tell
            for key in unsaid:
                self._post(key if self._team.is_coordinator else f"done/{self._team.rank}", failure)
            if self._team.is_coordinator:
                self.close()

    def failed(self, error: BaseException) -> None:
        self.fail(Failure(self._team.rank, type(error).__name__, str(error)))

    def _post(self, key: str, message: _Message) -> None:
        self._team.mail.post(f"{self._number}/{key}", msgspec.json.encode(message))

    # --- hearing

    def read(self, key: str, kind: type[_M], timeout: float | None = None) -> _M:
        """The coordinator's message of that name. Raises what the coordinator failed with, or its silence."""
        try:
            data = self._team.mail.read(
                f"{self._number}/{key}", self._timeout if timeout is None else timeout
            )
        except Silence:
            raise self._silence([0]) from None
        message = _decoder.decode(data)
        if isinstance(message, Failure):
            self._unsaid = []
            raise error_of(message, self.what)
        assert isinstance(message, kind), f"{key} is a {type(message).__name__}"
        return message

    def end(self) -> End:
        """What became of it."""
        return self.read("end", End, self._timeout + GRACE_SECONDS)

    def collect(self) -> list[Done]:
        """What all others say, in the order of ranks. Raises when one failed, or was not heard of in time."""
        ranks = range(1, self._team.world)
        keys = {f"{self._number}/done/{rank}": rank for rank in ranks}
        found = self._team.mail.collect(list(keys), self._timeout)
        messages = {keys[key]: _decoder.decode(data) for key, data in found.items()}
        failures = [message for message in messages.values() if isinstance(message, Failure)]
        if failures:
            raise error_of(min(failures, key=lambda failure: failure.rank), self.what)
        silent = [rank for rank in ranks if rank not in messages]
        if silent:
            raise self._silence(silent)
        return [message for _, message in sorted(messages.items()) if isinstance(message, Done)]

    def close(self) -> None:
        """The coordinator's last word: the call has ended, and what was said in earlier ones is forgotten."""
        self._team.mail.post("ended", str(self._number).encode())
        self._calls.forget(self._number)  # everybody who takes part in this one has read all of those before

    def _silence(self, ranks: Sequence[int]) -> RankFailed:
        where = self._team.whereabouts(ranks)
        some = ", ".join(
            f"rank {rank} ({where[rank]})" if rank in where else f"rank {rank}" for rank in ranks[:8]
        )
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return RankFailed(
            f"{self.what} failed: nothing heard from {some}{more} within {self._timeout:g} s; it has ended, "
            "hangs, or does not save this step. Earlier checkpoints are untouched",
            ranks=ranks,
        )


def error_of(failure: Failure, what: str) -> RankFailed | RanksDisagree:
    """What a rank raises when another one has failed."""
    if failure.kind == RanksDisagree.__name__:
        return RanksDisagree(f"{what} failed: {failure.message}", ranks=(failure.rank,))
    return RankFailed(
        f"{what} failed on rank {failure.rank}: {failure.kind}: {failure.message}", ranks=(failure.rank,)
    )


def _number(data: bytes) -> int:
    try:
        return int(data)
    except ValueError as error:
        raise SaveFailed(f"another rank says nonsense: {data[:40]!r}") from error
