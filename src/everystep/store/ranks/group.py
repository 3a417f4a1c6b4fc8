"""The ranks that save and load together, from one rank's point of view.

Owns the order of a save on one rank: meet the others, take the state apart, learn the write share, write it.
If anything fails on the way, the others hear of it. The messages belong to
`everystep.store.ranks.save_round`, the plan to `write_shares`, the commit to
`everystep.store.commit.driver`, loading to `shared_load`. A single process that writes to several volumes
is a group of one.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from everystep.errors import RanksDisagree
from everystep.state import FlatState, LeafSource, flatten
from everystep.store.commit.driver import Commit
from everystep.store.commit.info import CheckpointInfo
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.round import ALONE
from everystep.store.commit.share import Share, whole
from everystep.store.commit.transaction import Transaction
from everystep.store.commit.volumes import Ledger, OutsideShards
from everystep.store.names import sendable
from everystep.store.options import WriteSettings
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.errors import failing_the_save
from everystep.store.ranks.meeting import Meeting, meeting_for, open_meeting
from everystep.store.ranks.membership import Membership
from everystep.store.ranks.save_round import (
    STRAGGLER_SECONDS,
    Plan,
    Ready,
    SaveCall,
    SaveLine,
    SaveRound,
    agree_on_plan,
    open_save,
)
from everystep.store.ranks.subgroup import renumber_leaves
from everystep.store.ranks.transport import Transport, join
from everystep.store.ranks.write_shares import WriteShares, check_all_replicas

_T = TypeVar("_T")
ProcessGroup = Any
"""A ``torch.distributed.ProcessGroup``; None for the default one, if there is one; ``"none"`` for none.

Of ranks that torch does not know: `everystep.store.ranks.transport.Ranks`.
"""

_shares: MutableMapping[Membership, WriteShares] = weakref.WeakKeyDictionary()
"""The plan of the last save that was one meeting, for the next one of the same ranks. A save takes it, and
puts it back when it has succeeded, so two saves at the same time never share one."""


def join_group(process_group: ProcessGroup) -> Transport | None:
    """The transport to the other ranks of a process group; None for a process by itself."""
    if process_group == "none":
        return None
    if isinstance(process_group, (str, bool)):
        raise ValueError(
            f'process_group must be a torch process group, None or "none", not {process_group!r}'
        )
    return join(process_group)


class RankGroup:
    """What stays from save to save."""

    def __init__(
        self,
        meeting: Meeting | None,
        settings: WriteSettings,
        timeout: float,
        shares: WriteShares | None = None,
    ) -> None:
        """`shares`: with a plan for these settings, of an earlier save."""
        self.meeting = meeting
        self.settings = settings
        self.timeout = timeout
        self.has_volumes = bool(settings.volumes)
        """Whether any rank has volumes."""
        self._line: SaveLine | None = None
        self._channel: Channel | None = None
        self.shares = shares or WriteShares(
            self.rank,
            writers=settings.writers,
            volumes=settings.volumes,
            replicas=settings.replicas,
        )

    @classmethod
    def gather(
        cls, what: str, process_group: ProcessGroup, settings: WriteSettings, timeout: float
    ) -> RankGroup:
        """The ranks of a Checkpointer; this process alone if there are no others (see `join_group`)."""
        transport = join_group(process_group)
        if transport is None:
            return cls(None, settings, timeout)
        with _closed_on_failure(transport):
            meeting = open_meeting(transport, what, timeout)
            with _told_on_failure(meeting):
                group = cls(meeting, settings, timeout)
                group.has_volumes = agree_on_plan(meeting, group._ready(), _agree_on_settings).has_volumes
                group._line = SaveLine(meeting)
        return group

    @classmethod
    def for_one_save(
        cls, what: str, step: int, transport: Transport | None, settings: WriteSettings, timeout: float
    ) -> tuple[RankGroup, SaveRound | None]:
        """The ranks of a save that is one meeting, and its messages."""
        if transport is None:
            return cls(None, settings, timeout), None
        with _closed_on_failure(transport):
            save_round = open_save(transport, timeout, _new_call(what, step))
            with _told_on_failure(save_round.meeting):
                known = None if transport.membership is None else _shares.pop(transport.membership, None)
                fitting = known if known is not None and known.fits(settings) else None
                return cls(save_round.meeting, settings, timeout, fitting), save_round

    @property
    def rank(self) -> int:
        return 0 if self.meeting is None else self.meeting.rank

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def patience(self) -> float:
        """Seconds in which a save ends, unless the device hangs; silent ranks have been reported by then."""
        return self.timeout + (0.0 if self.meeting is None else self.meeting.grace + STRAGGLER_SECONDS)

    @property
    def channel(self) -> Channel | None:
        """The way from rank to rank for what is read once per node. Made by all at the same time.

        None where ranks cannot send arrays to each other: each reads what it needs then.
        """
        assert self.meeting is not None
        if self._channel is None and self.meeting.transport.by_torch:
            self._channel = Channel.open(self.timeout, self.meeting.subgroup)
        return self._channel

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks."""
        return self.meeting is not None

    @property
    def is_distributed(self) -> bool:
        """Whether there is anything to divide: one process that writes one file needs no group."""
        return self.has_others or bool(self.settings.volumes)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A block that succeeds on all ranks or on none: where another failed, this one raises, too."""
        if self.meeting is None:
            yield
            return
        with self.meeting.all_or_none():
            yield

    def broadcast(self, what: _T, kind: Any) -> _T:
        """What the coordinator says, on every rank; `kind` is its type."""
        if self.meeting is None:
            return what
        data = self.meeting.tell(msgspec.msgpack.encode(what) if self.is_coordinator else None)
        heard: _T = msgspec.msgpack.decode(data, type=kind)
        return heard

    @contextmanager
    def reconvene(self, what: str) -> Iterator[Meeting | None]:
        """A meeting for one thing, whatever a rank has missed before; None for a process by itself."""
        if self.meeting is None:
            yield None
            return
        self.meeting.transport.check_group()
        with meeting_for(self.meeting.transport, what, self.timeout) as meeting:
            yield meeting

    def restart(self, meeting: Meeting) -> None:
        """All start again, perhaps at an older step: saves that a rank has missed are over."""
        assert self._line is not None
        self._line.go_on_from(int(meeting.tell(b"%d" % self._line.next if self.is_coordinator else None)))

    def signal(self, name: str) -> None:
        """Tells the coordinator that the training is asked to end."""
        assert self.meeting is not None
        self.meeting.messages.post("signal", name.encode())

    def signalled(self) -> str | None:
        """Whether another rank was asked to end, and by which signal."""
        assert self.meeting is not None
        messages = self.meeting.messages
        return messages.read("signal", 1.0).decode() if messages.has("signal") else None

    def begin(self, what: str, step: int, *, due: bool = True, signal: str | None = None) -> SaveRound | None:
        """Meets the others for the next save. What the coordinator says counts: see the result's `call`."""
        if self.meeting is None or self._line is None:
            return None
        with failing_the_save():
            self.meeting.transport.check_group()
            call = _new_call(what, step, due=due, signal=signal) if self.is_coordinator else None
            return self._line.begin(what, step, call)

    def prepare(self, state: object, save_round: SaveRound | None) -> Share:
        """Takes a state apart, and plans who writes what if the present plan does not fit it.

        Returns what this rank writes.
        """
        if not self.is_distributed:
            return whole(flatten(state))
        try:
            with failing_the_save():
                flat = self._flatten(state)
                if self._needs_plan(flat, save_round):
                    self.shares.plan(flat, None if save_round is None else save_round.meeting)
                return self.shares.share(flat)
        except BaseException as error:
            self.failed(save_round, error)
            raise

    def check_replicas(self, state: object) -> None:
        """Raises `RanksDisagree` if ranks hold different bytes of replicated arrays."""
        flat = self._flatten(state)
        with self.reconvene("comparing replicas") as meeting:
            if meeting is not None:
                check_all_replicas(flat, meeting)

    def _flatten(self, state: object) -> FlatState:
        flat = flatten(state, self.rank)
        return flat if self.meeting is None else renumber_leaves(flat, self.meeting.subgroup)

    def commit(
        self,
        share: Share,
        save_round: SaveRound | None,
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
        call = None if save_round is None else save_round.call
        id = os.urandom(16).hex() if call is None else call.id
        hosts = set() if self.meeting is None else {member.host for member in self.meeting.membership.members}
        outside = None
        if len(hosts) > 1 or self.has_volumes:
            volumes, target = self.settings.volumes, transaction.target
            outside = OutsideShards(volumes, self.rank, target, id, ledger=ledger, live=live)
        commit = Commit(
            transaction,
            step,
            metrics,
            self.settings.tuning,
            id=id,
            created=None if call is None else call.created,
            round=save_round or ALONE,
            outside=outside,
            agreement=self.shares.agreement() if self.is_distributed else None,
        )
        try:
            return commit.run(share, groups, observer)
        except BaseException:
            self._forget_plan()
            raise

    def failed(self, save_round: SaveRound | None, error: BaseException) -> None:
        """Tells the others that a save has failed. The next save makes a new plan."""
        self._forget_plan()
        if save_round is not None:
            save_round.failed(error)

    def _forget_plan(self) -> None:
        """The others plan again when the coordinator does: what it did not see fail still holds."""
        if self.is_coordinator:
            self.shares.forget()

    def close(self, *, succeeded: bool = False) -> None:
        """Ends it. After a save that was one meeting and has `succeeded`, the next may use its plan."""
        if self.meeting is None:
            return
        if self._channel is not None:
            self._channel.close()
        more_keys: list[str] = []
        if self._line is not None:
            more_keys = [f"{self.meeting.path}/signal", *self._line.keys()]
        elif succeeded:
            _shares[self.meeting.membership] = self.shares
        self.meeting.leave(wait=succeeded, more_keys=more_keys)
        self.meeting.transport.close()

    def _ready(self, flat: FlatState | None = None) -> Ready:
        """What this rank says before a save: its settings, and what its plan is for."""
        settings = f"writers={self.settings.writers!r}, replicas={self.settings.replicas!r}"
        plan, structure = ("", "") if flat is None else self.shares.signature(flat)
        return Ready(plan, structure, settings, bool(self.settings.volumes))

    def _needs_plan(self, flat: FlatState, save_round: SaveRound | None) -> bool:
        """Whether a new plan is needed: the present one does not fit the state of some rank."""
        ready = self._ready(flat)
        if save_round is None:
            return not self.shares.matches([ready])

        def decide(heard: Sequence[Ready]) -> Plan:
            agreed = _agree_on_settings(heard)
            return msgspec.structs.replace(agreed, replan=not self.shares.matches(heard))

        plan = agree_on_plan(save_round.meeting, ready, decide)
        self.has_volumes = plan.has_volumes
        return plan.replan or save_round.meeting.is_new


def _agree_on_settings(heard: Sequence[Ready]) -> Plan:
    """Checks that all ranks have the same settings. Their volumes may differ."""
    for rank, ready in enumerate(heard):
        if ready.settings != heard[0].settings:
            raise RanksDisagree(
                f"rank {rank} has Options({ready.settings}), rank 0 has Options({heard[0].settings}): they "
                "must be equal",
                ranks=(0, rank),
            )
    return Plan(False, any(ready.has_volumes for ready in heard))


def _new_call(what: str, step: int, *, due: bool = True, signal: str | None = None) -> SaveCall:
    return SaveCall(sendable(what), step, os.urandom(16).hex(), time.time(), due, signal)


@contextmanager
def _closed_on_failure(transport: Transport) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transport.close()
        raise


@contextmanager
def _told_on_failure(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        meeting.failed(error)
        meeting.leave()
        raise
