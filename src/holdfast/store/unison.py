"""What succeeds on all ranks or on none; opening a checkpoint is such a thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.errors import CorruptCheckpoint
from holdfast.store.checkpoint import Checkpoint
from holdfast.store.outcomes import settle
from holdfast.team import Team


@contextmanager
def all_or_none(team: Team, key: str, timeout: float) -> Iterator[None]:
    """A block that succeeds on all ranks or on none."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    settle(team, key, error, timeout)


def open_together(
    team: Team, path: str, timeout: float, check: Callable[[Checkpoint], None] | None = None
) -> Checkpoint:
    """The checkpoint that rank 0 finds at `path`, on every rank. Damage that one rank sees all raise.

    `check` may refuse it. Where a rank's directory of that name holds another checkpoint, nobody goes on.
    """
    opened: Checkpoint | None = None
    error: Exception | None = None
    try:
        opened = Checkpoint(path)
        if check is not None:
            check(opened)
    except Exception as raised:
        error = raised
    id = b"" if opened is None else opened.id.encode()
    leading = team.tell("opened", id if team.is_coordinator else None, timeout)
    if error is None and leading and leading != id:
        error = CorruptCheckpoint("another checkpoint than the one that rank 0 has at this path", path=path)
    try:
        settle(team, "open", error, timeout)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    assert opened is not None
    return opened
