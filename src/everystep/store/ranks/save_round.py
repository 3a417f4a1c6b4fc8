"""The messages of ranks that save together: what is saved, who writes what, and what comes of it.

Owns what is said in a save, and the order of the saves of a Checkpointer; `meeting` carries the messages. A
save has these:

1. From the coordinator (rank 0), in the training's thread: which step to save, or that none is due.
2. From each other rank, in the same thread: which plan it can use for its state (`Ready`).
3. From the coordinator, when all are ready: whether all ranks make a new plan (`Plan`).
4. From the coordinator: the directory to write into (`Opened`).
5. From each other rank: its part is durable, with size and digest (`ShareWritten`).
6. From the coordinator: it is committed (`Committed`).

A save costs a rank at most ten small requests to the store, whatever the size of state and world.

`everystep.save` is one meeting. The saves of a Checkpointer are numbered (`SaveLine`), each is a meeting that
needs no opening. Ranks that missed one, or made one twice, meet again by the step. A rank ahead of the
coordinator says in the older save that it does not take part, and goes on to the next. A rank behind the
coordinator raises, and leaves the save for later. A rank that comes to a save that has already failed learns
why.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from everystep.errors import RankFailed, RanksDisagree, SaveFailed
from everystep.store.commit.round import Committed, Opened, Round, ShareWritten
from everystep.store.ranks.meeting import Meeting, open_meeting
from everystep.store.ranks.message_store import MessageTimeout
from everystep.store.ranks.transport import Transport

STRAGGLER_SECONDS: Final = 5.0
"""What others write after a failure is removed once they have ended. If a rank takes longer, the next save
removes it."""

_MANY: Final = 4096
"""Saves that were not due: the messages of older ones are removed. A rank may be so many steps behind the
coordinator, where the training itself does not keep them together."""

_AT_ONCE: Final = 16
"""So many of them at a time: the training waits meanwhile."""

_SAFE = ". Earlier checkpoints are untouched"
_T = TypeVar("_T")


class SaveCall(Struct, frozen=True):
    """What is saved. Not `due`: nothing is. `signal`: the training is to end after it."""

    what: str
    step: int
    id: str = ""
    created: float = 0.0
    due: bool = True
    signal: str | None = None

    @property
    def name(self) -> str:
        return f"{self.what} of step {self.step}"


class Ready(Struct, frozen=True):
    """A rank is ready to write. `plan`: the fingerprint of the plan that it has for leaves like its own;
    empty if it has none. `structure`: a digest of the structure of its state."""

    plan: str
    structure: str
    settings: str = ""
    """Options that must be equal on all ranks."""
    has_volumes: bool = False


class Plan(Struct, frozen=True):
    """Whether all ranks make a new plan, and whether any of them has volumes."""

    replan: bool
    has_volumes: bool = False


def agree_on_plan(meeting: Meeting, ready: Ready, decide: Callable[[Sequence[Ready]], Plan]) -> Plan:
    """What the coordinator decides when all ranks are ready to write. In the training's thread."""

    def decided(heard: Sequence[bytes]) -> bytes:
        return _encode(decide([_decode(data, Ready) for data in heard]))

    plan: Plan = _decode(meeting.agree(_encode(ready), decided), Plan)
    return plan


class SaveRound(Round):
    """One save of several ranks."""

    def __init__(
        self, meeting: Meeting, call: SaveCall | None = None, line: SaveLine | None = None, number: int = 0
    ) -> None:
        """Without a `call`, it is the subject of the meeting."""
        self.rank, self.world = meeting.rank, meeting.world
        self.meeting = meeting
        meeting.note = _SAFE
        self.number = number
        self._call = call
        self._line = line
        self._asked = False
        """Whether the coordinator has asked for what the others have written."""

    @property
    def call(self) -> SaveCall:
        """What the coordinator saves."""
        found: SaveCall = _decode(self.meeting.subject, SaveCall) if self._call is None else self._call
        return found

    @property
    def rejected(self) -> bool:
        return self.meeting.rejected

    # --- the commit (`Round`)

    def open(self, opened: Opened | None) -> Opened:
        return self._tell(opened, Opened)

    def collect(self, written: ShareWritten) -> list[ShareWritten]:
        if self.rank == 0:
            self._asked = True
            return [written, *(_decode(data, ShareWritten) for data in self.meeting.gather())]
        self.meeting.say(_encode(written))
        return []

    def end(self, committed: Committed | None) -> Committed:
        """What the coordinator says last. It is durable: a rank that cannot be told finds out."""
        if committed is None:
            self.meeting.note = f". It is not known whether the save was committed{_SAFE}"
            return self._tell(None, Committed)
        with contextlib.suppress(RankFailed):
            self._tell(committed, Committed)
            if self._line is not None:
                self._line.ended(self)
        return committed

    def failed(self, error: BaseException, *, maybe_committed: bool = False) -> None:
        self.meeting.failed(error, maybe_committed=maybe_committed)

    def check(self) -> None:
        self.meeting.check()

    def await_others(self) -> None:
        self.meeting.await_others(min(STRAGGLER_SECONDS, self.meeting.timeout), asked=self._asked)

    def _tell(self, message: _T | None, kind: type[_T]) -> _T:
        found: _T = _decode(self.meeting.tell(None if message is None else _encode(message)), kind)
        return found


def open_save(transport: Transport, timeout: float, call: SaveCall) -> SaveRound:
    """A save that is one meeting. The coordinator decides what `call` says, and the others check the step."""
    meeting = open_meeting(transport, call.what, timeout, _encode(call))
    found = SaveRound(meeting)
    if found.call.step != call.step:
        error = _disagreement(meeting.rank, call, found.call)
        found.failed(error)
        meeting.leave()
        raise error
    return found


class SaveLine:
    """The saves of a Checkpointer, numbered, as one of its ranks takes part in them.

    When all ranks have written their shares of a save, all have left the saves before it: then the
    coordinator removes the messages of those.
    """

    def __init__(self, meeting: Meeting) -> None:
        """`meeting`: the one of the Checkpointer, to which the keys of its saves belong."""
        self._meeting = meeting
        self._lock = threading.Lock()
        self._next = 0
        self._not_due: list[int] = []
        self._due: list[SaveRound] = []
        self._ahead = -1
        """The save that this rank has found to be ahead of its own."""

    @property
    def next(self) -> int:
        """The number of the next save."""
        return self._next

    def begin(self, what: str, step: int, call: SaveCall | None = None) -> SaveRound:
        """Joins the next save, in which the coordinator says `call`. All are to come for the same step."""
        self._meeting.transport.say(f"{what}, step {step}")
        return self._join(what, step) if call is None else self._open(call)

    def go_on_from(self, number: int) -> None:
        """By all ranks when they start again, perhaps at an older step: saves before this one are over.

        Their messages stay, for ranks that are still on their way through them.
        """
        self._next = max(self._next, number)
        self._ahead = -1

    def ended(self, save_round: SaveRound) -> None:
        """By the coordinator: all ranks have taken part in this save to the end."""
        with self._lock:
            keys = [f"{self._path(number)}/told/1" for number in self._not_due if number < save_round.number]
            over = [earlier for earlier in self._due if earlier.number < save_round.number]
            keys += [key for earlier in over for key in earlier.meeting.all_keys()]
            self._not_due = [number for number in self._not_due if number > save_round.number]
            # The next save may have been opened already, while this one was written in the background.
            self._due = [other for other in self._due if other.number >= save_round.number]
        self._meeting.transport.messages.forget(keys)

    def keys(self) -> list[str]:
        """The keys of all messages that are still there, when there will be no more saves."""
        with self._lock:
            keys = [f"{self._path(number)}/told/1" for number in self._not_due]
            keys += [key for save_round in self._due for key in save_round.meeting.all_keys()]
        return [f"{self._meeting.path}/kept", *keys]

    def _path(self, number: int) -> str:
        return f"{self._meeting.path}/{number}"

    def _round(self, number: int, call: SaveCall) -> SaveRound:
        meeting = self._meeting
        made = Meeting(
            meeting.transport, call.name, meeting.timeout, self._path(number), membership=meeting.membership
        )
        return SaveRound(made, call, self, number)

    def _open(self, call: SaveCall) -> SaveRound:
        number, unneeded = self._next, list[int]()
        self._next += 1
        found = self._round(number, call)
        with self._lock:
            if call.due:
                self._due.append(found)
            else:
                self._not_due.append(number)
            if len(self._not_due) > _MANY + _AT_ONCE:
                unneeded, self._not_due = self._not_due[:_AT_ONCE], self._not_due[_AT_ONCE:]
        if unneeded:
            # First this, or a rank that is behind would wait for what is no longer there.
            self._meeting.messages.post("kept", b"%d" % (unneeded[-1] + 1))
            self._meeting.transport.messages.forget(f"{self._path(other)}/told/1" for other in unneeded)
        found.meeting.tell(_encode(call))
        return found

    def _join(self, what: str, step: int) -> SaveRound:
        end = time.monotonic() + self._meeting.timeout
        mine = SaveCall(what, step)
        older: SaveCall | None = None
        while True:
            found = self._look(mine, end)
            if found is None:
                if older is not None:
                    raise _disagreement(self._meeting.rank, mine, older)
                raise self._round(self._next, mine).meeting.silence([0])
            call = found.call
            told, self._ahead = self._ahead == self._next, -1
            # If this rank has found it to be ahead, and it has failed since, it is of no concern.
            over = call.due and (told or call.step != step) and self._is_over(found)
            if call.step > step and not (told and over):
                self._ahead = self._next
                raise _disagreement(self._meeting.rank, mine, call)
            self._next += 1
            if call.step == step and not (told and over):
                return found
            if call.due and not over:
                older = call
                found.failed(_disagreement(self._meeting.rank, mine, call))

    def _look(self, mine: SaveCall, end: float) -> SaveRound | None:
        """The next save that there is, as the coordinator has called it; None if there is none in time."""
        messages = self._meeting.messages
        while True:
            key = f"{self._next}/told/1"
            found = messages.collect([key, "kept"], 0.0)
            if key not in found and "kept" in found and int(found["kept"]) > self._next:
                self._next = int(found["kept"])
                continue
            if key not in found:
                try:
                    found[key] = messages.read(key, end - time.monotonic())
                except MessageTimeout:
                    return None
            made = self._round(self._next, mine).meeting
            return SaveRound(made, _decode(made.take(found[key]), SaveCall), self, self._next)

    def _is_over(self, save_round: SaveRound) -> bool:
        """Whether a save has failed before this rank came to it."""
        return save_round.meeting.messages.has("told/2")


def _disagreement(rank: int, mine: SaveCall, leading: SaveCall) -> RanksDisagree:
    return RanksDisagree(
        f"rank {rank} called {mine.what} with step {mine.step}, but rank 0 called {leading.what} with "
        f"step {leading.step}. All ranks must save the same steps",
        ranks=(0, rank),
    )


def _encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise SaveFailed(f"cannot decode a message of another rank: {error}") from error
