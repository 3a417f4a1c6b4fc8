"""One checkpoint, opened by all ranks or by none."""

from __future__ import annotations

import os
from collections.abc import Callable

from everystep.engine import READING, Tuning
from everystep.errors import CheckpointNotFound
from everystep.store.ranks.errors import AnotherCheckpoint
from everystep.store.ranks.meeting import Meeting
from everystep.store.read.checkpoint import Checkpoint, open_any
from everystep.store.read.open import resolve

_MAX_REPLACED = 100
"""Times that a checkpoint is opened in vain because another took its place meanwhile."""


def open_together(
    meeting: Meeting,
    path: str,
    check: Callable[[Checkpoint], None] | None = None,
    tuning: Tuning = READING,
) -> Checkpoint:
    """The checkpoint that rank 0 finds at `path`, on every rank. Damage that one rank sees all raise.

    `check` may reject it. If a rank finds another checkpoint at that path, all raise.
    """
    opened: Checkpoint | None = None
    error: Exception | None = None
    try:
        opened = open_any(path, tuning)
        if check is not None:
            check(opened)
    except Exception as raised:
        error = raised
    id = b"" if opened is None else opened.id.encode()
    leading = meeting.tell(id if meeting.is_coordinator else None)
    if error is None and leading and leading != id:
        error = AnotherCheckpoint("not the checkpoint that rank 0 found at this path", path=path)
    try:
        meeting.settle(error)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    assert opened is not None
    return opened


def open_newest_together(
    meeting: Meeting, path: str | os.PathLike[str], tuning: Tuning = READING
) -> Checkpoint:
    """The checkpoint that `path` means to rank 0, on every rank; once more if it was retired or replaced
    before all have opened it."""
    attempts = 0
    while True:
        attempts += 1
        found = _resolve(meeting, path)
        try:
            return open_together(meeting, found, tuning=tuning)
        except (AnotherCheckpoint, CheckpointNotFound):  # raised by all, or by none
            if attempts == _MAX_REPLACED:
                raise


def _resolve(meeting: Meeting, path: str | os.PathLike[str]) -> str:
    with meeting.all_or_none():
        found = resolve(path) if meeting.is_coordinator else ""
    return os.fsdecode(meeting.tell(os.fsencode(found) if meeting.is_coordinator else None))
