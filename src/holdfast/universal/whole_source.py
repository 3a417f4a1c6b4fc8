"""A spec for a source whose parameters are whole already (Hugging Face, torch.save, npz).

To a layout such a parameter is one on a single rank, so only padding, new names and ties change anything.
Sources of several ranks apply a spec themselves, when they join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.errors import SpecError
from holdfast.format import dtypes
from holdfast.format.geometry import Box, intersect, whole
from holdfast.universal.cuts import DoesNotFit
from holdfast.universal.rules import Rule
from holdfast.universal.source import Source, SourceLeaf, Stretch
from holdfast.universal.spec import Assigned, Spec
from holdfast.universal.union import LocalTensor, stretches_of_box, strip

_MODEL, _OPTIMIZER = "model.", "optimizer."
_GROUPS = "optimizer.param_groups"


def parameters_of(source: Source) -> list[str]:
    """The names that rules are asked for: leaves of the model, or all if none is said to be one."""
    names = [leaf.name for leaf in source.leaves]
    models = [name.removeprefix(_MODEL) for name in names if name.startswith(_MODEL)]
    return models or names


def apply_spec(source: Source, spec: Spec) -> Source:
    """The source with the names of a spec, without padding, and with tied parameters once."""
    names = parameters_of(source)
    prefix = _MODEL if any(leaf.name.startswith(_MODEL) for leaf in source.leaves) else ""
    taken = {found.name: found for found in spec.assign(names)}
    shapes = {leaf.name.removeprefix(prefix): leaf.shape for leaf in source.leaves}
    leaves: dict[str, SourceLeaf] = {}
    ties: list[tuple[SourceLeaf, str]] = []
    for leaf in source.leaves:
        before, name, after = _parameter(leaf.name, prefix, taken)
        if name is None:
            leaves[leaf.name] = leaf
            continue
        found = taken[name]
        if found.tied_to is not None:
            ties.append((replace(leaf, name=before + found.new_name + after), before + found.tied_to + after))
            continue
        rule = found.rule if leaf.shape == shapes[name] else Rule(found.rule.match)
        made = _stripped(leaf, rule, name, before + found.new_name + after)
        leaves[made.name] = made
    aliases = {
        _renamed(name, prefix, taken): _renamed(of, prefix, taken) for name, of in source.aliases.items()
    }
    for leaf, of in ties:
        if of in leaves:
            _tie(leaves, leaf, of)
            aliases[leaf.name] = of
    values = {_renamed(name, prefix, taken): value for name, value in source.values.items()}
    groups = values.get(_GROUPS)
    if isinstance(groups, list):
        values[_GROUPS] = [_group(group, taken) for group in groups]
    return replace(source, leaves=tuple(leaves.values()), aliases=aliases, values=values)


def _parameter(leaf: str, prefix: str, taken: Mapping[str, Assigned]) -> tuple[str, str | None, str]:
    """A leaf's name as what stands before the parameter's name, that name, and what stands after it."""
    name = leaf.removeprefix(prefix)
    if leaf.startswith(prefix) and name in taken:
        return prefix, name, ""
    if leaf.startswith(_OPTIMIZER):
        middle, _, last = leaf.removeprefix(_OPTIMIZER).rpartition(".")
        if middle in taken:
            return _OPTIMIZER, middle, f".{last}"
    return "", None, ""


def _renamed(leaf: str, prefix: str, taken: Mapping[str, Assigned]) -> str:
    before, name, after = _parameter(leaf, prefix, taken)
    return leaf if name is None else before + taken[name].new_name + after


def _group(group: object, taken: Mapping[str, Assigned]) -> object:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        return group
    params = [taken[name].new_name if name in taken else name for name in group["params"]]
    return {**group, "params": params}


def _tie(leaves: dict[str, SourceLeaf], leaf: SourceLeaf, of: str) -> None:
    """What the tied name holds must be equal, padding aside."""
    other = leaves[of]
    if leaf.shape == other.shape and leaf.dtype == other.dtype and leaf.stretches != other.stretches:
        leaves[of] = replace(other, copies=(*other.copies, leaf.stretches))


def _stripped(leaf: SourceLeaf, rule: Rule, name: str, new_name: str) -> SourceLeaf:
    if not rule.pads:
        return replace(leaf, name=new_name)
    try:
        true = strip(rule, leaf.shape)
        if leaf.computed is not None and true != leaf.shape:
            raise DoesNotFit("it is stored compressed, so that padding cannot be taken away")
    except DoesNotFit as error:
        raise SpecError(
            f"parameter {name!r}: rule {rule.match} ({rule}) does not fit: {error}. "
            f"Shape: {list(leaf.shape)}",
            names=[name],
        ) from None
    size = dtypes.itemsize(leaf.dtype)
    return replace(
        leaf,
        name=new_name,
        shape=true,
        stretches=_cut(leaf.stretches, true, size),
        copies=tuple(_cut(copy, true, size) for copy in leaf.copies),
        terms=tuple(_cut(term, true, size) for term in leaf.terms),
    )


def _cut(stretches: tuple[Stretch, ...], shape: tuple[int, ...], itemsize: int) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    for stretch in stretches:
        inside = intersect(stretch.box, whole(shape))
        if inside is not None:
            held = LocalTensor.at(stretch.file, stretch.offset, stretch.box.shape)
            first = tuple(a - b for a, b in zip(inside.start, stretch.box.start, strict=True))
            found += stretches_of_box(held, Box(first, inside.shape), inside.start, itemsize)
    return tuple(found)
