"""What the saves and restores of one Checkpointer share: its ranks, its run, and what is known of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.checkpointer.announced_changes import AnnouncedChanges
from holdfast.checkpointer.events import EventLog
from holdfast.checkpointer.free_space import FreeSpace
from holdfast.checkpointer.observed_changes import ObservedChanges
from holdfast.checkpointer.retention import Retention
from holdfast.checkpointer.run_observer import RunObservers
from holdfast.checkpointer.schedule import Schedule
from holdfast.checkpointer.staging import Staging
from holdfast.store import FollowedRun, RankGroup, WritableRun
from holdfast.store.commit.volumes import Ledger

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
