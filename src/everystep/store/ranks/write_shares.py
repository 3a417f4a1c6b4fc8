"""Which fragments of a state this rank writes: all ranks plan together, once per layout, and keep the plan.

Ranks exchange their views of the state (`everystep.store.ranks.checks.views`), and from the same views each
computes the same plan. While all leaves stay the same, ranks exchange nothing more about them. All ranks make
a new plan when the leaves of any rank change, or when the structure of a rank's state no longer matches the
rank that speaks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from everystep.errors import RanksDisagree
from everystep.format.checksums import digest
from everystep.format.dtypes import itemsize
from everystep.plan.description import encode_plan
from everystep.plan.fragments import sources, view_of
from everystep.plan.placement import LeafLayout
from everystep.plan.ranks import WritePlan
from everystep.plan.replica_groups import Owned
from everystep.plan.topology import Topology, Writers
from everystep.plan.volumes import stripe
from everystep.plan.world import Beside, besides, merge_views
from everystep.state import Flat, LeafSource
from everystep.store.commit.driver import Agreement
from everystep.store.commit.manifest import require_complete
from everystep.store.commit.round import ShareWritten
from everystep.store.commit.share import Share
from everystep.store.options import Replicas
from everystep.store.ranks.checks.layouts import Crossings, check_layouts, crossing_samples, crossings_of
from everystep.store.ranks.checks.replicas import (
    Copies,
    check_replicas,
    check_samples,
    check_ties,
    copies_of,
    samples,
)
from everystep.store.ranks.checks.values import (
    Outline,
    blob_digests,
    check_structures,
    check_values,
    facts_of,
    outline_of,
    structure_digest,
)
from everystep.store.ranks.checks.views import exchange_views
from everystep.store.ranks.save_round import Ready
from everystep.store.ranks.transport import Transport


@dataclass(frozen=True, slots=True)
class Planned:
    """Who writes what, for leaves as they were when it was planned."""

    leaves: tuple[LeafLayout, ...]
    mine: tuple[tuple[Owned, ...], ...]
    """What this rank writes, volume by volume."""
    nbytes: int
    """Of all leaves."""
    layout: bytes
    fingerprint: str
    speakers: tuple[int, ...]
    """For each rank, the first one with the same structure of state: that one's tree is stored."""
    copies: Copies
    """What is compared in every save: arrays that others have, too."""
    crossings: Crossings
    """And elements that others have in another layout."""


class WriteShares:
    """Plans for one state of all ranks, or of one process that writes to several volumes."""

    def __init__(
        self,
        transport: Transport | None,
        *,
        writers: Writers = "all",
        speeds: Sequence[float] = (1.0,),
        replicas: Replicas = "check",
        timeout: float,
    ) -> None:
        self._transport = transport
        self._topology = Topology.regular(1) if transport is None else transport.topology
        self._topology.writers(writers)  # raises for what makes no sense, before anybody waits
        self._writers: Writers = writers
        self.speeds = tuple(speeds)
        self._replicas = replicas
        self._timeout = timeout
        self._known: tuple[Any, Planned] | None = None
        self._outline = Outline()

    @property
    def rank(self) -> int:
        return 0 if self._transport is None else self._transport.rank

    def look(self, flat: Flat) -> Ready:
        """What this rank can write of a state; to be called before anything else is done with it.

        The plan at hand counts if it is for leaves like these.
        """
        self._outline = outline_of(flat.tree, self._outline)
        fits = self._known is not None and self._known[0] == _signature(flat)
        fingerprint = self._known[1].fingerprint if fits and self._known is not None else ""
        return Ready(fingerprint, digest("".join(self._outline.structure.values()).encode()))

    def serves(self, ranks: Sequence[Ready]) -> bool:
        """Whether the plan at hand is good for what all ranks can write, by rank."""
        if self._known is None:
            return False
        plan = self._known[1]
        return all(
            here.plan == plan.fingerprint and here.structure == ranks[plan.speakers[rank]].structure
            for rank, here in enumerate(ranks)
        )

    def forget(self) -> None:
        """Plans anew next time."""
        self._known = None

    def plan(self, flat: Flat, call: int) -> None:
        """Plans anew, with all others.

        `call`: the number of the call that this is for. A rank that missed one must not hear what was said
        there.
        """
        key = f"plan/{call}"
        self._known = None
        view = view_of(flat.leaves)
        if self._transport is None:
            layouts, others = merge_views({view: [0]}), tuple[Beside, ...]()
            speakers: tuple[int, ...] = (0,)
        else:
            speakers = self._speakers(structure_digest(flat.tree), f"{key}/structure")
            if len(set(speakers)) > 1:
                said = facts_of(flat.tree).structure if speakers[self.rank] == self.rank else {}
                check_structures(self._transport, said, self._timeout, f"{key}/facts")
            views = exchange_views(self._transport, view, self._timeout, f"{key}/views")
            layouts = merge_views(views)
            others = besides(views, layouts) if self._replicas == "check" else ()
            check_ties(self._transport, flat.aliases, layouts, self._timeout, f"{key}/ties")
            if self._replicas == "check":
                check_replicas(self._transport, flat.leaves, layouts, self._timeout, f"{key}/replicas")
                check_layouts(self._transport, flat.leaves, layouts, others, self._timeout, f"{key}/ways")
        self._require_complete(flat, layouts)
        self._known = _signature(flat), self._planned(layouts, others, speakers)

    def check_replicas(self, flat: Flat) -> None:
        """Raises `RanksDisagree` if ranks hold different values of replicated arrays."""
        if self._transport is None:
            return
        self._transport.check_group()
        with self._transport.again("comparing replicas", self._timeout) as transport:
            views = exchange_views(transport, view_of(flat.leaves), self._timeout)
            layouts = merge_views(views)
            check_replicas(transport, flat.leaves, layouts, self._timeout)
            check_layouts(transport, flat.leaves, layouts, besides(views, layouts), self._timeout)

    def of(self, flat: Flat) -> Share:
        """This rank's share of a state that was looked at, and that the plan at hand is for."""
        assert self._known is not None
        planned = self._known[1]
        rank = self.rank
        here = {leaf.name: leaf for leaf in flat.leaves}
        fragments: list[LeafSource] = []
        for volume, owned in enumerate(planned.mine):
            fragments += sources(owned, planned.leaves, flat.leaves, volume)
        speaks = planned.speakers[rank] == rank
        several = len(set(planned.speakers)) > 1
        blobs = blob_digests(flat.leaves)
        return Share(
            tree=flat.tree if speaks else None,
            leaves=(*fragments, *flat.local_leaves),
            aliases=(*(flat.aliases if speaks else ()), *flat.local_aliases),
            local=flat.local,
            count=len(planned.leaves),
            whole_nbytes=planned.nbytes,
            plan=planned.fingerprint,
            layout=planned.layout,
            values={**self._outline.values, **blobs},
            facts={**facts_of(flat.tree).values, **blobs} if speaks and several else {},
            samples={**samples(planned.copies, here), **crossing_samples(planned.crossings, here)},
        )

    def agreement(self) -> Agreement:
        """The check, by the coordinator, that what ranks have written by the present plan is one state."""
        assert self._known is not None
        return partial(_check, self._known[1].fingerprint, self._known[1].speakers)

    def _planned(
        self, layouts: Sequence[LeafLayout], others: Sequence[Beside], speakers: tuple[int, ...]
    ) -> Planned:
        writes = WritePlan(layouts, self._topology, writers=self._writers)
        owned = writes.fragments(self.rank)
        layout = encode_plan(writes)
        compared = self._transport is not None and self._replicas == "check"
        return Planned(
            writes.leaves,
            stripe(owned, self.speeds) if owned else (),
            sum(itemsize(leaf.dtype) * math.prod(leaf.shape) for leaf in writes.leaves),
            layout,
            digest(layout),
            speakers,
            copies_of(self.rank, writes.leaves) if compared else (),
            crossings_of(self.rank, writes.leaves, others),
        )

    def _require_complete(self, flat: Flat, layouts: Sequence[LeafLayout]) -> None:
        """As long as leaves and structure stay the same, so do the references between them."""
        own = [leaf.name for leaf in (*flat.leaves, *flat.local_leaves)]
        tied = [name for name, _ in (*flat.aliases, *flat.local_aliases)]
        elsewhere = {layout.name for layout in layouts}
        require_complete((flat.tree, *flat.local.values()), {*own, *tied}, elsewhere)

    def _speakers(self, structure: str, key: str) -> tuple[int, ...]:
        """Who speaks for whom."""
        assert self._transport is not None
        found = [0] * self._transport.world
        for ranks in self._transport.exchange(key, structure.encode(), self._timeout).values():
            for rank in ranks:
                found[rank] = ranks[0]
        return tuple(found)


def _signature(flat: Flat) -> Any:
    return tuple([(leaf.name, leaf.dtype, leaf.shape, leaf.framework, leaf.sharding) for leaf in flat.leaves])


def _check(plan: str, speakers: tuple[int, ...], dones: Sequence[ShareWritten]) -> None:
    for done in dones:
        if done.plan != plan:
            raise RanksDisagree(
                f"rank {done.ref.rank} and rank 0 used different plans; the save was rejected. The next save "
                "makes a new plan",
                ranks=(0, done.ref.rank),
            )
    check_values(
        {done.ref.rank: done.values for done in dones},
        {done.ref.rank: done.facts for done in dones},
        speakers,
    )
    check_samples({done.ref.rank: done.samples for done in dones})
