"""Names of leaves cut down to the subtrees that they are in, for totals."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from everystep.store import LeafInfo

_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Subtotal:
    """What the leaves of one subtree add up to. Tied names count as leaves, but hold nothing.

    Attributes:
        name: The subtree.
        leaves: How many leaves it has.
        elements: How many elements these have.
        nbytes: Their size.
    """

    name: str
    leaves: int
    elements: int
    nbytes: int


def subtotals(leaves: Mapping[str, LeafInfo], depth: int | None = None) -> tuple[Subtotal, ...]:
    """Totals of the subtrees, in the order of the leaves.

    `depth`: how many parts of a name tell subtrees apart; by default as few as make at least two of them.
    """
    depth = usual_depth(leaves) if depth is None else depth
    groups: dict[str, list[LeafInfo]] = {}
    for name, info in leaves.items():
        groups.setdefault(subtree_of(name, depth), []).append(info)
    return tuple(_subtotal(name, infos) for name, infos in groups.items())


def subtree_of(name: str, depth: int) -> str:
    """The first parts of a dotted name."""
    return ".".join(name.split(".", depth)[:depth])


def usual_depth(names: Collection[str]) -> int:
    """As few parts of the names as tell at least two subtrees apart."""
    for depth in range(1, _DEEPEST):
        if len({subtree_of(name, depth) for name in names}) > 1:
            return depth
    return 1


def _subtotal(name: str, infos: Iterable[LeafInfo]) -> Subtotal:
    every = list(infos)
    stored = [info for info in every if info.alias_of is None]
    elements = sum(math.prod(info.shape) for info in stored)
    return Subtotal(name, len(every), elements, sum(info.nbytes for info in stored))
