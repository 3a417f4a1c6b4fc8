"""How a dimension is cut over ranks: by `shard` and `fused`, in both directions.

`cut_whole` cuts a dimension of known length, for a writer. `join_widths` finds out how it was cut from the
lengths that the ranks hold, for a reader. Both give, for each rank, its ranges in the order in which it
holds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everystep.format.geometry import Box
from everystep.universal.rules import Fused, Shard


class DoesNotFit(ValueError):
    """A rule that does not fit the shapes; says why. `union` and `split` add the parameter's name."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of the leaf, and the box of the rank's tensor that has the same elements, in C order."""

    source: Box
    local: Box


@dataclass(frozen=True, slots=True)
class RankRange:
    """`length` elements along the dimension: from `start` of the whole, from `at` of what the rank holds."""

    start: int
    at: int
    length: int

    def move(self, dim: int, shape: tuple[int, ...]) -> Move:
        """The same as boxes; `shape` has the lengths of the other dimensions."""
        origin = (0,) * len(shape)
        lengths = (*shape[:dim], self.length, *shape[dim + 1 :])
        source, local = (
            Box((*origin[:dim], at, *origin[dim + 1 :]), lengths) for at in (self.start, self.at)
        )
        return Move(source, local)


def even(size: int, pieces: int) -> list[int]:
    """Lengths that differ by one at most, the longer ones first."""
    return [size // pieces + (number < size % pieces) for number in range(pieces)]


def chunked(size: int, pieces: int) -> list[int]:
    """Equal lengths as far as they go, as `torch.chunk` cuts; the last ones are shorter, or empty."""
    step = -(-size // pieces)
    return [max(0, min(step, size - number * step)) for number in range(pieces)]


def cut_whole(layout: Shard | Fused, size: int, ranks: int) -> list[list[RankRange]]:
    """The ranges of each rank, of a dimension of length `size`. What does not divide is cut by `even`."""
    pieces = _pieces(layout, ranks)
    if isinstance(layout, Shard):
        return _ranges([even(size, pieces[0])], ranks)
    sizes = [part.size for part in layout.parts]
    if layout.shares:
        unit, rest = divmod(size, sum(sizes))
        if rest:
            raise DoesNotFit(f"length {size} is not a multiple of the shares' sum, {sum(sizes)}")
        sizes = [unit * share for share in sizes]
    elif sum(sizes) != size:
        raise DoesNotFit(f"the parts add up to {sum(sizes)}, but the length is {size}")
    return _ranges([even(*pair) for pair in zip(sizes, pieces, strict=True)], ranks)


def join_widths(layout: Shard | Fused, widths: Sequence[int]) -> tuple[int, list[list[RankRange]]]:
    """The length of the whole, and the ranges of each rank, out of the length that each rank holds."""
    ranks = len(widths)
    pieces = _pieces(layout, ranks)
    if isinstance(layout, Shard):
        lengths = [_of_groups(widths, pieces[0])]
    else:
        lengths = _join_parts(layout, widths, pieces)
    return sum(map(sum, lengths)), _ranges(lengths, ranks)


def _join_parts(layout: Fused, widths: Sequence[int], pieces: list[int]) -> list[list[int]]:
    """The lengths of the pieces of each part."""
    ranks = len(widths)
    times = [ranks // number for number in pieces]  # how many ranks hold each piece
    sizes = [part.size for part in layout.parts]
    held = sum(size * number for size, number in zip(sizes, times, strict=True))
    if layout.shares:
        unit, rest = divmod(sum(widths), held)
        if rest:
            raise DoesNotFit(f"the ranks hold {sum(widths)} in all, which is not a multiple of {held}")
        sizes = [unit * share for share in sizes]
    elif held != sum(widths):
        raise DoesNotFit(f"the ranks hold {sum(widths)} in all, but by the parts they would hold {held}")
    for cut in (even, chunked):
        lengths = [cut(*pair) for pair in zip(sizes, pieces, strict=True)]
        if [sum(s.length for s in held) for held in _ranges(lengths, ranks)] == list(widths):
            return lengths
    return _in_proportion(sizes, times, pieces, widths)


def _in_proportion(
    sizes: list[int], times: list[int], pieces: list[int], widths: Sequence[int]
) -> list[list[int]]:
    """For ranks that hold different numbers of heads: each holds its parts in the proportion of the whole."""
    weights = [size * number for size, number in zip(sizes, times, strict=True)]
    divisor = math.gcd(*weights) or 1
    weights = [weight // divisor for weight in weights]
    total = sum(weights) or 1
    if any(width % total for width in widths):
        raise DoesNotFit(
            f"lengths {', '.join(map(str, widths))} cannot be cut in the proportion of the parts"
        )
    return [
        _of_groups([width // total * weight for width in widths], number)
        for weight, number in zip(weights, pieces, strict=True)
    ]


def _pieces(layout: Shard | Fused, ranks: int) -> list[int]:
    given = [layout.pieces] if isinstance(layout, Shard) else [part.pieces for part in layout.parts]
    pieces = [ranks if number is None else number for number in given]
    for number in pieces:
        if ranks % number:
            raise DoesNotFit(f"{number} pieces cannot be shared evenly by {ranks} ranks")
    return pieces


def _of_groups(widths: Sequence[int], pieces: int) -> list[int]:
    """The length of each piece, which all ranks of its group must hold alike."""
    group = len(widths) // pieces
    for first in range(0, len(widths), group):
        if len(set(widths[first : first + group])) > 1:
            raise DoesNotFit(
                f"ranks that share a piece hold different lengths: {', '.join(map(str, widths))}"
            )
    return list(widths[::group])


def _ranges(lengths: list[list[int]], ranks: int) -> list[list[RankRange]]:
    """Of each rank, given the lengths of the pieces of each part."""
    starts: list[list[int]] = []
    begin = 0
    for part in lengths:
        starts.append([begin + sum(part[:number]) for number in range(len(part))])
        begin += sum(part)
    held: list[list[RankRange]] = []
    for rank in range(ranks):
        mine: list[RankRange] = []
        at = 0
        for part, where in zip(lengths, starts, strict=True):
            number = rank * len(part) // ranks
            mine.append(RankRange(where[number], at, part[number]))
            at += part[number]
        held.append(mine)
    return held
