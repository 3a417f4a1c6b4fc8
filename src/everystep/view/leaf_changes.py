"""How far two checkpoints of a run are apart, leaf by leaf: exact where checksums tell, sampled elsewhere.

`everystep.inspect.compare` reads every byte. This reads little, so it reports how much.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct, structs

from everystep.inspect.description import exact_bytes, leaf_order, stored_values
from everystep.inspect.element_values import Array, values
from everystep.state import Node
from everystep.store import LeafInfo
from everystep.store.read.checkpoint import Checkpoint, open_newest
from everystep.view.budget import Budget
from everystep.view.leaf_samples import numeric, read_samples, short
from everystep.view.words import shown_path, shown_value

Change = Literal["same", "changed", "alike", "unread", "only_a", "only_b", "kind"]
"""`same`: equal checksums. `changed`: elements differ. `alike`: no element of the sample differs. `unread`:
the checksums differ, or there are none, and no elements were read. `kind`: another type or shape."""

MAX_VALUES = 200


class ChangedLeaf(Struct, frozen=True, array_like=True, gc=False):
    """One leaf. `square` and `square_change`: mean squares of its elements in `a`, and of their change.

    `differing` of `elements` elements were found to differ; `whole`: these are all of the leaf.
    `max_abs` is the largest change of one of them. Squares are over elements that are finite in both.
    `tied`: the leaf that this is another name of; its elements are those of that leaf.
    """

    name: str
    change: Change
    leaf_elements: int = 0
    elements: int = 0
    differing: int = 0
    whole: bool = False
    square: float | None = None
    square_change: float | None = None
    max_abs: float | None = None
    text: str = ""
    tied: str | None = None


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value that is not the same in both; None where there is none."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Changes:
    """All leaves of both, in the order of `b`, and the values that differ, at most `MAX_VALUES` of them."""

    a: str
    b: str
    a_step: int
    b_step: int
    leaves: tuple[ChangedLeaf, ...]
    values: tuple[ChangedValue, ...]
    all_values: int
    read_nbytes: int


def leaf_changes(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, budget: Budget | None = None
) -> Changes:
    """Compares two checkpoints, reading no more than the budget allows.

    Raises `everystep.CorruptCheckpoint` if something that it reads is damaged.
    """
    budget = budget or Budget()
    with open_newest(a) as left, open_newest(b) as right:
        before = budget.spent_nbytes
        leaves = tuple(_leaves(left, right, budget))
        changed = list(_values(stored_values(left.values), stored_values(right.values)))
        return Changes(
            shown_path(left.path),
            shown_path(right.path),
            left.step,
            right.step,
            leaves,
            tuple(changed[:MAX_VALUES]),
            len(changed),
            budget.spent_nbytes - before,
        )


def _leaves(a: Checkpoint, b: Checkpoint, budget: Budget) -> Iterator[ChangedLeaf]:
    sums_a, sums_b = _checksums(a), _checksums(b)
    order = leaf_order(b)
    infos_a, infos_b = a._parts.leaf_infos, b._parts.leaf_infos
    common = {name: None for name in order if name in a and _kind(infos_a[name]) == _kind(infos_b[name])}
    same = {name for name in common if sums_a.get(name) and sums_a[name] == sums_b.get(name)}
    to_read = [name for name in common if name not in same and a._parts.leaf_infos[name].alias_of is None]
    seen = _sampled(a, b, numeric(b._parts.leaf_infos, to_read), budget)
    for name in order:
        info = b._parts.leaf_infos[name]
        count = math.prod(info.shape)
        if name not in a:
            yield ChangedLeaf(name, "only_b", count)
        elif name not in common:
            other = a._parts.leaf_infos[name]
            kinds = (f"{one.dtype} [{', '.join(map(str, one.shape))}]" for one in (other, info))
            yield ChangedLeaf(name, "kind", count, text=" \N{RIGHTWARDS ARROW} ".join(kinds))
        elif name in same or not count:
            yield ChangedLeaf(name, "same", count)
        else:
            alias = info.alias_of if info.alias_of == a._parts.leaf_infos[name].alias_of else None
            found = seen.get(alias or name) or ChangedLeaf(name, "unread", count)
            yield structs.replace(found, name=name, tied=alias)
    for name in leaf_order(a):
        if name not in b:
            yield ChangedLeaf(name, "only_a", math.prod(a._parts.leaf_infos[name].shape))


def _kind(info: LeafInfo) -> tuple[str, tuple[int, ...]]:
    return info.dtype, info.shape


def _checksums(checkpoint: Checkpoint) -> dict[str, object]:
    """Of every leaf, by name: the checksums of its fragments, or None where a fragment has none."""
    found: dict[str, dict[object, str] | None] = {}
    for part in checkpoint._parts:
        for leaf in part.leaves:
            for fragment in leaf.fragments:
                known = found.setdefault(leaf.name, {})
                if not fragment.nbytes or known is None:
                    continue
                if fragment.chunks:
                    known[fragment.start, fragment.shape, part.chunk_nbytes] = fragment.chunks
                else:
                    found[leaf.name] = None
    return {name: found.get(info.alias_of or name) for name, info in checkpoint._parts.leaf_infos.items()}


def _sampled(a: Checkpoint, b: Checkpoint, names: list[str], budget: Budget) -> dict[str, ChangedLeaf]:
    """Both checkpoints are read in step, so the first takes from the budget for both."""
    allowed = Budget(budget.seconds_left, max((budget.nbytes - budget.spent_nbytes) // 2, 0))
    mirror = Budget(seconds=float("inf"), nbytes=2**63)
    found = {}
    for left, right in zip(read_samples(a, names, allowed), read_samples(b, names, mirror), strict=False):
        info = b._parts.leaf_infos[left.name]
        mine, other = values(info.dtype, left.data), values(info.dtype, right.data)
        assert mine is not None
        assert other is not None
        count = math.prod(info.shape)
        if np.array_equal(left.data, right.data):
            change: Change = "same" if left.whole else "alike"
            found[left.name] = ChangedLeaf(left.name, change, count, len(mine), 0, left.whole)
        else:
            found[left.name] = _measured(left.name, count, mine, other, left.whole)
    budget.spent_nbytes += 2 * allowed.spent_nbytes
    return found


def _measured(name: str, count: int, a: Array, b: Array, whole: bool) -> ChangedLeaf:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        left, right = a.astype(wide), b.astype(wide)
        finite = np.isfinite(left) & np.isfinite(right)
        differing = int(np.count_nonzero(~((left == right) | (np.isnan(left) & np.isnan(right)))))
        left, apart = left[finite], np.abs(right[finite] - left[finite])
        squares = [_mean_square(np.abs(left)), _mean_square(apart)]
        most = short(apart.max()) if len(apart) else None
    return ChangedLeaf(name, "changed", count, len(a), differing, whole, squares[0], squares[1], most)


def _mean_square(numbers: Array) -> float | None:
    return short(float(numbers @ numbers) / len(numbers)) if len(numbers) else None


def _values(a: Mapping[str, Node], b: Mapping[str, Node]) -> Iterator[ChangedValue]:
    for name in dict.fromkeys([*b, *a]):
        if name not in a:
            yield ChangedValue(name, None, shown_value(b[name]))
        elif name not in b:
            yield ChangedValue(name, shown_value(a[name]), None)
        elif exact_bytes(a[name]) != exact_bytes(b[name]):
            yield ChangedValue(name, shown_value(a[name]), shown_value(b[name]))
