"""Applying a `Keep` to a run on disk."""

from __future__ import annotations

import os

from holdfast.checkpointer.keep import Keep, Kept
from holdfast.engine import Tuning
from holdfast.errors import CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint
from holdfast.store import Checkpoint, WritableRun, list_steps, step_name


def history(run: str) -> list[Kept]:
    """The run's intact checkpoints in order of step. One that cannot be opened is nobody's candidate."""
    found = []
    for step in list_steps(run):
        try:
            with Checkpoint(os.path.join(run, step_name(step))) as checkpoint:
                found.append(Kept(step, checkpoint.created, checkpoint.metrics))
        except (CorruptCheckpoint, ReadFailed, UnsupportedCheckpoint):
            continue
    return found


def prune(path: str | os.PathLike[str], keep: Keep, *, dry_run: bool = False) -> list[int]:
    """Removes what `keep` does not want and returns those steps. Damaged checkpoints stay, to be looked at."""
    run = os.path.abspath(os.fspath(path))
    known = history(run)
    stay = keep.chosen(known)
    gone = [item.step for item in known if item.step not in stay]
    if gone and not dry_run:
        writable = WritableRun(run, Tuning())
        try:
            writable.retire(gone)
        finally:
            writable.close()
    return gone
