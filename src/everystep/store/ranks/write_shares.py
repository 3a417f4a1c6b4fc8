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
from everystep.state import FlatState, LeafSource
from everystep.store.commit import volumes as volume_files
from everystep.store.commit.driver import Agreement
from everystep.store.commit.manifest import require_complete
from everystep.store.commit.round import ShareWritten
from everystep.store.commit.share import Share
from everystep.store.options import Replicas, WriteSettings
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
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.save_round import Ready


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
        rank: int = 0,
        *,
        writers: Writers = "all",
        volumes: Sequence[str] = (),
        replicas: Replicas = "check",
    ) -> None:
        self._rank = rank
        self._writers: Writers = writers
        self._volumes = tuple(volumes)
        self._replicas = replicas
        self._speeds = tuple(volume_files.measure(volumes)) if volumes else (1.0,)
        self._known: tuple[Any, Planned] | None = None
        self._outline = Outline()

    def fits(self, settings: WriteSettings) -> bool:
        """Whether it plans for these settings."""
        own = self._writers, self._volumes, self._replicas
        return own == (settings.writers, tuple(settings.volumes), settings.replicas)

    def signature(self, flat: FlatState) -> tuple[str, str]:
        """The fingerprint of the present plan if it is for leaves like these, and a digest of the structure.

        To be called before anything else is done with a state.
        """
        self._outline = outline_of(flat.tree, self._outline)
        fits = self._known is not None and self._known[0] == _signature(flat)
        fingerprint = self._known[1].fingerprint if fits and self._known is not None else ""
        return fingerprint, digest("".join(self._outline.structure.values()).encode())

    def matches(self, ranks: Sequence[Ready]) -> bool:
        """Whether the present plan is good for the states of all ranks, by rank."""
        if self._known is None:
            return False
        plan = self._known[1]
        return len(plan.speakers) == len(ranks) and all(
            ready.plan == plan.fingerprint and ready.structure == ranks[plan.speakers[rank]].structure
            for rank, ready in enumerate(ranks)
        )

    def forget(self) -> None:
        """The next save makes a new plan."""
        self._known = None

    def plan(self, flat: FlatState, meeting: Meeting | None) -> None:
        """Makes a new plan, with all other ranks of a meeting."""
        self._known = None
        topology = Topology.regular(1) if meeting is None else meeting.membership.topology
        topology.writers(self._writers)  # raises for what makes no sense, before any rank waits
        view = view_of(flat.leaves)
        compared = meeting is not None and self._replicas == "check"
        if meeting is None:
            layouts, others = merge_views({view: [0]}), tuple[Beside, ...]()
            speakers: tuple[int, ...] = (0,)
        else:
            speakers = _speakers(structure_digest(flat.tree), meeting)
            if len(set(speakers)) > 1:
                said = facts_of(flat.tree).structure if speakers[self._rank] == self._rank else {}
                check_structures(meeting, said)
            views = exchange_views(meeting, view)
            layouts = merge_views(views)
            others = besides(views, layouts) if compared else ()
            check_ties(meeting, flat.aliases, layouts)
            if compared:
                check_replicas(meeting, flat.leaves, layouts)
                check_layouts(meeting, flat.leaves, layouts, others)
        self._require_complete(flat, layouts)
        self._known = _signature(flat), self._planned(topology, layouts, others, speakers, compared=compared)

    def share(self, flat: FlatState) -> Share:
        """This rank's share of the state that `signature` was called with. The present plan is for it."""
        assert self._known is not None
        planned = self._known[1]
        rank = self._rank
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
        self,
        topology: Topology,
        layouts: Sequence[LeafLayout],
        others: Sequence[Beside],
        speakers: tuple[int, ...],
        *,
        compared: bool,
    ) -> Planned:
        writes = WritePlan(layouts, topology, writers=self._writers)
        owned = writes.fragments(self._rank)
        layout = encode_plan(writes)
        return Planned(
            writes.leaves,
            stripe(owned, self._speeds) if owned else (),
            sum(itemsize(leaf.dtype) * math.prod(leaf.shape) for leaf in writes.leaves),
            layout,
            digest(layout),
            speakers,
            copies_of(self._rank, writes.leaves) if compared else (),
            crossings_of(self._rank, writes.leaves, others),
        )

    def _require_complete(self, flat: FlatState, layouts: Sequence[LeafLayout]) -> None:
        """As long as leaves and structure stay the same, so do the references between them."""
        own = [leaf.name for leaf in (*flat.leaves, *flat.local_leaves)]
        tied = [name for name, _ in (*flat.aliases, *flat.local_aliases)]
        elsewhere = {layout.name for layout in layouts}
        require_complete((flat.tree, *flat.local.values()), {*own, *tied}, elsewhere)


def check_all_replicas(flat: FlatState, meeting: Meeting) -> None:
    """Raises `RanksDisagree` if ranks hold different values of replicated arrays."""
    views = exchange_views(meeting, view_of(flat.leaves))
    layouts = merge_views(views)
    check_replicas(meeting, flat.leaves, layouts)
    check_layouts(meeting, flat.leaves, layouts, besides(views, layouts))


def _speakers(structure: str, meeting: Meeting) -> tuple[int, ...]:
    """For each rank, the first one with the same structure of state."""
    found = [0] * meeting.world
    for ranks in meeting.exchange(structure.encode()).values():
        for rank in ranks:
            found[rank] = ranks[0]
    return tuple(found)


def _signature(flat: FlatState) -> Any:
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
