"""Union: from what the ranks hold of a parameter to a whole leaf. Arithmetic only; no file is opened.

A rank's tensor is a `SourceLeaf` whose boxes are those of the rank's own tensor. It may lie in one place, or
in several as in ZeRO. A rule says where in the whole leaf its elements belong. `split` is the reverse.

`union` joins one parameter, `join` all of them. What a tied name has in the files becomes a further copy of
the leaf, so that a difference is found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from everystep.errors import CorruptCheckpoint, SpecError
from everystep.format import dtypes
from everystep.format.geometry import Box, contiguous_runs, intersect, whole
from everystep.universal.cuts import DoesNotFit, Move, join_widths
from everystep.universal.rules import Flat, Fused, Layout, Partial, Replicated, Rule, Shard, Unique
from everystep.universal.source import SourceFragment, SourceLeaf, flat_fragments
from everystep.universal.spec import Assigned

_MAX_RUNS = 1 << 20

Holders = Sequence[Sequence[SourceLeaf]]
"""For each tensor-parallel rank in order: its tensor and further copies of it (of other data-parallel ranks
or pipeline stages); none for a rank that does not hold the parameter."""


def union(
    name: str, rule: Rule, ranks: Holders, *, leaf: str | None = None, shape: tuple[int, ...] | None = None
) -> SourceLeaf:
    """The whole leaf of a parameter.

    Args:
        name: The parameter, for messages.
        rule: How the ranks hold it.
        ranks: What they hold.
        leaf: The leaf's name, if it is not the parameter's.
        shape: The true shape, which `flat` needs.
    """
    leaf = leaf or name
    found = {held.dtype: held for copies in ranks for held in copies}
    if len(found) > 1:
        shown = ", ".join(f"{dtype} in {_file_of(held)}" for dtype, held in found.items())
        raise CorruptCheckpoint(f"its type differs between ranks: {shown}", leaf=leaf)
    try:
        return _union(leaf, next(iter(found), "F32"), rule, ranks, shape)
    except DoesNotFit as error:
        shown = "; ".join(
            f"rank {rank}: {', '.join(str(list(held.shape)) for held in copies) or 'nothing'}"
            for rank, copies in enumerate(ranks[:16])
        )
        raise SpecError(
            f"parameter {name!r}: rule {rule.match} ({rule}) does not fit: {error}. Shapes: {shown}",
            names=[name],
        ) from None


def join(
    taken: Sequence[Assigned], held: Mapping[str, Holders], prefix: str = "model.", suffix: str = ""
) -> dict[str, SourceLeaf]:
    """The leaves of the parameters that `held` has, by their new names; of tied ones, the same leaf.

    Messages name leaves with `prefix` and `suffix`.
    """
    rules = {found.new_name: found.rule for found in taken}
    leaves: dict[str, SourceLeaf] = {}
    for found in taken:
        if found.tied_to is None and found.name in held:
            name = prefix + found.new_name + suffix
            leaves[found.new_name] = union(found.name, found.rule, held[found.name], leaf=name)
    ties = {
        found.new_name: found.tied_to
        for found in taken
        if found.tied_to is not None and found.tied_to in leaves
    }
    for found in taken:
        if found.new_name in ties and found.tied_to is not None and found.name in held:
            of = leaves[found.tied_to]
            same = union(found.name, rules[found.tied_to], held[found.name], leaf=of.name)
            if (same.shape, same.dtype) != (of.shape, of.dtype):
                raise CorruptCheckpoint(
                    f"it is tied to {found.tied_to!r}, but has shape {list(same.shape)} and type "
                    f"{same.dtype}, not {list(of.shape)} and {of.dtype}",
                    leaf=found.name,
                )
            leaves[found.tied_to] = replace(of, copies=(*of.copies, same.fragments, *same.copies))
    return {**leaves, **{name: leaves[of] for name, of in ties.items()}}


def _union(leaf: str, dtype: str, rule: Rule, ranks: Holders, shape: tuple[int, ...] | None) -> SourceLeaf:
    itemsize = dtypes.itemsize(dtype)
    for copies in ranks:
        for held in copies:
            _require_all(leaf, held)
    if isinstance(rule.layout, Flat):
        if shape is None:
            raise DoesNotFit("the shape of a flat parameter must be known")
        return SourceLeaf(leaf, dtype, shape, _join_flat(ranks, shape, itemsize))
    if any(held.shape != copies[0].shape for copies in ranks for held in copies):
        raise DoesNotFit("copies of one rank's tensor differ in shape")
    padded, placed = place(rule.layout, [copies[0].shape if copies else None for copies in ranks])
    true = strip(rule, padded)
    if shape is not None and shape != true:
        raise DoesNotFit(f"the union has shape {list(true)}, but the parameter has {list(shape)}")
    if isinstance(rule.layout, (Unique, Replicated, Partial)) and true == padded:
        first, *others = (held.fragments for copies in ranks for held in copies)
    else:
        first, *others = _join_boxes(ranks, placed, true, itemsize)
    if isinstance(rule.layout, Partial) and others:
        return SourceLeaf(leaf, dtype, true, first, terms=tuple(others), reduce=rule.layout.reduce)
    return SourceLeaf(leaf, dtype, true, first, copies=tuple(others))


def _join_boxes(
    ranks: Holders, placed: list[list[Move]], true: tuple[int, ...], itemsize: int
) -> Iterator[tuple[SourceFragment, ...]]:
    """The fragments of the whole, once for each copy that there is of some of its boxes."""
    alternatives: dict[Box, list[tuple[SourceFragment, ...]]] = {}
    for copies, moves in zip(ranks, placed, strict=True):
        for held in copies:
            for move in moves:
                inside = intersect(move.source, whole(true))
                if inside is not None:
                    found = tuple(moved(held.fragments, Move(inside, _local_of(inside, move)), itemsize))
                    alternatives.setdefault(inside, []).append(found)
    number = max(map(len, alternatives.values()), default=1)
    for index in range(number):
        yield tuple(
            fragment
            for found in alternatives.values()
            for fragment in found[index if index < len(found) else 0]
        )


def place(
    layout: Layout, shapes: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[int, ...], list[list[Move]]]:
    """The shape of the whole with its padding, and where each rank's elements belong. None: it has none."""
    held = [shape for shape in shapes if shape is not None]
    if not held:
        raise DoesNotFit("no rank holds it")
    if isinstance(layout, Unique) and len(held) > 1:
        raise DoesNotFit(f"{len(held)} ranks hold it")
    if isinstance(layout, (Unique, Replicated, Partial)):
        if len(set(held)) > 1:
            raise DoesNotFit("the ranks' shapes differ")
        all_of_it = Move(whole(held[0]), whole(held[0]))
        return held[0], [[] if shape is None else [all_of_it] for shape in shapes]
    if isinstance(layout, Flat):
        raise DoesNotFit("flat has no boxes")
    if len(held) != len(shapes):
        raise DoesNotFit("some ranks do not hold it")
    return _place_cut(layout, held)


def _place_cut(
    layout: Shard | Fused, shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[list[Move]]]:
    dim = layout.dim
    if any(len(shape) <= dim for shape in shapes):
        raise DoesNotFit(f"there is no dimension {dim}")
    if len({(*shape[:dim], -1, *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise DoesNotFit(f"the ranks' shapes differ beyond dimension {dim}")
    size, ranges = join_widths(layout, [shape[dim] for shape in shapes])
    placed = [[one.move(dim, shapes[0]) for one in mine] for mine in ranges]
    return (*shapes[0][:dim], size, *shapes[0][dim + 1 :]), placed


def strip(rule: Rule, padded: tuple[int, ...]) -> tuple[int, ...]:
    """The true shape of a parameter, without the padding that a rule names."""
    true = list(padded)
    for pad in rule.pads:
        if pad.dim >= len(padded):
            raise DoesNotFit(f"there is no dimension {pad.dim} to take padding from")
        if padded[pad.dim] < pad.to:
            raise DoesNotFit(f"dimension {pad.dim} has length {padded[pad.dim]}, less than {pad.to}")
        true[pad.dim] = pad.to
    return tuple(true)


def moved(fragments: Iterable[SourceFragment], move: Move, itemsize: int) -> Iterator[SourceFragment]:
    """What fragments hold of the box `move.local`, placed where `move.source` is."""
    shift = tuple(a - b for a, b in zip(move.source.start, move.local.start, strict=True))
    for fragment in fragments:
        inside = intersect(fragment.box, move.local)
        if inside is None:
            continue
        runs = contiguous_runs(inside, fragment.box)
        if runs.number > _MAX_RUNS:
            raise DoesNotFit(f"it would be read in {runs.number} runs of {runs.length} elements")
        axis = len(runs.counts)
        length = (*(1,) * axis, *inside.shape[axis:])
        indices = itertools.product(*map(range, inside.start[:axis], inside.stop[:axis]))
        for index, at in zip(indices, runs.offsets(), strict=True):
            start = map(sum, zip((*index, *inside.start[axis:]), shift, strict=True))
            yield SourceFragment(fragment.file, fragment.offset + at * itemsize, Box(tuple(start), length))


def _local_of(inside: Box, move: Move) -> Box:
    """The box of a rank's tensor for a part of `move.source`."""
    start = tuple(
        a - b + c for a, b, c in zip(inside.start, move.source.start, move.local.start, strict=True)
    )
    return Box(start, inside.shape)


def _join_flat(ranks: Holders, shape: tuple[int, ...], itemsize: int) -> tuple[SourceFragment, ...]:
    """Ranges that follow each other; what lies beyond the elements of the shape is padding."""
    if any(len(copies) > 1 for copies in ranks):
        raise DoesNotFit("flat ranges have no copies")
    total = math.prod(shape)
    fragments: list[SourceFragment] = []
    begin = 0
    for copies in ranks:
        for held in copies:
            for fragment in held.fragments:
                start, begin = begin, begin + fragment.box.volume
                bounds = min(start, total), min(begin, total)
                fragments += flat_fragments(fragment.file, fragment.offset, *bounds, shape, itemsize)
    if begin < total:
        raise DoesNotFit(f"the ranks hold {begin} elements, but the parameter has {total}")
    return tuple(fragments)


def _require_all(leaf: str, held: SourceLeaf) -> None:
    count = sum(fragment.box.volume for fragment in held.fragments)
    if count != math.prod(held.shape):
        raise CorruptCheckpoint(
            f"{count} elements are there, but shape {list(held.shape)} has {math.prod(held.shape)}",
            path=_file_of(held),
            leaf=leaf,
        )


def _file_of(held: SourceLeaf) -> str | None:
    return held.fragments[-1].file if held.fragments else None
