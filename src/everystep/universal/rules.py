"""The rules of the language: how the ranks of a foreign system hold a parameter.

A `Rule` is a pattern and what holds for the names that match: one layout, and beside it padding, a new name,
or another name that it is tied to. Rules are checked when they are made; whether one fits the shapes of a
parameter is found by `cuts`, `union` and `split`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from everystep.errors import SpecError
from everystep.universal.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Unique:
    """One rank holds the parameter, whole."""

    def __str__(self) -> str:
        return "unique"


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the same values."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a copy that it has changed on its own; the parameter is their mean or their sum."""

    reduce: Literal["mean", "sum"]

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise SpecError(f'partial takes "mean" or "sum", not {self.reduce!r}')

    def __str__(self) -> str:
        return f"partial({self.reduce})"


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One of the tensors that are fused into a parameter.

    `size` is its length along the dimension, or its share. It is cut into `pieces`, which must divide the
    number of ranks; None is one for each rank. With 2 pieces on 8 ranks, ranks 0 to 3 hold the first, 4 to 7
    the second.
    """

    size: int
    pieces: int | None = None

    def __post_init__(self) -> None:
        _require_number("the size of a part", self.size, least=1)
        if self.pieces is not None:
            _require_number("the pieces of a part", self.pieces, least=1)

    def __str__(self) -> str:
        return str(self.size) if self.pieces is None else f"{self.size} in {self.pieces} pieces"


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks hold the parameter one after another along a dimension."""

    dim: int
    pieces: int | None = None

    def __post_init__(self) -> None:
        _require_number("the dimension of shard", self.dim)
        if self.pieces is not None:
            _require_number("the pieces of shard", self.pieces, least=1)

    def __str__(self) -> str:
        return f"shard({self.dim})" if self.pieces is None else f"shard({self.dim}, pieces={self.pieces})"


@dataclass(frozen=True, slots=True)
class Fused:
    """The parameter is several tensors in one, along a dimension, and each of them is cut over the ranks.

    A rank holds its piece of the first, then its piece of the second, and so on; the whole parameter is the
    first whole, then the second whole. `shares`: the sizes of the parts say only how they relate.
    """

    dim: int
    parts: tuple[FusedPart, ...]
    shares: bool = False

    def __post_init__(self) -> None:
        _require_number("the dimension of fused", self.dim)
        if not self.parts:
            raise SpecError("fused takes at least one part")

    def __str__(self) -> str:
        word = "shares" if self.shares else "parts"
        return f"fused({self.dim}, {word} {', '.join(map(str, self.parts))})"


@dataclass(frozen=True, slots=True)
class Flat:
    """The parameter is flattened, padded at its end, and cut into ranges."""

    def __str__(self) -> str:
        return "flat"


@dataclass(frozen=True, slots=True)
class Pad:
    """A dimension is longer in the files than the parameter is; `to` is its true length."""

    dim: int
    to: int

    def __post_init__(self) -> None:
        _require_number("the dimension of pad", self.dim)
        _require_number("the length that pad gives", self.to, least=1)

    def __str__(self) -> str:
        return f"pad({self.dim}, to {self.to})"


@dataclass(frozen=True, slots=True)
class Tied:
    """The parameter is the same as another one, which is named as it is after renaming."""

    to: str

    def __str__(self) -> str:
        return f"tied({self.to})"


@dataclass(frozen=True, slots=True)
class Rename:
    """The parameter gets another name.

    Each ``*`` of `to` stands for what the ``*`` of the same number in a glob matched. With a regular
    expression, `to` has ``\\1`` or ``\\g<name>`` for its groups.
    """

    to: str

    def __str__(self) -> str:
        return f"rename({self.to})"


Layout: TypeAlias = Unique | Replicated | Partial | Shard | Fused | Flat
_LAYOUTS = (Unique, Replicated, Partial, Shard, Fused, Flat)


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for the parameters whose names match. `rule` makes one.

    Attributes:
        match: The pattern of the names.
        layout: How ranks hold them.
        pads: Dimensions that are padded in the files.
        rename: Their new name, if they get one.
        tied: The parameter that they are the same as, if there is one.
    """

    match: Pattern
    layout: Layout = Unique()
    pads: tuple[Pad, ...] = ()
    rename: Rename | None = None
    tied: Tied | None = None

    def __post_init__(self) -> None:
        dims = [pad.dim for pad in self.pads]
        if len(set(dims)) != len(dims):
            raise SpecError(f"{self.match}: two pads for one dimension")
        if self.pads and isinstance(self.layout, Flat):
            raise SpecError(f"{self.match}: flat strips its own padding; it takes no pad")
        if self.rename is not None:
            self.match.check_template(self.rename.to)

    def __str__(self) -> str:
        """What the rule says, without its pattern."""
        layout = () if self.tied is not None else (self.layout,)
        extra = [found for found in (self.tied, self.rename) if found is not None]
        return ", ".join(map(str, (*layout, *self.pads, *extra)))

    def new_name(self, name: str) -> str:
        """The name that a parameter gets from this rule.

        Args:
            name: Its present name, which the rule matches.
        """
        return name if self.rename is None else self.match.expand(name, self.rename.to)


def rule(match: str, *what: Layout | Pad | Rename | Tied) -> Rule:
    """A rule for the parameters whose names match.

    Args:
        match: A glob for whole names (``*`` also matches dots), or a regular expression after ``re:``.
        what: At most one layout, one `rename` and one `tied`, and a `pad` for each padded dimension.

    >>> str(rule("*.embed.weight", shard(0), pad(0, 32000)))
    'shard(0), pad(0, to 32000)'
    """
    layouts = [found for found in what if isinstance(found, _LAYOUTS)]
    renames = [found for found in what if isinstance(found, Rename)]
    ties = [found for found in what if isinstance(found, Tied)]
    if len(layouts) > 1 or len(renames) > 1 or len(ties) > 1:
        raise SpecError(f"{match}: a rule has at most one layout, one rename and one tied")
    if ties and layouts:
        raise SpecError(f"{match}: a tied parameter is laid out as the one that it is tied to")
    pads = tuple(found for found in what if isinstance(found, Pad))
    if ties and pads:
        raise SpecError(f"{match}: a tied parameter is padded as the one that it is tied to")
    return Rule(
        Pattern(match),
        layouts[0] if layouts else Unique(),
        pads,
        renames[0] if renames else None,
        ties[0] if ties else None,
    )


def unique() -> Unique:
    """One rank holds the parameter (pipeline stages, whole files)."""
    return Unique()


def replicated() -> Replicated:
    """Every rank holds the same values; readers take one and verify the others."""
    return Replicated()


def partial(reduce: Literal["mean", "sum"] = "mean") -> Partial:
    """Every rank has changed its copy on its own; the parameter is their mean or sum.

    Args:
        reduce: ``"mean"`` or ``"sum"``.
    """
    return Partial(reduce)


def shard(dim: int, pieces: int | None = None) -> Shard:
    """Cut along a dimension.

    Args:
        dim: The dimension.
        pieces: How many pieces there are, if groups of ranks share one. By default each rank has its own.
    """
    return Shard(dim, pieces)


def part(size: int, pieces: int | None = None) -> FusedPart:
    """A part of `fused`.

    Args:
        size: Its length along the dimension, or its share.
        pieces: Into how many pieces it is cut. By default each rank has its own.
    """
    return FusedPart(size, pieces)


def fused(
    dim: int,
    parts: int | Sequence[int | FusedPart] | None = None,
    *,
    shares: Sequence[int | FusedPart] | None = None,
) -> Fused:
    """Several tensors in one, each cut over the ranks by itself.

    Args:
        dim: The dimension.
        parts: Their sizes along it, or the number of equal ones.
        shares: Instead of sizes, how they relate: ``fused(0, shares=[4, 1, 1])`` is the QKV of a model with
            four query heads for each key head.
    """
    if (parts is None) == (shares is None):
        raise SpecError("fused takes either parts or shares")
    if isinstance(parts, int):
        _require_number("the number of parts", parts, least=1)
        return Fused(dim, (FusedPart(1),) * parts, shares=True)
    return Fused(dim, _parts(parts if shares is None else shares), shares=shares is not None)


def flat() -> Flat:
    """Flattened, padded at the end and cut into ranges (ZeRO)."""
    return Flat()


def pad(dim: int, to: int) -> Pad:
    """A dimension, as a rule the vocabulary's, is padded in the files.

    Args:
        dim: The dimension.
        to: Its true length.
    """
    return Pad(dim, to)


def tied(to: str) -> Tied:
    """The same parameter as another one.

    Args:
        to: The other one's name, after renaming.
    """
    return Tied(to)


def rename(to: str) -> Rename:
    """Another name.

    Args:
        to: The name. `Rename` says how it refers to what the pattern matched.
    """
    return Rename(to)


def _parts(given: Iterable[int | FusedPart] | None) -> tuple[FusedPart, ...]:
    return tuple(found if isinstance(found, FusedPart) else FusedPart(found) for found in given or ())


def _require_number(what: str, value: object, least: int = 0) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"{what} must be a whole number of at least {least}, not {value!r}")
