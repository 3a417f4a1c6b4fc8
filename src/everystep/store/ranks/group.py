"""The ranks that save and load together, from one rank's point of view.

Owns the order of a save on one rank: join the others, take the state apart, learn the write share, write it.
If anything fails on the way, the others are told. The messages belong to `everystep.store.ranks.save_round`,
the plan to `write_shares`, the commit to `everystep.store.commit.driver`, loading to `shared_load`. A
single process that writes to several volumes is a group of one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from everystep.errors import RankFailed, RanksDisagree
from everystep.state import Flat, LeafSource, flatten
from everystep.store.commit import volumes
from everystep.store.commit.driver import Commit
from everystep.store.commit.info import CheckpointInfo
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.round import ALONE
from everystep.store.commit.share import Share
from everystep.store.commit.transaction import Transaction
from everystep.store.commit.volumes import Ledger, OutsideShards
from everystep.store.names import sendable
from everystep.store.options import WriteSettings
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.consensus import all_or_none
from everystep.store.ranks.errors import failing_the_save
from everystep.store.ranks.replies import all_heard
from everystep.store.ranks.save_round import STRAGGLER_SECONDS, Call, Calls, Plan, SaveRound
from everystep.store.ranks.subgroup import renumber_leaves
from everystep.store.ranks.transport import Transport, join
from everystep.store.ranks.write_shares import WriteShares

_T = TypeVar("_T")
ProcessGroup = Any
"""A ``torch.distributed.ProcessGroup``; None for the default one, if there is one; ``"none"`` for none.

Of ranks that torch does not know: `everystep.store.ranks.transport.Ranks`.
"""


def join_group(what: str, process_group: ProcessGroup, timeout: float) -> Transport | None:
    """The transport of all ranks of a process group; None for a process by itself."""
    if process_group == "none":
        return None
    if isinstance(process_group, (str, bool)):
        raise ValueError(
            f'process_group must be a torch process group, None or "none", not {process_group!r}'
        )
    return join(what, timeout, process_group)


@contextmanager
def leaving(transport: Transport | None) -> Iterator[None]:
    """For ranks that came together for one thing only."""
    try:
        yield
    finally:
        if transport is not None:
            with contextlib.suppress(RankFailed):
                transport.close()


_LEAVING_SECONDS = 5.0
_Said = tuple[str, bool]
"""Of a rank: how it writes, and whether it has volumes."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A state that this rank is ready to write its share of."""

    save_round: SaveRound | None
    id: str
    created: float
    flat: Flat
    share: Share


class RankGroup:
    """What stays from save to save."""

    def __init__(self, transport: Transport | None, settings: WriteSettings, timeout: float) -> None:
        self.transport = transport
        self.settings = settings
        self.timeout = timeout
        self._calls = None if transport is None else Calls(transport, timeout)
        self._channel: Channel | None = None
        with self.all_or_none("group"):
            self.has_volumes = self._check_settings()
            speeds = volumes.measure(settings.volumes) if settings.volumes else [1.0]
            self.shares = WriteShares(
                transport,
                writers=settings.writers,
                speeds=speeds,
                replicas=settings.replicas,
                timeout=timeout,
            )

    @classmethod
    def gather(
        cls, what: str, process_group: ProcessGroup, settings: WriteSettings, timeout: float
    ) -> RankGroup:
        """The group of all ranks; of this process alone if there is no transport (see `join_group`)."""
        transport = join_group(what, process_group, timeout)
        try:
            return cls(transport, settings, timeout)
        except BaseException:
            if transport is not None:
                transport.close()
            raise

    @property
    def rank(self) -> int:
        return 0 if self.transport is None else self.transport.rank

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def patience(self) -> float:
        """Seconds in which a save ends, unless the device hangs; silent ranks have been reported by then."""
        return self.timeout + (0.0 if self._calls is None else self._calls.grace + STRAGGLER_SECONDS)

    @property
    def channel(self) -> Channel | None:
        """The way from rank to rank for what is read once per node. Made by all at the same time.

        None where ranks cannot send arrays to each other: each reads what it needs then.
        """
        assert self.transport is not None
        if self._channel is None and self.transport.by_torch:
            self._channel = Channel.open(self.timeout, self.transport.subgroup)
        return self._channel

    @property
    def is_distributed(self) -> bool:
        """Whether there is anything to divide: one process that writes one file needs no group."""
        return self.transport is not None or bool(self.settings.volumes)

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """A block that succeeds on all ranks or on none: where another failed, this one raises, too."""
        if self.transport is None:
            yield
            return
        with all_or_none(self.transport, what, self.timeout):
            yield

    def broadcast(self, what: _T, kind: Any) -> _T:
        """What the coordinator says, on every rank; `kind` is its type."""
        if self.transport is None:
            return what
        data = self.transport.tell(
            "told", msgspec.msgpack.encode(what) if self.is_coordinator else None, self.timeout
        )
        heard: _T = msgspec.msgpack.decode(data, type=kind)
        return heard

    @contextmanager
    def again(self, what: str) -> Iterator[Transport | None]:
        """A transport for one thing, whatever a rank has missed before; None for a process by itself."""
        if self.transport is None:
            yield None
            return
        self.transport.check_group()
        with self.transport.again(what, self.timeout) as transport:
            yield transport

    def restart(self, transport: Transport) -> None:
        """All begin anew, perhaps at an older step: calls that a rank has missed are over."""
        assert self._calls is not None
        number = b"%d" % self._calls.next if self.is_coordinator else None
        self._calls.go_on_from(int(transport.tell("next", number, self.timeout)))

    def signal(self, name: str) -> None:
        """Tells the coordinator that the training is asked to end."""
        assert self.transport is not None
        self.transport.mail.post("signal", name.encode())

    def signalled(self) -> str | None:
        """Whether another rank was asked to end, and by which signal."""
        assert self.transport is not None
        return self.transport.mail.read("signal", 1.0).decode() if self.transport.mail.has("signal") else None

    def begin(self, what: str, step: int, *, due: bool = True, signal: str | None = None) -> SaveRound | None:
        """Meets the others for a call. What the coordinator says counts, for all: see the result's `call`."""
        if self._calls is None or self.transport is None:
            return None
        with failing_the_save():
            self.transport.check_group()
            what = sendable(what)
            call = (
                Call(what, step, os.urandom(16).hex(), time.time(), due, signal)
                if self.is_coordinator
                else None
            )
            return self._calls.begin(what, step, call)

    def prepare(self, state: object, save_round: SaveRound | None) -> Ready:
        """Takes a state apart, and plans who writes what where that has to be done anew."""
        try:
            with failing_the_save():
                flat = self._flatten(state)
                if self._anew(flat, save_round):
                    self.shares.plan(flat, 0 if save_round is None else save_round.number)
                share = self.shares.of(flat)
        except BaseException as error:
            self.failed(save_round, error)
            raise
        if save_round is None:
            return Ready(None, os.urandom(16).hex(), time.time(), flat, share)
        return Ready(save_round, save_round.call.id, save_round.call.created, flat, share)

    def check_replicas(self, state: object) -> None:
        """Raises `RanksDisagree` when ranks hold different bytes of replicated arrays."""
        self.shares.check_replicas(self._flatten(state))

    def _flatten(self, state: object) -> Flat:
        flat = flatten(state, self.rank)
        return flat if self.transport is None else renumber_leaves(flat, self.transport.subgroup)

    def commit(
        self,
        ready: Ready,
        transaction: Transaction,
        step: int,
        metrics: Mapping[str, float],
        *,
        groups: Sequence[Sequence[LeafSource]] | None = None,
        observer: SaveObserver | None = None,
        ledger: Ledger | None = None,
        live: Collection[str] | None = None,
    ) -> CheckpointInfo:
        """Writes this rank's share; returns when the whole checkpoint is durable.

        Of a run whose shards go to volumes: its `ledger`, and the ids of its checkpoints that are `live`.
        """
        transport = self.transport
        far = transport is not None and any(
            member.host != transport.members[0].host for member in transport.members
        )
        outside = None
        if far or self.has_volumes:
            outside = OutsideShards(self.settings.volumes, self.rank, ledger=ledger, live=live)
        commit = Commit(
            transaction,
            step,
            metrics,
            self.settings.tuning,
            id=ready.id,
            created=ready.created,
            round=ready.save_round or ALONE,
            outside=outside,
            agreement=self.shares.agreement(),
        )
        try:
            return commit.run(ready.share, groups, observer)
        except BaseException:
            self._plan_anew()
            raise

    def failed(self, save_round: SaveRound | None, error: BaseException) -> None:
        """Tells the others that a call has failed. The next save makes a new plan."""
        self._plan_anew()
        if save_round is not None:
            save_round.failed(error)

    def _plan_anew(self) -> None:
        """Next time. Others do so when the coordinator does: what it did not see fail still holds."""
        if self.is_coordinator:
            self.shares.forget()

    def close(self, *, wait: bool = False) -> None:
        """Ends it. With `wait` the coordinator sees to it, for a few seconds, that others know how it ended:
        the store may go with its process."""
        if self.transport is None:
            return
        if self._channel is not None:
            self._channel.close()
        rest = ["signal", *self._calls.rest()] if self._calls is not None and self.is_coordinator else []
        with contextlib.suppress(RankFailed):  # the store has gone before: nothing of this is left in it
            self.transport.close(rest, min(_LEAVING_SECONDS, self.timeout) if wait else 0.0)

    def _check_settings(self) -> bool:
        """Checks that all ranks have the same settings. Volumes may differ; returns whether any has some."""
        if self.transport is None:
            return bool(self.settings.volumes)

        def decide(messages: Sequence[bytes | None]) -> bytes:
            heard = all_heard(messages, "settings", self.timeout)
            heard_settings = [msgspec.msgpack.decode(said, type=_Said) for said in heard]
            return msgspec.msgpack.encode(
                (heard_settings[0][0], any(volumes for _, volumes in heard_settings))
            )

        mine = f"writers={self.settings.writers!r}, replicas={self.settings.replicas!r}"
        said = msgspec.msgpack.encode((mine, bool(self.settings.volumes)))
        verdict = self.transport.agree("settings", said, decide, self.timeout)
        agreed: _Said = msgspec.msgpack.decode(verdict, type=_Said)
        leading, has_volumes = agreed
        if mine != leading:
            raise RanksDisagree(
                f"rank {self.rank} has Options({mine}), rank 0 has Options({leading}): they must be equal",
                ranks=(0, self.rank),
            )
        return has_volumes

    def _anew(self, flat: Flat, save_round: SaveRound | None) -> bool:
        """Whether a new plan is needed: the present one does not fit the state of some rank."""
        here = self.shares.look(flat)
        if save_round is None:
            return not self.shares.serves([here])
        if not self.is_coordinator:
            save_round.here(here)
            return save_round.read("plan", Plan).anew
        anew = not self.shares.serves([here, *save_round.gather()])
        save_round.say("plan", Plan(anew))
        return anew
