"""Split: from a whole leaf to what each target rank must hold, padding included. The reverse of `union`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from everystep.errors import SpecError
from everystep.format.geometry import Box, boxes_of_range, intersect, subtract, whole
from everystep.universal.cuts import DoesNotFit, Move, RankRange, cut_whole, even
from everystep.universal.rules import Flat, Fused, Partial, Rule, Shard, Unique


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The layout to write: tensor-parallel ranks, pipeline stages, and what a padded length must divide by.

    A padded dimension that is cut over ranks gets a multiple of `divisible_by` on every one of them.
    """

    tp: int = 1
    pp: int = 1
    divisible_by: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "divisible_by"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What one rank gets: the shape of its tensor, where its elements come from, and its padding (zeros)."""

    shape: tuple[int, ...]
    moves: tuple[Move, ...]
    zeros: tuple[Box, ...] = ()


def split(
    name: str, shape: tuple[int, ...], rule: Rule, target: TargetLayout
) -> tuple[LocalPlan | None, ...]:
    """For each tensor-parallel rank of the target what it gets of a leaf; None for one that gets nothing.

    What does not divide is cut so that lengths differ by one at most, the longer ones first.
    """
    try:
        return tuple(_split(shape, rule, target))
    except DoesNotFit as error:
        raise SpecError(
            f"parameter {name!r}: rule {rule.match} ({rule}) does not fit: {error}. "
            f"Shape: {list(shape)}; target: {target.tp} tensor-parallel ranks",
            names=[name],
        ) from None


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Which layers each pipeline stage of the target holds; the first stages hold one more if need be."""
    bounds = [0]
    for number in even(layers, stages):
        bounds.append(bounds[-1] + number)
    return tuple(range(first, last) for first, last in itertools.pairwise(bounds))


def _split(shape: tuple[int, ...], rule: Rule, target: TargetLayout) -> list[LocalPlan | None]:
    layout = rule.layout
    if isinstance(layout, Flat):
        return list(_split_flat(shape, target))
    padded = _padded(shape, rule, target)
    if isinstance(layout, (Shard, Fused)):
        if layout.dim >= len(shape):
            raise DoesNotFit(f"there is no dimension {layout.dim}")
        cut = cut_whole(layout, padded[layout.dim], target.tp)
        return [_cut_plan(shape, padded, layout.dim, mine) for mine in cut]
    moves = (Move(whole(shape), whole(shape)),) if math.prod(shape) else ()
    every = LocalPlan(padded, moves, tuple(subtract(whole(padded), [whole(shape)])))
    if isinstance(layout, Unique):
        return [every, *[None] * (target.tp - 1)]
    if isinstance(layout, Partial) and layout.reduce == "sum":
        nothing = LocalPlan(padded, (), _boxes(whole(padded)))
        return [every, *[nothing] * (target.tp - 1)]
    return [every] * target.tp


def _padded(shape: tuple[int, ...], rule: Rule, target: TargetLayout) -> tuple[int, ...]:
    padded = list(shape)
    for pad in rule.pads:
        if pad.dim >= len(shape):
            raise DoesNotFit(f"there is no dimension {pad.dim} to pad")
        if shape[pad.dim] != pad.to:
            raise DoesNotFit(f"dimension {pad.dim} has length {shape[pad.dim]}, not {pad.to}")
        if isinstance(rule.layout, Fused) and rule.layout.dim == pad.dim:
            raise DoesNotFit("the dimension of fused cannot be padded: its parts would move")
        cut = isinstance(rule.layout, Shard) and rule.layout.dim == pad.dim
        unit = target.divisible_by * (target.tp if cut else 1)
        padded[pad.dim] = -(-pad.to // unit) * unit
    return tuple(padded)


def _cut_plan(shape: tuple[int, ...], padded: tuple[int, ...], dim: int, mine: list[RankRange]) -> LocalPlan:
    local = (*padded[:dim], sum(one.length for one in mine), *padded[dim + 1 :])
    moves: list[Move] = []
    for one in mine:
        move = one.move(dim, shape)
        source = intersect(move.source, whole(shape))
        if source is not None:
            moves.append(Move(source, Box(move.local.start, source.shape)))
    zeros = subtract(whole(local), [move.local for move in moves])
    return LocalPlan(local, tuple(moves), tuple(zeros))


def _split_flat(shape: tuple[int, ...], target: TargetLayout) -> list[LocalPlan]:
    """Equal ranges; the last ones end in padding."""
    total = math.prod(shape)
    unit = target.divisible_by * target.tp
    length = -(-total // unit) * target.divisible_by
    plans: list[LocalPlan] = []
    for rank in range(target.tp):
        at = 0
        moves: list[Move] = []
        for box in boxes_of_range(shape, min(rank * length, total), min((rank + 1) * length, total)):
            moves.append(Move(box, Box((at,), (box.volume,))))
            at += box.volume
        plans.append(LocalPlan((length,), tuple(moves), _boxes(Box((at,), (length - at,)))))
    return plans


def _boxes(box: Box) -> tuple[Box, ...]:
    return (box,) if box.volume else ()
