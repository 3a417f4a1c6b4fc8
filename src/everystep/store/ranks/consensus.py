"""What succeeds on all ranks or on none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from everystep.store.ranks.errors import RankError, raise_worst, worst
from everystep.store.ranks.replies import all_heard
from everystep.store.ranks.transport import Transport


@contextmanager
def all_or_none(transport: Transport, key: str, timeout: float) -> Iterator[None]:
    """A block that succeeds on all ranks or on none."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    settle(transport, key, error, timeout)


def settle(transport: Transport, key: str, error: Exception | None, timeout: float) -> None:
    """Returns on all ranks if none has an error, raises on all if one has."""

    def decide(messages: Sequence[bytes | None]) -> bytes:
        found = [msgspec.msgpack.decode(message, type=RankError) for message in messages if message]
        if not found:
            all_heard(messages, key, timeout)
            return b""
        return msgspec.msgpack.encode(worst(found))

    mine = b"" if error is None else msgspec.msgpack.encode(RankError.of(transport.rank, error))
    verdict = transport.agree(key, mine, decide, timeout)
    if verdict:
        raise_worst([msgspec.msgpack.decode(verdict, type=RankError)], error, f"{key!r}")
