"""Restoring a checkpoint on all ranks together: each byte is read from storage once per node.

1. Every rank compares its target with the checkpoint, and all learn whether it fits everywhere. A rank may
   lack a leaf, but a leaf that no rank has a place for is a mismatch.
2. Ranks say how they want each leaf. What several ranks of a node want alike is shared among them
   (`everystep.store.ranks.read_shares`).
3. Every rank reads its share, and what only it wants, straight into its arrays. If it does not see a shard
   (a volume of another node), a rank that sees it sends the bytes (`everystep.store.ranks.remote_shards`).
   All wait until all have read successfully.
4. Ranks pass their shares on (`everystep.store.ranks.exchange`), and put back all that is not an array.
5. All ranks know that all are done.

If one rank fails, all raise (`Meeting.settle`). State of one rank goes back to the rank of
the same number. New ranks keep their present state, and state of ranks that no longer exist is left out; a
warning reports both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from everystep.engine import Unkept
from everystep.errors import RanksDisagree
from everystep.format.dtypes import itemsize
from everystep.format.geometry import whole
from everystep.plan.fragments import seen
from everystep.plan.world import Seen
from everystep.state import LeafMeta, Mismatch, Restore
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.checks.views import exchange_views
from everystep.store.ranks.errors import RankError, raise_worst
from everystep.store.ranks.exchange import LocalArray, hand_out
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.membership import name_ranks
from everystep.store.ranks.read_shares import Sharing, common_wishes
from everystep.store.ranks.remote_shards import RemoteShards
from everystep.store.ranks.subgroup import renumber_targets
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.gather import FileReads
from everystep.store.read.requests import BoxRequest, box_requests, boxes_of_targets
from everystep.store.read.restoring import Unrestored, compare_target


def load_together(
    meeting: Meeting,
    checkpoint: Checkpoint,
    into: object,
    *,
    select: str | Iterable[str] | None = None,
    verify: bool = True,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    channel: Channel | None = None,
) -> object:
    """Put a checkpoint back into the states of all ranks; the restored state of this one.

    To be called by all ranks of a meeting, in the training's thread, with the same arguments but for `into`.
    Without a `channel` every rank reads all it wants itself.
    """
    load = _Load(meeting, checkpoint, channel, rename)
    restore, wishes, mismatch = load.plan(into, select, strict)
    sharing = load.share(wishes)
    load.read(restore, wishes, sharing, verify=verify)
    restored = load.restore(restore, wishes, sharing)
    load.warn(restore, mismatch, selected=select is not None)
    return restored


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells about its target: what failed, what does not fit, leaves it has no place for."""

    strict: bool
    failure: RankError | None = None
    unfit: RankError | None = None
    elsewhere: tuple[str, ...] = ()
    fills: bool = False
    lacks: bool = False


@dataclass(frozen=True, slots=True)
class _Wish:
    """An array of this rank that a leaf goes to: all of it or a part. `key` is its name in the restore."""

    key: str
    seen: Seen
    place: LocalArray


@dataclass(frozen=True, slots=True)
class _Wishes:
    """All arrays of this rank that leaves go to; those that are new, by leaf."""

    into_place: tuple[_Wish, ...]
    into_fresh: tuple[_Wish, ...]
    fresh: dict[str, Any]


class _Load:
    """One load of one rank; its methods are the steps, in their order."""

    def __init__(
        self,
        meeting: Meeting,
        checkpoint: Checkpoint,
        channel: Channel | None,
        rename: Callable[[str], str] | None,
    ) -> None:
        self._meeting = meeting
        self._checkpoint = checkpoint
        self._channel = channel
        self._rename = rename
        self._what = f"loading {checkpoint.path}"
        self._metas: Mapping[str, LeafMeta] = {}
        self._aliases: Mapping[str, str] = {}

    def plan(
        self, into: object, select: str | Iterable[str] | None, strict: bool
    ) -> tuple[Restore, _Wishes, Mismatch]:
        """How this rank's target is filled. Returns when all ranks know that the targets of all can be."""
        self._meeting.transport.say(self._what)
        restore: Restore | None = None
        wishes = _Wishes((), (), {})
        failed: Exception | None = None
        try:
            restore = self._compare(into, select, strict)
            wishes = self._wishes(restore)
        except Exception as error:  # told to all ranks, and raised below
            failed = error
        told = self._tell(None if failed else restore, failed, strict)
        raise_worst([plan.failure for plan in told if plan.failure is not None], failed, self._what)
        assert restore is not None, "without one there is a failure"
        absent = set(told[0].elsewhere).intersection(*(plan.elsewhere for plan in told[1:]))
        own = restore.mismatch
        extra = tuple(name for name in restore.elsewhere if name in absent)
        mismatch = own.with_extra(extra)
        if strict:
            if mismatch:
                raise mismatch.error(self._checkpoint.path)
            raise_worst([plan.unfit for plan in told if plan.unfit is not None], None, self._what)
        # A rank may have nothing of what fits, such as a stage that is new. But not all of them.
        if any(plan.lacks for plan in told) and not any(plan.fills for plan in told):
            raise mismatch.nothing(self._checkpoint.path)
        return restore, wishes, mismatch

    def _compare(self, into: object, select: str | Iterable[str] | None, strict: bool) -> Restore:
        checkpoint, rank = self._checkpoint, self._meeting.rank
        checkpoint._fit_to(into)
        self._metas = checkpoint._parts.metas_for(rank)
        self._aliases = checkpoint._parts.aliases_for(rank)
        restore = compare_target(
            checkpoint._reader, into, select, rank=rank, shared=True, strict=strict, rename=self._rename
        )
        renumber_targets(restore, self._meeting.subgroup)
        return restore

    def _tell(self, restore: Restore | None, failed: Exception | None, strict: bool) -> list[_Plan]:
        """Tells all ranks how the target fits; returns what all have told. Equal messages travel once.

        `RanksDisagree` on all ranks unless all of them are as strict: one would go on where another ends.
        """
        rank = self._meeting.rank
        if restore is None:
            assert failed is not None
            mine = _Plan(strict=strict, failure=RankError.of(rank, failed))
        else:
            unfit = restore.mismatch.error(self._checkpoint.path) if restore.mismatch else None
            mine = _Plan(
                strict=strict,
                unfit=None if unfit is None else RankError.of(rank, unfit),
                elsewhere=tuple(sorted(restore.elsewhere)),
                fills=restore.fills,
                lacks=restore.lacks,
            )
        heard = self._meeting.exchange(msgspec.msgpack.encode(mine))
        told = [(msgspec.msgpack.decode(data, type=_Plan), ranks) for data, ranks in heard.items()]
        first = told[0][0].strict
        others = sorted(other for plan, ranks in told if plan.strict != first for other in ranks)
        if others:
            raise RanksDisagree(
                f"rank 0 loads with strict={first}, but {name_ranks(others)} with strict={not first}. It "
                "must be the same on all ranks. Nothing has been restored",
                ranks=(0, *others),
            )
        return [plan for plan, _ in told]

    def _wishes(self, restore: Restore) -> _Wishes:
        """The arrays to fill: those of the target, and new ones."""
        into_place: list[_Wish] = []
        for key, where in restore.destinations.items():
            meta = self._meta(key)
            sharding, shape = restore.parts.get(key, (None, meta.shape))
            wanted = seen(meta.name, meta.dtype, shape, meta.framework, sharding)
            into_place.append(_Wish(key, wanted, LocalArray(where, shape, itemsize(meta.dtype))))
        fresh, fills = self._checkpoint._reader.fresh(restore.fresh)
        into_fresh: list[_Wish] = []
        for fill in fills:
            meta = self._meta(fill.leaf)
            wanted = seen(meta.name, meta.dtype, meta.shape, meta.framework, None)
            assert not isinstance(fill.destination, Unkept)
            place = LocalArray(fill.destination, meta.shape, itemsize(meta.dtype))
            into_fresh.append(_Wish(fill.leaf, wanted, place))
        return _Wishes(tuple(into_place), tuple(into_fresh), fresh)

    def share(self, wishes: _Wishes) -> Sharing:
        """Who reads what, of all that several ranks want."""
        places = {wish.seen: wish.place for wish in (*wishes.into_fresh, *wishes.into_place)}
        if self._channel is None:
            return Sharing((), self._meeting.membership.topology, self._meeting.rank, places)
        # No other rank shares what is this rank's own. Without it, the views of all ranks are equal.
        common = self._checkpoint._parts.metas
        view = tuple(wanted for wanted in places if wanted.name in common)
        views = exchange_views(self._meeting, view)
        return Sharing(common_wishes(views), self._meeting.membership.topology, self._meeting.rank, places)

    def read(self, restore: Restore, wishes: _Wishes, sharing: Sharing, *, verify: bool) -> None:
        """Fill this rank's share, and what is not shared; returns when all ranks have done so."""
        checkpoint = self._checkpoint
        wanted: list[BoxRequest] = []
        reads: list[FileReads] = []
        failed: Exception | None = None
        try:
            wanted = [*sharing.reads(), *self._own_reads(restore, wishes, sharing)]
            reads = [] if checkpoint._parts.stored_whole else checkpoint._reader.reads(wanted, verify=verify)
        except Exception as error:  # told to all ranks, and raised by `Meeting.settle`
            failed = error
        elsewhere: RemoteShards | None = None
        if self._channel is not None and not checkpoint._parts.stored_whole:
            elsewhere = RemoteShards(self._meeting, checkpoint, self._channel, verify=verify)
            reads = elsewhere.keep(reads)
        with self._meeting.all_or_none():
            if failed is not None:
                raise failed
            if checkpoint._parts.stored_whole:
                checkpoint._reader.fetch(wanted, verify=verify)
            else:
                checkpoint._reader.carry_out(reads, verify=verify)
        if elsewhere is not None and elsewhere.is_needed:
            with self._meeting.all_or_none():
                elsewhere.transfer()

    def _own_reads(self, restore: Restore, wishes: _Wishes, sharing: Sharing) -> Iterator[BoxRequest]:
        for wish in wishes.into_fresh:
            if wish.seen not in sharing.shared:
                yield BoxRequest(wish.seen.name, whole(wish.place.shape), wish.place.where)
        shared = {wish.key for wish in wishes.into_place if wish.seen in sharing.shared}
        metas = {key: self._meta(key) for key in restore.destinations}
        for item in box_requests(restore, metas, self._meeting.rank):
            if item.leaf not in shared:
                yield msgspec.structs.replace(item, leaf=metas[item.leaf].name)
        yield from boxes_of_targets(restore)

    def restore(self, restore: Restore, wishes: _Wishes, sharing: Sharing) -> object:
        """Hand shares around and put everything in order; returns when all ranks have done so."""
        restored: object = None
        failed: Exception | None = None
        try:
            if self._channel is not None:
                hand_out(
                    self._channel, self._meeting.rank, sharing.groups, sharing.place, self._meeting.timeout
                )
            restored = restore.finish(wishes.fresh)
        except Exception as error:  # told to all ranks, and raised by `Meeting.settle`
            failed = error
        self._meeting.settle(failed)
        return restored

    def warn(self, restore: Restore, mismatch: Mismatch, *, selected: bool) -> None:
        """Warns of what has not been restored. Rank 0 warns of what concerns all ranks."""
        rank, world, saved = self._meeting.rank, self._meeting.world, self._checkpoint.world
        is_coordinator = rank == 0
        beyond = self._checkpoint._parts.local(0) if is_coordinator and saved > world and not selected else {}
        unrestored = Unrestored.of(restore, mismatch if is_coordinator else restore.mismatch, beyond)
        unrestored.warn(self._checkpoint.path, rank, world, saved)

    def _meta(self, name: str) -> LeafMeta:
        return self._metas[self._aliases.get(name, name)]
