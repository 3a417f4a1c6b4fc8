"""What a coordinator hears from all ranks, for decisions that need an answer of every rank."""

from __future__ import annotations

from collections.abc import Sequence

from everystep.errors import RankTimeout

_SHOWN = 8


def all_heard(messages: Sequence[bytes | None], during: str, timeout: float) -> list[bytes]:
    """The messages of all ranks, by rank; `RankTimeout` names those that were not heard of."""
    missing = [rank for rank, message in enumerate(messages) if message is None]
    if missing:
        raise RankTimeout(
            f"{ranks_in_words(missing)} did not come to {during!r} within {timeout:g} s: ended, or busy with "
            "something else",
            ranks=missing,
        )
    return [message for message in messages if message is not None]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2``; of many, the first."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
