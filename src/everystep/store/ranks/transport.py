"""The ranks' transport: who they are, and how they exchange small messages.

Rank 0 coordinates: it collects what concerns all ranks, decides, and all read its decision. Each such *call*
has a key and a number, which every rank counts: all ranks make the calls of a key in the same order. A rank
that failed may skip a call. Such calls need keys that name their subject (the step): otherwise the rank would
take the decision it missed for that of the next call. No call is a collective. Each has a time-out, after
which the remaining ranks get `RankFailed`.

No messages stay in the store. A rank removes its message when it has read the decision, and says so; the
coordinator removes its own when all have.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from everystep.errors import EverystepError, RankFailed, RankTimeout
from everystep.format.checksums import digest
from everystep.plan.topology import Topology
from everystep.store.names import sendable
from everystep.store.ranks.membership import (
    GRACE_SECONDS,
    Membership,
    StatusKeys,
    meet,
    name_ranks,
    purpose_prefix,
)
from everystep.store.ranks.message_store import MessageStore, MessageTimeout
from everystep.store.ranks.replies import all_heard

_MOST_UNREAD: Final = 64
"""Calls whose results somebody has not read yet: the coordinator waits for those that are further behind."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank: its process, on which machine, on which socket (NUMA node) of it."""

    rank: int
    host: str
    pid: int
    socket: int


@dataclass(frozen=True, slots=True)
class Subgroup:
    """A process group of some ranks. A rank of it is an index into `ranks`, those of the world."""

    handle: Any
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a world that is not torch's: which one this is, how many, and what keeps their messages.

    The store has the methods of torch's stores that `message_store` calls. It may lack ``clone``, and raise
    `NotImplementedError` for ``compare_set``; then its ``get`` returns None for what is not there.
    """

    rank: int
    world: int
    store: Any


class _Verdict(msgspec.Struct, frozen=True):
    """What the coordinator says at the end of a call: data, or why there is none."""

    data: bytes = b""
    failure: str = ""
    ranks: tuple[int, ...] = ()
    silence: bool = False
    """Whether the failure is that ranks were not heard of."""


class _Table(msgspec.Struct, frozen=True):
    """Each different message of an exchange, by its digest, and the ranks that have it."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A call whose messages are to be removed when all others have read them."""

    call: str
    blobs: tuple[str, ...]
    whole: bool
    """Whether everybody was heard of, and so can be expected to read."""

    @property
    def keys(self) -> list[str]:
        return [*(f"{self.call}/{end}" for end in ("verdict", "read", "done")), *self.blobs]


class Transport:
    """A rank's place among all. Made by `join`; one thread at a time per key."""

    def __init__(
        self,
        rank: int,
        met: Membership,
        home: MessageStore,
        board: StatusKeys,
        *,
        subgroup: Subgroup | None = None,
        within: bool = False,
        by_torch: bool = True,
    ) -> None:
        """`within`: it is another transport's, which goes on to use the same connections.

        `by_torch`: its ranks are those of torch's process group, which can also move arrays between them.
        """
        machines: dict[str, int] = {}
        nodes = tuple(machines.setdefault(card.machine, len(machines)) for card in met.cards)
        self.rank = rank
        self.world = len(met.cards)
        self.subgroup = subgroup
        """None: it is all of the default process group."""
        self.by_torch = by_torch
        self.members = tuple(
            Member(number, card.host, card.pid, card.socket) for number, card in enumerate(met.cards)
        )
        self.topology = Topology(nodes, tuple(card.socket for card in met.cards))
        self.mail = home.under(met.token)
        self._met = met
        self._home = home
        self._board = board
        self._lock = threading.Lock()
        self._cleaning = threading.Lock()
        self._calls: dict[str, int] = {}
        self._unread: deque[_Unread] = deque()
        self._closed = False
        self._within = within

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def node_peers(self) -> tuple[int, ...]:
        """The ranks on this rank's node, itself included, ascending."""
        return self.topology.peers(self.rank)

    def tell(self, key: str, data: bytes | None, timeout: float) -> bytes:
        """The coordinator's data, on every rank; others give None. It waits only for who is far behind."""
        if not self.is_coordinator:
            return self._hear(self._next_call(key), timeout)
        if data is None:
            raise ValueError("the coordinator must give the data to send")
        call = self._next_call(key)
        self._post(call, _Verdict(data))
        self._retire(_Unread(call, (), True), timeout)
        return data

    def agree(
        self, key: str, mine: bytes, decide: Callable[[Sequence[bytes | None]], bytes], timeout: float
    ) -> bytes:
        """What the coordinator decides, on every rank, after hearing all of them.

        `decide` is called on the coordinator only, with everybody's data by rank; None for those that were
        not heard of in `timeout` seconds. If it raises, the others get `RankFailed` with its message. A rank
        that comes late gets the decision that was made without it.
        """
        call = self._next_call(key)
        if not self.is_coordinator:
            return self._ask(call, mine, timeout)
        heard = self._collect(call, timeout)
        try:
            data = decide([mine, *(heard.get(rank) for rank in range(1, self.world))])
            self._post(call, _Verdict(data))
        except BaseException as error:
            text = str(error) if isinstance(error, EverystepError) else f"{type(error).__name__}: {error}"
            said, ranks = sendable(f"rank 0: {text}"), tuple(getattr(error, "ranks", (0,)))
            self._post(call, _Verdict(failure=said, ranks=ranks, silence=isinstance(error, RankTimeout)))
            raise
        finally:
            self._retire(_Unread(call, (), len(heard) == self.world - 1), timeout)
        return data

    def exchange(self, key: str, mine: bytes, timeout: float) -> dict[bytes, tuple[int, ...]]:
        """Every different message and the ranks that have it, ascending; in the order of their lowest rank.

        Equal messages travel once: each rank sends a digest, reads one table and the messages that differ
        from its own. `RankFailed` on all ranks when one is not heard of.
        """
        call = self._next_call(key)
        name = _blob_name(mine)
        if self.is_coordinator:
            table = self._tabulate(call, name, timeout)
            self._post(call, _Verdict(msgspec.msgpack.encode(table)))
        else:
            table = _decode(self._ask(call, name.encode(), timeout, done=False), _Table, call)
        try:
            if any(ranks[0] == self.rank for _, ranks in table.entries):
                self.mail.post(f"{call}/blob/{name}", mine)
            return self._blobs(call, {name: mine}, table, timeout)
        finally:
            # Not before all of it was read here, too: another thread's call might remove it.
            if self.is_coordinator:
                blobs = tuple(f"{call}/blob/{other}" for other, _ in table.entries)
                self._retire(_Unread(call, blobs, True), timeout)
            else:
                self._acknowledge(call)

    def deliver(
        self, key: str, messages: Iterable[tuple[int, bytes]], timeout: float
    ) -> list[tuple[int, bytes]]:
        """Messages for single ranks: those that this one got, with their senders. All ranks call it.

        Of one sender they come in its order. `RankFailed` on all ranks when one is not heard of.
        """
        call = self._next_call(key)
        for rank, data in messages:
            number = self.mail.count(f"{call}/to/{rank}")
            self.mail.post(f"{call}/to/{rank}/{number}", msgspec.msgpack.encode((self.rank, data)))
        self.agree(f"{key}/posted", b"", lambda heard: b"".join(all_heard(heard, key, timeout)), timeout)
        count = self.mail.count(f"{call}/to/{self.rank}", 0)
        keys = [f"{call}/to/{self.rank}/{number}" for number in range(1, count + 1)]
        found = self.mail.collect(keys, timeout)
        self.mail.forget([*keys, f"{call}/to/{self.rank}"])
        return [_decode(found[name], tuple[int, bytes], call) for name in keys]

    @contextlib.contextmanager
    def again(self, purpose: str, timeout: float) -> Iterator[Transport]:
        """The same ranks, come together once more, for one thing.

        For what a rank may leave out, or come to late: calls are counted anew, so it does not matter what
        anybody has missed before.
        """
        purpose = sendable(purpose)
        home = self.mail.under(purpose_prefix(purpose))
        met = meet(home, self._board, self.rank, self.world, purpose, timeout)
        transport = Transport(
            self.rank, met, home, self._board, subgroup=self.subgroup, within=True, by_torch=self.by_torch
        )
        try:
            yield transport
        finally:
            transport.close()

    def check_group(self) -> None:
        """`RankFailed` if the process group was created again after these ranks met.

        Ranks may have changed places, and so may the arrays on their meshes. A group that was only destroyed
        does no harm: the ranks continue while the store answers.
        """
        present = _default_store() if self.by_torch and _is_initialized() else None
        met = self.mail.store
        if present is not None and met is not None and present is not met:
            raise RankFailed(
                f"the process group was created again after this Checkpointer joined it as rank {self.rank} "
                f"of {self.world}; ranks may have changed places. Nothing was written or read. Close this "
                "Checkpointer and make a new one, on all ranks"
            )

    def say(self, what: str) -> None:
        """Reports this rank's present activity, for the error messages of others."""
        self._board.say(self.rank, what)

    def whereabouts(self, ranks: Iterable[int]) -> dict[int, str]:
        """The last reports of these ranks; ranks without a report are left out."""
        return self._board.look(tuple(ranks))

    def close(self, rest: Iterable[str] = (), wait: float = 0.0) -> None:
        """Leave. The last one to leave removes what is left of its messages.

        The coordinator may give the keys of messages that it knows of, and wait so long for all others to
        leave first: its process may be the store's host, and they may have something to read yet.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self.is_coordinator:
                with self._cleaning:
                    unread = [key for unread in self._unread for key in unread.keys]
                self.mail.post("rest", msgspec.msgpack.encode([*rest, *unread]))
                if wait > 0:
                    with contextlib.suppress(MessageTimeout):
                        self.mail.read("gone", wait)
            left = self.mail.count("left")
            if left == self.world - 1:
                self.mail.post("gone", b"")
                if not self.mail.has("left"):  # the last one has cleared up before it
                    self.mail.forget(["gone"])
            elif left == self.world:
                known = _decode(self.mail.read("rest", 0.0), list[str], "rest")
                # First "left": who finds it after posting "gone" knows that this will be removed yet.
                self.mail.forget([*known, "rest", "left", "gone"])
                self._home.forget(self._met.keys)
        except RankFailed:
            return  # the store is gone, and with it what was to be removed
        finally:
            if not self._within:
                self.mail.close()

    def _next_call(self, key: str) -> str:
        with self._lock:
            number = self._calls[key] = self._calls.get(key, 0) + 1
        return f"{key}/{number}"

    def _post(self, call: str, verdict: _Verdict) -> None:
        self.mail.post(f"{call}/verdict", msgspec.msgpack.encode(verdict))

    def _acknowledge(self, call: str) -> None:
        """Say that this rank has read all it needs; the last one says so for all."""
        if self.mail.count(f"{call}/read") == self.world - 1:
            self.mail.post(f"{call}/done", b"")

    def _retire(self, ended: _Unread, timeout: float) -> None:
        """Keep in mind to remove the messages of a call, and remove those of earlier ones.

        Two of them are looked at, so that each call does as much as the next.
        """
        with self._cleaning:
            earlier = list(self._unread)
            self._unread.append(ended)
            for position, entry in enumerate(earlier):
                over = len(earlier) - position >= _MOST_UNREAD
                if position >= 2 and not over:
                    return
                done = self.mail.collect([f"{entry.call}/done"], timeout if over and entry.whole else 0.0)
                if done or over:
                    self._unread.remove(entry)
                    self.mail.forget(entry.keys)

    def _collect(self, call: str, timeout: float) -> dict[int, bytes]:
        keys = {f"{call}/from/{rank}": rank for rank in range(1, self.world)}
        return {keys[key]: data for key, data in self.mail.collect(list(keys), timeout).items()}

    def _ask(self, call: str, mine: bytes, timeout: float, *, done: bool = True) -> bytes:
        """Post something of this rank's, and hear what the coordinator makes of it."""
        self.mail.post(f"{call}/from/{self.rank}", mine)
        try:
            return self._hear(call, timeout, done=done)
        finally:
            self.mail.forget([f"{call}/from/{self.rank}"])

    def _hear(self, call: str, timeout: float, *, done: bool = True) -> bytes:
        try:
            data = self.mail.read(f"{call}/verdict", timeout + GRACE_SECONDS)
        except MessageTimeout:
            raise RankTimeout(
                f"rank 0 was not heard of within {timeout:g} s{self._board.describe((0,))}", ranks=(0,)
            ) from None
        verdict: _Verdict = _decode(data, _Verdict, call)
        if done or verdict.failure:
            self._acknowledge(call)
        if verdict.failure:
            raise (RankTimeout if verdict.silence else RankFailed)(verdict.failure, ranks=verdict.ranks)
        return verdict.data

    def _tabulate(self, call: str, name: str, timeout: float) -> _Table:
        heard = self._collect(call, timeout)
        missing = tuple(rank for rank in range(1, self.world) if rank not in heard)
        if missing:
            failure = f"{name_ranks(missing)} {'were' if len(missing) > 1 else 'was'} not heard of within "
            failure += f"{timeout:g} s{self._board.describe(missing)}"
            self._post(call, _Verdict(failure=failure, ranks=missing, silence=True))
            self._retire(_Unread(call, (), False), timeout)
            raise RankTimeout(failure, ranks=missing)
        by_name: dict[str, list[int]] = {name: [0]}
        for rank in range(1, self.world):
            by_name.setdefault(heard[rank].decode(errors="replace"), []).append(rank)
        return _Table(tuple((other, tuple(ranks)) for other, ranks in by_name.items()))

    def _blobs(
        self, call: str, mine: dict[str, bytes], table: _Table, timeout: float
    ) -> dict[bytes, tuple[int, ...]]:
        """The messages that a table lists; `mine` is here already."""
        keys = {f"{call}/blob/{name}": name for name, _ in table.entries if name not in mine}
        found = mine | {keys[key]: data for key, data in self.mail.collect(list(keys), timeout).items()}
        silent = tuple(ranks[0] for name, ranks in table.entries if name not in found)
        if silent:
            raise RankTimeout(
                f"{name_ranks(silent)} did not send what was announced within {timeout:g} s"
                f"{self._board.describe(silent)}",
                ranks=silent,
            )
        for name, ranks in table.entries:
            if _blob_name(found[name]) != name:
                raise RankFailed(f"rank {ranks[0]} sent different data than it announced", ranks=ranks[:1])
        return {found[name]: ranks for name, ranks in table.entries}


def join(purpose: str, timeout: float, process_group: Any = None) -> Transport | None:
    """Come together with all other ranks of a process group that come for the same purpose.

    Without one, it is the default group; then None when there is nobody to meet: without torch, without a
    process group, in a world of one. `RankFailed` on all who came when somebody did not come within `timeout`
    seconds; those may come again. `process_group` may also be the `Ranks` of another world than torch's.
    """
    if isinstance(process_group, Ranks):
        return _join(purpose, timeout, process_group, "everystep", None, by_torch=False)
    if not _is_initialized():
        return None
    distributed = sys.modules["torch.distributed"]
    rank, world = distributed.get_rank(), distributed.get_world_size()
    prefix = "everystep"
    subgroup: Subgroup | None = None
    if process_group is not None:
        ranks = tuple(distributed.get_process_group_ranks(process_group))
        if rank not in ranks:
            raise ValueError(
                f"rank {rank} is not in the given process_group, which has the ranks {list(ranks)}"
            )
        if ranks != tuple(range(world)):
            subgroup = Subgroup(process_group, ranks)
            prefix = f"everystep/{digest(repr(ranks).encode())}"
            rank, world = ranks.index(rank), len(ranks)
    ranks_of_torch = Ranks(rank, world, None if world == 1 else _default_store())
    return _join(purpose, timeout, ranks_of_torch, prefix, subgroup, by_torch=True)


def _join(
    purpose: str, timeout: float, ranks: Ranks, prefix: str, subgroup: Subgroup | None, *, by_torch: bool
) -> Transport | None:
    rank, world = ranks.rank, ranks.world
    if world == 1:
        return None
    purpose = sendable(purpose)
    mail = MessageStore(ranks.store, prefix)
    board = StatusKeys(mail)
    home = mail.under(purpose_prefix(purpose))
    try:
        met = meet(home, board, rank, world, purpose, timeout)
        return Transport(rank, met, home, board, subgroup=subgroup, by_torch=by_torch)
    except BaseException:
        mail.close()
        raise


def _blob_name(data: bytes) -> str:
    return f"{digest(data)}{len(data):x}"


def _is_initialized() -> bool:
    """Whether there is a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _decode(data: bytes, kind: Any, call: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RankFailed(f"cannot decode the message of rank 0 for {call}: {error}", ranks=(0,)) from None
