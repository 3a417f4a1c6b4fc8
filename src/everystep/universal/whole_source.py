"""A spec for a source whose parameters are whole already (Hugging Face, torch.save, npz).

To a layout such a parameter is one on a single rank, so only padding, new names and ties change anything.
Sources of several ranks apply a spec themselves, when they join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.errors import SpecError
from everystep.format import dtypes
from everystep.format.geometry import whole
from everystep.universal.cuts import DoesNotFit, Move
from everystep.universal.rules import Rule
from everystep.universal.source import Source, SourceLeaf
from everystep.universal.spec import Assigned, Spec
from everystep.universal.state_tree import OptimizerState, source_of
from everystep.universal.torch_file.leaves import leaf_of
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.union import moved, strip

_MODEL, _OPTIMIZER = "model", "optimizer"


def parameters_of(source: Source) -> list[str]:
    """The names that rules are asked for: arrays of the model, or all if none is said to be one."""
    return list(_parameters(source.state))


def apply_spec(source: Source, spec: Spec) -> Source:
    """The source with the names of a spec, without padding, and with tied parameters once."""
    given = _parameters(source.state)
    taken = {found.name: found for found in spec.assign(given)}
    weights = _renamed(given, taken, {name: leaf.shape for name, leaf in given.items()})
    state = source.state
    if not isinstance(state, dict) or not isinstance(state.get(_MODEL), dict):
        made: object = weights
    else:
        others = _arrays(state[_MODEL], values=True)
        made = {
            **state,
            _MODEL: {**weights, **{taken[k].new_name if k in taken else k: v for k, v in others.items()}},
        }
        if isinstance(state.get(_OPTIMIZER), OptimizerState):
            made[_OPTIMIZER] = _optimizer(state[_OPTIMIZER], taken, {k: v.shape for k, v in given.items()})
    return source_of(
        source.path, source.kind, made, step=source.step, facts=source.facts, carried=source.carried
    )


def _parameters(state: object) -> dict[str, SourceLeaf]:
    model = state.get(_MODEL) if isinstance(state, dict) else None
    return _arrays(model) or _arrays(state)


def _arrays(tree: object, *, values: bool = False) -> dict[str, Any]:
    """The arrays of nested dicts by dotted names; with `values`, what is no array."""
    found: dict[str, Any] = {}
    tensors: dict[StoredTensor, SourceLeaf] = {}
    waiting: list[tuple[str, object]] = [("", tree)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, StoredTensor):
            value = tensors.setdefault(value, leaf_of(name, value))
        if isinstance(value, dict) and value:
            below = [(f"{name}.{key}" if name else str(key), one) for key, one in value.items()]
            waiting.extend(reversed(below))
        elif isinstance(value, SourceLeaf) is not values:
            found[name] = value
    return found


def _renamed(
    arrays: Mapping[str, SourceLeaf], taken: Mapping[str, Assigned], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, SourceLeaf]:
    """Arrays that belong to parameters (weights, or one kind of an optimizer's state) by their new names."""
    made: dict[str, SourceLeaf] = {}
    ties: dict[str, str] = {}
    for name, leaf in arrays.items():
        found = taken[name]
        if found.tied_to is None:
            rule = found.rule if leaf.shape == shapes[name] else Rule(found.rule.match)
            made[found.new_name] = _stripped(leaf, rule, name)
        else:
            ties[name] = found.tied_to
    for name, of in ties.items():
        if of in made:
            made[of] = _with_copy(made[of], arrays[name])
    return {**made, **{taken[name].new_name: made[of] for name, of in ties.items() if of in made}}


def _optimizer(
    optimizer: Mapping[str, Any], taken: Mapping[str, Assigned], shapes: Mapping[str, tuple[int, ...]]
) -> OptimizerState:
    """The state of an optimizer by the new names. What is not of the parameter's shape is kept as it is."""
    states = optimizer.get("state")
    made: dict[Any, Any] = {}
    by_kind: dict[Any, dict[str, SourceLeaf]] = {}
    for name, entries in states.items() if isinstance(states, dict) else ():
        if name not in taken or not isinstance(entries, dict):
            made[name] = entries
            continue
        kept = made.setdefault(taken[name].new_name, {})
        for kind, value in entries.items():
            leaf = leaf_of(f"{name}.{kind}", value) if isinstance(value, StoredTensor) else value
            if isinstance(leaf, SourceLeaf):
                by_kind.setdefault(kind, {})[name] = leaf
                kept[kind] = None  # its place in the order
            else:
                kept[kind] = value
    for kind, arrays in by_kind.items():
        renamed = _renamed(arrays, taken, shapes)
        for name in arrays:
            new_name = taken[name].new_name
            if new_name in renamed:
                made[new_name][kind] = renamed[new_name]
            else:
                del made[new_name][kind]
    groups = optimizer.get("param_groups")
    rest = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}
    if isinstance(groups, list):
        rest["param_groups"] = [_group(group, taken) for group in groups]
    return OptimizerState({"state": made, **rest})


def _group(group: object, taken: Mapping[str, Assigned]) -> object:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        return group
    params = [taken[name].new_name if name in taken else name for name in group["params"]]
    return {**group, "params": params}


def _with_copy(leaf: SourceLeaf, tied: SourceLeaf) -> SourceLeaf:
    """What the tied name holds must be equal, padding aside."""
    if leaf.shape == tied.shape and leaf.dtype == tied.dtype and leaf.fragments != tied.fragments:
        return replace(leaf, copies=(*leaf.copies, tied.fragments))
    return leaf


def _stripped(leaf: SourceLeaf, rule: Rule, name: str) -> SourceLeaf:
    if not rule.pads:
        return leaf
    size = dtypes.itemsize(leaf.dtype)
    try:
        true = strip(rule, leaf.shape)
        if leaf.computed is not None and true != leaf.shape:
            raise DoesNotFit("it is stored compressed, so that padding cannot be taken away")
        move = Move(whole(true), whole(true))
        return replace(
            leaf,
            shape=true,
            fragments=tuple(moved(leaf.fragments, move, size)),
            copies=tuple(tuple(moved(copy, move, size)) for copy in leaf.copies),
            terms=tuple(tuple(moved(term, move, size)) for term in leaf.terms),
        )
    except DoesNotFit as error:
        raise SpecError(
            f"parameter {name!r}: rule {rule.match} ({rule}) does not fit: {error}. "
            f"Shape: {list(leaf.shape)}",
            names=[name],
        ) from None
