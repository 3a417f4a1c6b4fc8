"""The ranks' transport: which ranks there are, and the store that keeps their messages.

Owns what lasts from call to call. What ranks say to each other in a call belongs to `meeting`. A process
keeps the membership of a process group as long as its store lives, so only the first call of the ranks has
to tell all of them who the others are.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from everystep.engine import forks
from everystep.errors import RankFailed
from everystep.format.checksums import digest
from everystep.store.names import sendable
from everystep.store.ranks.membership import Membership
from everystep.store.ranks.message_store import MessageStore, MessageTimeout

_MAX_STATUS_NBYTES: Final = 2000
_MAX_UNREAD: Final = 64
"""Meetings that some rank has not left yet. The messages of older ones are removed anyway."""


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


class _Kept:
    """What a process keeps of a process group from call to call."""

    def __init__(self) -> None:
        self.forks = forks()
        self.lock = threading.Lock()
        self.membership: Membership | None = None
        self.unread: deque[tuple[str, list[str]]] = deque()
        """On the coordinator: of meetings that it has left, the key that says that all others have left, too,
        and the keys of their messages."""


_kept: MutableMapping[Any, dict[tuple[str, int], _Kept]] = weakref.WeakKeyDictionary()
_kept_lock = threading.Lock()


class Transport:
    """A rank's way to the other ranks of a process group. `close` it when the call or Checkpointer ends."""

    def __init__(
        self,
        ranks: Ranks,
        prefix: str = "everystep",
        *,
        subgroup: Subgroup | None = None,
        by_torch: bool = False,
    ) -> None:
        self.rank, self.world = ranks.rank, ranks.world
        self.subgroup = subgroup
        """None: it is all of the default process group."""
        self.by_torch = by_torch
        """Whether its ranks are those of torch's process group, which can also move arrays between them."""
        self.messages = MessageStore(ranks.store, prefix)
        with _kept_lock:
            groups, own = _kept.setdefault(ranks.store, {}), (prefix, ranks.rank)
            if own not in groups or groups[own].forks != forks():
                groups[own] = _Kept()
            self._kept = groups[own]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def membership(self) -> Membership | None:
        """What this rank knows of the others, from this call or an earlier one."""
        return self._kept.membership

    @membership.setter
    def membership(self, found: Membership | None) -> None:
        self._kept.membership = found

    def check_group(self) -> None:
        """`RankFailed` if the process group was created again after this rank joined it.

        Ranks may have changed places, and so may the arrays on their meshes. A group that was only destroyed
        does no harm: the ranks continue while the store answers.
        """
        present = _default_store() if self.by_torch and _is_initialized() else None
        joined = self.messages.store
        if present is not None and joined is not None and present is not joined:
            raise RankFailed(
                f"the process group was created again after this Checkpointer joined it as rank {self.rank} "
                f"of {self.world}; ranks may have changed places. Nothing was written or read. Close this "
                "Checkpointer and make a new one, on all ranks"
            )

    def say(self, what: str) -> None:
        """Reports this rank's present activity, for the error messages of others."""
        self.messages.post(f"at/{self.rank}", sendable(what).encode()[:_MAX_STATUS_NBYTES])

    def last_reports(self, ranks: Sequence[int]) -> dict[int, str]:
        """What these ranks reported last; ranks without a report are left out."""
        keys = {f"at/{rank}": rank for rank in ranks}
        found = self.messages.collect(list(keys), 0.0)
        return {keys[key]: data.decode(errors="replace") for key, data in found.items()}

    def forget_when_left(self, gone: str, keys: list[str], wait: float) -> None:
        """By the coordinator: removes the messages of a meeting once all others have left it.

        `gone` is the key that the last of them leaves. After `wait` seconds a later call takes over.
        """
        kept = self._kept
        with kept.lock:
            kept.unread.append((gone, keys))
            earlier = [key for key, _ in kept.unread if key != gone]
        left: set[str] = set()
        if wait > 0:
            try:
                self.messages.read(gone, wait)
                left.add(gone)
            except MessageTimeout:
                wait = 0.0
        if earlier or not left:
            left.update(self.messages.collect([*earlier, gone], 0.0))
        with kept.lock:
            while len(kept.unread) - len(left) > _MAX_UNREAD:
                left.add(next(key for key, _ in kept.unread if key not in left))
            over = [entry for entry in kept.unread if entry[0] in left]
            for entry in over:
                kept.unread.remove(entry)
        self.messages.forget([key for name, names in over for key in (name, *names)])

    def close(self) -> None:
        self.messages.close()


def join(process_group: Any = None) -> Transport | None:
    """The transport to the other ranks of a process group. It sends nothing.

    Without a group, it is the default one; then None if there are no others: without torch, without a process
    group, in a world of one. `process_group` may also be the `Ranks` of another world than torch's.
    """
    if isinstance(process_group, Ranks):
        return None if process_group.world == 1 else Transport(process_group)
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
    if world == 1:
        return None
    return Transport(Ranks(rank, world, _default_store()), prefix, subgroup=subgroup, by_torch=True)


def _is_initialized() -> bool:
    """Whether there is a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
