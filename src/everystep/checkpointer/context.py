"""What the saves and restores of one Checkpointer share: its ranks, its run, and what is known of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everystep.checkpointer.announced_changes import AnnouncedChanges
from everystep.checkpointer.events import EventLog
from everystep.checkpointer.free_space import FreeSpace
from everystep.checkpointer.observed_changes import ObservedChanges
from everystep.checkpointer.retention import Retention
from everystep.checkpointer.run_observer import RunObservers
from everystep.checkpointer.schedule import Schedule
from everystep.checkpointer.staging import Staging
from everystep.store import FollowedRun, RankGroup, WritableRun
from everystep.store.commit.volumes import Ledger

Mode = Literal["overlap", "snapshot", "sync"]


@dataclass(frozen=True, slots=True)
class RunContext:
    """Lives as long as its Checkpointer."""

    group: RankGroup
    run: WritableRun | FollowedRun
    ledger: Ledger | None
    """Of a run whose shards go to volumes, on the coordinator."""
    retention: Retention
    free_space: FreeSpace | None
    """None: the coordinator looks after it, or the shards go to volumes."""
    staging: Staging
    announced: AnnouncedChanges
    observed: ObservedChanges
    schedule: Schedule
    observers: RunObservers
    events: EventLog
    """One of the observers."""
