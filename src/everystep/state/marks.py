"""`per_rank` and `rank_zero`: the marks on state that differs between ranks.

Owns the marks only. `flatten` keeps what is marked out of the state that all ranks share; `restore` gives
what is `per_rank` back to the rank that saved it, and what is `rank_zero` to every rank.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


def per_rank(obj: T) -> PerRank[T]:
    """Marks a part of the state as this rank's own: random numbers, the position in the data, statistics.

    Without the mark, Everystep assumes that all ranks hold the same state, or parts of one: it is stored
    once, and any rank may get it back. With it, every rank's value is stored, and restored to the rank of the
    same number. On one process it changes nothing.

    Args:
        obj: The part of the state: anything that a state may hold.

    >>> import everystep
    >>> state = {"step": 7, "rng": everystep.per_rank(everystep.rng())}
    >>> state["rng"].value
    <everystep.rng of this process>
    """
    return PerRank(obj)


def rank_zero(obj: T) -> RankZero[T]:
    """Marks a part of the state that rank 0 stores for all: metrics that only rank 0 gathers, logs.

    Only on rank 0 is ``state_dict`` called. Every rank that has the entry gets back what rank 0 saved, on any
    number of ranks. The mark must stand at an entry of a dict. On one process it changes nothing.

    Args:
        obj: The part of the state: anything that a state may hold.

    >>> import everystep
    >>> state = {"step": 7, "history": everystep.rank_zero({"best": 0.25})}
    >>> state["history"].value
    {'best': 0.25}
    """
    return RankZero(obj)


class RankMark(Generic[T]):
    """A marked part of a state. The class says which ranks it belongs to."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


class PerRank(RankMark[T]):
    """What `per_rank` returns: the marked object as `value`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<everystep.per_rank of {self.value!r}>"


class RankZero(RankMark[T]):
    """What `rank_zero` returns: the marked object as `value`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<everystep.rank_zero of {self.value!r}>"
