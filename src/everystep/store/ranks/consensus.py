"""What succeeds on all ranks or on none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from everystep.store.rank_errors import RankError, raise_worst, worst
from everystep.team import Team
from everystep.team.replies import all_heard


@contextmanager
def all_or_none(team: Team, key: str, timeout: float) -> Iterator[None]:
    """A block that succeeds on all ranks or on none."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    settle(team, key, error, timeout)


def settle(team: Team, key: str, error: Exception | None, timeout: float) -> None:
    """Returns on all ranks if none has an error, raises on all if one has."""

    def decide(messages: Sequence[bytes | None]) -> bytes:
        found = [msgspec.msgpack.decode(message, type=RankError) for message in messages if message]
        if not found:
            all_heard(messages, key, timeout)
            return b""
        return msgspec.msgpack.encode(worst(found))

    mine = b"" if error is None else msgspec.msgpack.encode(RankError.of(team.rank, error))
    verdict = team.agree(key, mine, decide, timeout)
    if verdict:
        raise_worst([msgspec.msgpack.decode(verdict, type=RankError)], error, f"{key!r}")
