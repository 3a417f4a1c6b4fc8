"""The runs that this process has open for writing, and opening another one.

A notebook easily makes a second Checkpointer of a run where it meant to replace the first. The error then
names the first.
"""

from __future__ import annotations

import gc
import os
import weakref

from everystep.engine import forks
from everystep.errors import CheckpointExists, Locked
from everystep.store import WritableRun, is_checkpoint
from everystep.store.api import refuse_reference

_open: weakref.WeakKeyDictionary[object, tuple[WritableRun, int]] = weakref.WeakKeyDictionary()
"""Checkpointer -> its run, and `forks` at that time: a forked child holds none of its parent's."""


def open_run(path: str) -> WritableRun:
    """Opens a run for writing. `Locked` names the Checkpointer of this process that has it open."""
    refuse_reference(path)
    if is_checkpoint(path):
        # Steps inside of a checkpoint would never be found: readers of that path mean the checkpoint.
        raise CheckpointExists(
            f"{path} is a checkpoint, not a run of them: give the Checkpointer a directory of its own. "
            "(everystep.load restores from a single checkpoint)"
        )
    try:
        return WritableRun(path)
    except Locked as error:
        if not _holders(path):
            raise
        gc.collect()  # a Checkpointer that nothing but a cycle refers to gives its lock back
        holders = _holders(path)
        if holders:
            raise Locked(
                f"run {path} is open for writing in this process already, by {holders[0]!r}. Close that one "
                "first. In a notebook whose cell ran before: call close() on the old Checkpointer, as in "
                "`ckpt.close()`, before you make a new one; or use `with everystep.Checkpointer(...) as "
                "ckpt:`, which closes it by itself"
            ) from error
    return WritableRun(path)


def register(checkpointer: object, run: WritableRun) -> None:
    """That Checkpointer holds that run, until it closes it."""
    _open[checkpointer] = run, forks()


def _holders(path: str) -> list[object]:
    real, here = os.path.realpath(path), forks()
    return [
        holder
        for holder, (run, forked) in _open.items()
        if forked == here and run.is_open and os.path.realpath(run.path) == real
    ]
