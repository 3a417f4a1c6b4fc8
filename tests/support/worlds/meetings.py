"""Meetings of the ranks of a test's world."""

from __future__ import annotations

from everystep.store.ranks.meeting import Meeting, open_meeting
from everystep.store.ranks.transport import join
from support.worlds.patience import PATIENCE_SECONDS


def meet(what: str = "the test", timeout: float = PATIENCE_SECONDS) -> Meeting:
    """A meeting of all ranks, which have come."""
    transport = join()
    assert transport is not None
    meeting = open_meeting(transport, what, timeout)
    meeting.meet()
    return meeting
