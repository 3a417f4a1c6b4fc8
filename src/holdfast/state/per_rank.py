"""`per_rank`: the mark on state that belongs to one rank alone.

Owns the mark only. `tree` keeps what is marked out of the state that ranks share, `restore` gives it back to
the rank that saved it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


def per_rank(obj: T) -> PerRank[T]:
    """Marks a part of the state as this rank's own: random numbers, the position in the data, statistics.

    Without the mark, ranks are taken to hold the same state, or parts of one: it is stored once, and any rank
    may get it back. With it every rank's value is stored, and restored to the rank of the same number. On one
    process it changes nothing.

    >>> import holdfast
    >>> state = {"step": 7, "rng": holdfast.per_rank(holdfast.rng())}
    >>> state["rng"].value
    <holdfast.rng of this process>
    """
    return PerRank(obj)


class PerRank(Generic[T]):
    """What `per_rank` returns: the marked object as `value`."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<holdfast.per_rank of {self.value!r}>"
