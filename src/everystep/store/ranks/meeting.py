"""What the ranks say to each other for one thing: a save, a load, a restore, a comparison.

All ranks make the same calls of a `Meeting`, in the same order. Rank 0 coordinates: it collects what the
others say, decides, and tells them. No call is a collective, so any thread may make it.

- **Opening.** The coordinator leaves an opening under the subject of the meeting, with a random token. A rank
  that arrives answers it, or waits for it. When all have answered, or the time is over, the coordinator
  removes the opening, so that no more ranks join. A rank that answered too late goes on to the next opening,
  while it has time. The store keeps everything and the processes nothing, so it does not matter what a rank
  missed before.
- **Numbering.** The keys of a meeting begin with its token. The nth thing that the coordinator tells is
  ``told/n``, the nth thing that rank R says is ``said/n/R``. A message of another meeting is never read.
- **Membership.** In its first message, each rank says who it is and which membership it knows. The answer
  has the members, unless all ranks know the same.
- **Time-outs.** The coordinator waits `timeout` seconds for the others. They wait longer for it
  (`GRACE_SECONDS`), because it may still be waiting for the slowest rank.
- **Failures.** A rank that fails says so in place of its next message. The coordinator passes the failure on
  in place of its own next message. A rank that dies is noticed by its silence, after the time-out. After a
  failure the meeting is over.
- **Clean-up.** The coordinator leaves last: it waits a few seconds until the others have heard how the
  meeting ended, because its process may host the store. Then it removes all messages. If a rank takes longer,
  the coordinator removes them in a later meeting.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from everystep.errors import RankFailed, RankTimeout
from everystep.format.checksums import digest
from everystep.store.names import sendable
from everystep.store.ranks.errors import RankError, raise_worst, worst
from everystep.store.ranks.membership import Member, Membership, this_member
from everystep.store.ranks.message_store import MessageTimeout
from everystep.store.ranks.transport import Subgroup, Transport

GRACE_SECONDS: Final = 10.0
"""Extra wait for followers, at most: the coordinator may still be waiting for the slowest rank."""
LEAVING_SECONDS: Final = 5.0
"""How long the coordinator waits for the others to leave."""

_LOOK_SECONDS = 0.05
_SHOWN = 8
_ADVICE = ". All ranks must make it, with the same path"


class _Opening(msgspec.Struct, frozen=True):
    path: str
    subject: bytes


class _First(msgspec.Struct, frozen=True):
    """What a rank says first. `known`: the token of the membership that it knows."""

    member: Member
    known: str
    data: bytes


class _Answer(msgspec.Struct, frozen=True):
    """What the coordinator answers to that. `members`: if some rank does not know this membership."""

    membership: str
    data: bytes
    members: tuple[Member, ...] = ()


class _Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message: data, or why there is none."""

    data: bytes = b""
    failure: RankError | None = None


class _Table(msgspec.Struct, frozen=True):
    """Each different message of an exchange, by its digest, and the ranks that have it."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]


class Meeting:
    """One meeting, as one rank takes part in it; one thread at a time."""

    def __init__(
        self,
        transport: Transport,
        what: str,
        timeout: float,
        path: str,
        *,
        opening: str = "",
        membership: Membership | None = None,
    ) -> None:
        """`path`: the beginning of its keys. `opening`: the key of its opening, if it is to be answered yet;
        `membership`: without an opening, that of the meeting which this one is a part of."""
        self.transport = transport
        self.what = what
        self.timeout = timeout
        self.path = path
        self.messages = transport.messages.under(path)
        self.subject = b""
        """What the coordinator opened it with."""
        self.other_keys: list[str] = []
        """Of messages that are not numbered, to be removed with those that are."""
        self.rejected = False
        """Whether the coordinator has failed and said that nothing was committed."""
        self.is_new = False
        """Whether the ranks have learned in this meeting who they are."""
        self.note = ""
        """What a person needs to know besides, if a rank is silent."""
        self._opening = opening
        self._membership = membership
        self._told = 0
        self._said = 0
        self._over = False

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    @property
    def is_coordinator(self) -> bool:
        return self.transport.is_coordinator

    @property
    def subgroup(self) -> Subgroup | None:
        return self.transport.subgroup

    @property
    def membership(self) -> Membership:
        """The ranks that have met."""
        assert self._membership is not None, "the ranks have not met yet"
        return self._membership

    @property
    def grace(self) -> float:
        return min(GRACE_SECONDS, self.timeout)

    # --- for all ranks

    def tell(self, data: bytes | None) -> bytes:
        """The coordinator's data, on every rank; the others give None. The coordinator does not wait."""
        if not self.is_coordinator:
            return self._hear()
        if data is None:
            raise ValueError("the coordinator must give the data to send")
        self._tell(_Told(data))
        return data

    def agree(self, mine: bytes, decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """What the coordinator decides after hearing all ranks, on every rank.

        `decide` is called on the coordinator only, with the data of all by rank. If it raises, or a rank
        failed or is silent, all ranks raise.
        """
        if self._opening:
            return self._agree_first(mine, decide)
        if not self.is_coordinator:
            self.say(mine)
            return self._hear()
        try:
            return self.tell(decide([mine, *self.gather()]))
        except BaseException as error:
            self.failed(error)
            raise

    def meet(self) -> None:
        """Waits until all ranks have come."""
        self.agree(b"", lambda heard: b"")

    def exchange(self, mine: bytes) -> dict[bytes, tuple[int, ...]]:
        """Every different message and the ranks that have it, ascending; in the order of their lowest rank.

        Each rank says a digest, and reads one table and the messages that differ from its own. Equal messages
        travel once, and not at all if those of all ranks are equal.
        """
        name = f"{digest(mine)}{len(mine):x}"
        table = _decode(self.agree(name.encode(), _tabulate), _Table)
        if [other for other, _ in table.entries] == [name]:
            return {mine: table.entries[0][1]}
        keys = {f"blob/{self._told}/{other}": other for other, _ in table.entries}
        self.other_keys += keys
        if any(ranks[0] == self.rank for _, ranks in table.entries):
            self.messages.post(f"blob/{self._told}/{name}", mine)
        wanted = [key for key, other in keys.items() if other != name]
        found = {keys[key]: data for key, data in self.messages.collect(wanted, self.timeout).items()}
        found[name] = mine
        silent = [ranks[0] for other, ranks in table.entries if other not in found]
        if silent:
            raise self.silence(silent)
        for other, ranks in table.entries:
            if f"{digest(found[other])}{len(found[other]):x}" != other:
                raise RankFailed(f"rank {ranks[0]} sent different data than it announced", ranks=ranks[:1])
        return {found[other]: ranks for other, ranks in table.entries}

    def deliver(self, messages: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Messages for single ranks: those that this one got, with their senders, each sender's in order."""
        number, counts = self._told + 1, dict[int, int]()
        for receiver, data in messages:
            counts[receiver] = nth = counts.get(receiver, 0) + 1
            self.messages.post(f"mail/{number}/{receiver}/{self.rank}.{nth}", data)
        told = self.agree(
            msgspec.msgpack.encode(counts),
            lambda heard: msgspec.msgpack.encode([_decode(data, dict[int, int]) for data in heard]),
        )
        keys: dict[str, int] = {}
        for sender, sent in enumerate(_decode(told, list[dict[int, int]])):
            for receiver, count in sent.items():
                for nth in range(1, count + 1):
                    key = f"mail/{number}/{receiver}/{sender}.{nth}"
                    self.other_keys.append(key)
                    if receiver == self.rank:
                        keys[key] = sender
        found = self.messages.collect(list(keys), self.timeout)
        silent = sorted({sender for key, sender in keys.items() if key not in found})
        if silent:
            raise self.silence(silent)
        return [(sender, found[key]) for key, sender in keys.items()]

    def settle(self, error: Exception | None) -> None:
        """Returns on all ranks if none has an error; raises on all if one has. The meeting goes on then."""
        mine = None if error is None else RankError.of(self.rank, error)
        if not self.is_coordinator:
            self._say(_Told(failure=mine))
            found = self._next_told().failure
        else:
            _, failures, silent = self._collect()
            failures += [] if mine is None else [mine]
            if silent and not failures:
                silence = self.silence(silent)
                self.failed(silence)
                raise silence
            found = worst(failures) if failures else None
            self._tell(_Told(failure=found))
        if found is not None:
            raise_worst([found], error, self.what)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A block that succeeds on all ranks or on none."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.settle(error)

    # --- for one side

    def say(self, data: bytes) -> None:
        """By a rank other than the coordinator: its next message."""
        self._say(_Told(data))

    def gather(self) -> list[bytes]:
        """By the coordinator: the next message of each other rank, in their order. Waits for all of them."""
        heard, failures, silent = self._collect()
        if failures:
            raise worst(failures).error(self.what)
        if silent:
            raise self.silence(silent)
        return [heard[rank].data for rank in range(1, self.world)]

    def _collect(self) -> tuple[dict[int, _Told], list[RankError], list[int]]:
        """The next message of each other rank, the failures among them, and the ranks that are silent."""
        self._said += 1
        ranks = range(1, self.world)
        keys = {f"said/{self._said}/{rank}": rank for rank in ranks}
        found = self.messages.collect(list(keys), self.timeout)
        heard = {keys[key]: _decode(data, _Told) for key, data in found.items()}
        failures = [message.failure for message in heard.values() if message.failure is not None]
        return heard, failures, [rank for rank in ranks if rank not in heard]

    def await_others(self, seconds: float, *, asked: bool) -> None:
        """By the coordinator, after it has failed: waits for the next message of the others.

        `asked`: for the one that it has gathered last, which may not be there from all of them.
        """
        keys = [f"said/{self._said + (not asked)}/{rank}" for rank in range(1, self.world)]
        with contextlib.suppress(RankFailed):
            self.messages.collect(keys, seconds)

    def check(self) -> None:
        """By another rank: raises the coordinator's failure, if that is what it said next."""
        with contextlib.suppress(MessageTimeout):
            self.take(self.messages.read(f"told/{self._told + 1}", 0.0))

    # --- the end

    def failed(self, error: BaseException, *, maybe_committed: bool = False) -> None:
        """Says that this rank has failed, unless the meeting is over already."""
        if self._over:
            return
        self._over = True
        failure = _Told(failure=RankError.of(self.rank, error, maybe_committed=maybe_committed))
        key = f"told/{self._told + 1}" if self.is_coordinator else f"said/{self._said + 1}/{self.rank}"
        with contextlib.suppress(RankFailed):  # the store is gone, so no rank can hear it
            if self.is_coordinator and self._opening and isinstance(error, Exception):
                self._collect()  # the others come to hear it: without an opening, they would wait in vain
            self._close_opening()
            self._post(key, failure)

    def leave(self, *, wait: bool = False, more_keys: Sequence[str] = ()) -> None:
        """Says that this rank has heard all that it needs. The coordinator removes the messages.

        With `wait`, it gives the others a few seconds to leave first. `more_keys` are removed with these.
        """
        with contextlib.suppress(RankFailed):  # the store is gone, and all messages with it
            if self.is_coordinator:
                self._close_opening()
                seconds = min(LEAVING_SECONDS, self.timeout) if wait else 0.0
                keys = [*more_keys, *self.all_keys()]
                self.transport.forget_when_left(f"{self.path}/gone", keys, seconds)
            else:
                self._count_out()

    def all_keys(self) -> list[str]:
        """The keys of all messages of this meeting."""
        ahead = int(self._over)  # the message in which a rank fails
        names = [f"told/{number}" for number in range(1, self._told + ahead + 1)]
        for number in range(1, self._said + ahead + 1):
            names += [f"said/{number}/{rank}" for rank in range(1, self.world)]
        return [f"{self.path}/{name}" for name in (*names, *self.other_keys, "left")]

    def silence(self, ranks: Sequence[int], more: str = "") -> RankTimeout:
        """The error if nothing was heard from these ranks."""
        reports = self.transport.last_reports(ranks[:_SHOWN])
        some = ", ".join(
            f"rank {rank} (last at: {reports[rank]})" if rank in reports else f"rank {rank}"
            for rank in ranks[:_SHOWN]
        )
        rest = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        return RankTimeout(
            f"{self.what} failed: nothing heard from {some}{rest} within {self.timeout:g} s; it has ended, "
            f"hangs, or does not make this call{more}{self.note}",
            ranks=ranks,
        )

    # --- the opening

    def _agree_first(self, mine: bytes, decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        known = self.transport.membership
        member = this_member()
        if known is not None and known.members[self.rank] != member:  # of a process that had this rank before
            known = None
        first = _First(member, "" if known is None else known.token, mine)
        if self.is_coordinator:
            return self._answer_all(first, decide)
        end = time.monotonic() + self.timeout + self.grace
        while True:
            self.say(msgspec.msgpack.encode(first))
            answer: _Answer | None = None
            try:
                answer = _decode(self._hear(), _Answer)
            except RankTimeout as error:
                if self.rank not in error.ranks:
                    raise
            if answer is not None:
                if not answer.members and known is not None and answer.membership == known.token:
                    self._opening, self._membership = "", known
                    return answer.data
                if answer.members and answer.members[self.rank] == member:
                    self._opening = ""
                    self._learn(answer)
                    return answer.data
            # It came too late, or a process that had this rank before was answered: on to the next opening.
            self._count_out()
            self.find_opening(end)

    def _answer_all(self, mine: _First, decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        try:
            try:
                heard = [mine, *(_decode(data, _First) for data in self.gather())]
            except RankTimeout as error:
                raise type(error)(f"{error}{_ADVICE}", ranks=error.ranks) from None
            finally:
                self._close_opening()
            known = self.transport.membership
            if known is not None and all(
                first.known == known.token and first.member == member
                for first, member in zip(heard, known.members, strict=True)
            ):
                answer = _Answer(known.token, b"")
                self._membership = known
            else:
                answer = _Answer(secrets.token_hex(8), b"", tuple(first.member for first in heard))
                self._learn(answer)
            data = decide([first.data for first in heard])
            self.tell(msgspec.msgpack.encode(msgspec.structs.replace(answer, data=data)))
            return data
        except BaseException as error:
            self.failed(error)
            raise

    def open(self, subject: bytes) -> None:
        """By the coordinator."""
        self.subject = subject
        self.transport.messages.post(self._opening, msgspec.msgpack.encode(_Opening(self.path, subject)))

    def find_opening(self, end: float) -> None:
        """By another rank: takes part in the meeting that is open, as soon as one is."""
        try:
            while not (data := self.transport.messages.read(self._opening, end - time.monotonic())):
                # Of a meeting that is closed, in a store that cannot remove messages.
                if time.monotonic() >= end:
                    raise MessageTimeout("no meeting is open")
                time.sleep(_LOOK_SECONDS)
        except MessageTimeout:
            raise self.silence([0], _ADVICE) from None
        opened = _decode(data, _Opening)
        self.path, self.subject = opened.path, opened.subject
        self.messages = self.transport.messages.under(opened.path)
        self._told = self._said = 0
        self._over = False

    def _count_out(self) -> None:
        if self.messages.count("left") == self.world - 1:
            self.messages.post("gone", b"")

    def _learn(self, answer: _Answer) -> None:
        self._membership = self.transport.membership = Membership(answer.membership, answer.members)
        self.is_new = True

    def _close_opening(self) -> None:
        """Before anything is told: a rank that hears it and comes again must not find the opening."""
        key, self._opening = self._opening, ""
        if key and self.is_coordinator and not self.transport.messages.forget([key]):
            self.transport.messages.post(key, b"")

    # --- messages

    def _tell(self, message: _Told) -> None:
        self._post(f"told/{self._told + 1}", message)
        self._told += 1

    def _say(self, message: _Told) -> None:
        self._said += 1
        self._post(f"said/{self._said}/{self.rank}", message)

    def _hear(self) -> bytes:
        """The coordinator's next message. Raises if it has failed."""
        return self._content(self._next_told())

    def _next_told(self) -> _Told:
        try:
            data = self.messages.read(f"told/{self._told + 1}", self.timeout + self.grace)
        except MessageTimeout:
            raise self.silence([0]) from None
        self._told += 1
        found: _Told = _decode(data, _Told)
        return found

    def take(self, data: bytes) -> bytes:
        """The content of the coordinator's next message, which was read already."""
        self._told += 1
        return self._content(_decode(data, _Told))

    def _content(self, told: _Told) -> bytes:
        if told.failure is not None:
            self._over = True
            self.rejected = not told.failure.maybe_committed
            raise told.failure.error(self.what)
        return told.data

    def _post(self, key: str, message: _Told) -> None:
        self.messages.post(key, msgspec.msgpack.encode(message))


def open_meeting(transport: Transport, what: str, timeout: float, subject: bytes = b"") -> Meeting:
    """Begins a meeting. The others wait until the coordinator has opened it, with its `subject`."""
    what = sendable(what)
    transport.say(what)
    opening = f"{digest(what.encode())}{len(what):x}/open"
    meeting = Meeting(transport, what, timeout, secrets.token_hex(8), opening=opening)
    if meeting.is_coordinator:
        meeting.open(subject)
    else:
        meeting.find_opening(time.monotonic() + timeout + meeting.grace)
    return meeting


@contextmanager
def meeting_for(transport: Transport, what: str, timeout: float) -> Iterator[Meeting]:
    """A meeting from its opening to its end. If the block raises, the other ranks hear of it."""
    meeting = open_meeting(transport, what, timeout)
    try:
        meeting.meet()
        yield meeting
    except BaseException as error:
        meeting.failed(error)
        meeting.leave()
        raise
    meeting.leave(wait=True)


def _tabulate(names: Sequence[bytes]) -> bytes:
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name.decode(errors="replace"), []).append(rank)
    return msgspec.msgpack.encode(_Table(tuple((name, tuple(its)) for name, its in ranks.items())))


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RankFailed(
            f"cannot decode a message of another rank: {error}. Do all ranks run the same version "
            "of Everystep?"
        ) from None
