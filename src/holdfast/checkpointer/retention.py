"""What a `Keep` has to choose from: the checkpoints of a run on disk."""

from __future__ import annotations

import os

from holdfast.checkpointer.keep import Kept
from holdfast.errors import CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint
from holdfast.store import Checkpoint, list_steps, step_name


def history(run: str) -> list[Kept]:
    """The run's checkpoints in order of step, as far as they look intact without being read.

    One that is visibly damaged is nobody's candidate: were it the newest, the last whole one would go in its
    favour.
    """
    found = []
    for step in list_steps(run):
        try:
            with Checkpoint(os.path.join(run, step_name(step))) as checkpoint:
                if checkpoint.step == step and checkpoint.visible_damage() is None:
                    found.append(Kept(step, checkpoint.created, checkpoint.metrics))
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint):
            continue
    return found


def ids(run: str) -> tuple[str, ...]:
    """The ids of all checkpoints of a run, damaged or not; none when one cannot even be told."""
    found = []
    for step in list_steps(run):
        try:
            with Checkpoint(os.path.join(run, step_name(step))) as checkpoint:
                found.append(checkpoint.id)
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint):
            return ()
    return tuple(found)
