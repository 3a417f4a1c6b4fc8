"""Filling optimizers: the plan of `restore` for them.

Parameters are matched by name, state tensors that exist already are read in place, and the rest goes through
the optimizer's own `load_state_dict`. That casts state to the dtype of the parameter (float32 moments of a
bfloat16 parameter would lose bits), so what it cast is put right afterwards.

State of a parameter that is spread over ranks is spread as the parameter is: where the optimizer has none
yet, it gets tensors of that kind, and this rank reads its part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.state import fsdp1, sharded
from holdfast.state.landings import Lookup, Plan
from holdfast.state.node import Node, items_of, leaf_of, pairs_of
from holdfast.state.rebuild import decode_key, decode_value
from holdfast.state.targets import array_type, describe, is_array, kind_of, load_state
from holdfast.state.torch_objects import OptimizerNames, OptimizerView, name_of_index, optimizer_view

if TYPE_CHECKING:
    from holdfast.state.restore import Restore


@dataclass(frozen=True, slots=True)
class _Saved:
    """An optimizer's state as it lies in the tree."""

    groups: list[dict[Any, Node]]
    members: list[list[Any]]
    state: dict[Any, Node]
    others: dict[Any, Node]


def _read_saved(node: Node) -> _Saved | None:
    top = _by_key(node)
    group_nodes = items_of(top.pop("param_groups", None)) if top is not None else None
    state = _by_key(top.pop("state", None)) if top is not None else None
    if top is None or group_nodes is None or state is None:
        return None
    groups: list[dict[Any, Node]] = []
    members: list[list[Any]] = []
    for group_node in group_nodes:
        group = _by_key(group_node)
        names = decode_value(group.pop("params", None)) if group is not None else None
        if group is None or type(names) is not list or not all(type(name) in (str, int) for name in names):
            return None
        groups.append(group)
        members.append(names)
    return _Saved(groups, members, state, top)


def _by_key(node: Node) -> dict[Any, Node] | None:
    pairs = pairs_of(node)
    return None if pairs is None else {decode_key(key): item for key, item in pairs}


def plan_optimizer(restore: Restore, optimizer: Any, node: Node, place: str) -> Plan:
    view = optimizer_view(optimizer, restore.parameter_names(), restore.state, place)
    current = view.state
    index_names = name_of_index(current, view.names)
    if index_names is None:  # an optimizer with a state of its own form
        return restore.plan_stateful(optimizer, node, place)
    saved = _read_saved(node)
    if saved is None:
        return restore.wrong(place, f"holds {kind_of(node)}", optimizer, "an optimizer")
    prefix = f"{place}." if place else ""
    names = view.all_names
    saved_key = _match(names, saved)
    _report(restore, names, saved, saved_key, prefix)
    here = set(view.names.flat())
    for name, key in saved_key.items():
        if name not in here:
            restore.others(saved.state.get(key))

    # FSDP1's parameters are pieces without a shape; its state dict has tensors that are spread as they are.
    fsdp = view.fsdp1
    parameters = _parameter_of_index(view.optimizer, current) if fsdp is None else fsdp1.module_state(fsdp)
    states: dict[Any, dict[Any, Plan] | Plan] = {}
    for index, name in index_names.items():
        item = saved.state.get(saved_key.get(name))
        if name not in saved_key or item is None:
            continue
        entries = _by_key(item)
        own = current["state"].get(index)
        if entries is None:
            states[index] = restore.plan_new(item)
        else:
            states[index] = {
                key: _plan_entry(restore, own, key, entry, parameters[index], f"{prefix}{name}.{key}")
                for key, entry in entries.items()
            }
    claimed = {key for group in saved.members for key in group}
    shared = {key: restore.plan_new(item) for key, item in saved.state.items() if key not in claimed}
    groups = _plan_groups(restore, current, names, saved, saved_key, place)
    others = {key: restore.plan_new(item) for key, item in saved.others.items()}

    def fill(lookup: Lookup) -> Any:
        ready: dict[Any, Any] = {
            index: plan(lookup) if callable(plan) else {key: entry(lookup) for key, entry in plan.items()}
            for index, plan in states.items()
        }
        ready.update((key, plan(lookup)) for key, plan in shared.items())
        whole = {key: plan(lookup) for key, plan in others.items()}
        whole["state"] = ready
        whole["param_groups"] = [
            {**{key: plan(lookup) for key, plan in group.items()}, "params": packed["params"]}
            for group, packed in zip(groups, current["param_groups"], strict=True)
        ]
        _load(view, whole, parameters, place)
        return optimizer

    return fill


def _load(view: OptimizerView, whole: dict[Any, Any], parameters: dict[Any, Any], place: str) -> None:
    optimizer = view.optimizer
    if view.fsdp1 is not None:
        whole = fsdp1.optimizer_state_to_load(view.fsdp1, optimizer, whole)
        parameters = _parameter_of_index(optimizer, whole)
    states = dict(whole["state"])
    load_state(optimizer, whole, place)
    _undo_casts(optimizer, states, parameters)
    view.loaded()


def _match(names: OptimizerNames, saved: _Saved) -> dict[str, Any]:
    """Which saved key belongs to which parameter: by name, or by position when one side knows no names."""
    keys = [key for group in saved.members for key in group]
    own = names.flat()
    known = set(keys)
    if known.issuperset(own):
        return {name: name for name in own}
    nameless = all(type(key) is int for key in keys) or all(
        key == f"param.{position}" for position, key in enumerate(keys)
    )
    if (nameless or not names.known) and [len(g) for g in saved.members] == [len(g) for g in names.groups]:
        return dict(zip(own, keys, strict=True))
    return {name: name for name in own if name in known}


def _report(
    restore: Restore, names: OptimizerNames, saved: _Saved, saved_key: dict[str, Any], prefix: str
) -> None:
    for name in names.flat():
        if name not in saved_key:
            restore.missing(f"{prefix}{name}", None)
    used = set(saved_key.values())
    for group in saved.members:
        for key in group:
            if key not in used:
                restore.extra(f"{prefix}{key}", saved.state.get(key))


def _parameter_of_index(optimizer: Any, current: Any) -> dict[Any, Any]:
    return {
        index: parameter
        for group, packed in zip(optimizer.param_groups, current["param_groups"], strict=True)
        for parameter, index in zip(group["params"], packed["params"], strict=True)
    }


def _plan_entry(restore: Restore, own: Any, key: Any, node: Node, parameter: Any, place: str) -> Plan:
    """One entry of a parameter's state: in place where the optimizer has such a tensor, else a new one.

    A different shape is normal (a history that grows) unless the tensor follows the parameter's shape.
    """
    name = leaf_of(node)
    if name is None:
        return restore.plan_new(node)
    meta = restore.meta(name)
    tensor: Any = own.get(key) if isinstance(own, dict) else None
    if is_array(tensor):
        dtype, shape = array_type(tensor, place, restore.shardings)
        if (dtype, shape) == (meta.dtype, tuple(meta.shape)):
            return restore.plan_leaf(tensor, name, place)
        if tuple(meta.shape) != shape == sharded.whole_shape(parameter, place, restore.shardings):
            return restore.wrong(name, str(meta), tensor, describe(dtype, shape))
    if key == "step" and not meta.shape:
        return restore.plan_new(node)  # a count, also where the parameter is a single number that is spread
    model = tensor if sharded.is_sharded(tensor) else parameter
    if sharded.is_sharded(model) and tuple(meta.shape) == sharded.whole_shape(
        model, place, restore.shardings
    ):
        return restore.plan_leaf(sharded.like(model, meta.dtype), name, place)
    return restore.plan_new(node)


def _plan_groups(
    restore: Restore,
    current: Any,
    names: OptimizerNames,
    saved: _Saved,
    saved_key: dict[str, Any],
    place: str,
) -> Sequence[dict[Any, Plan]]:
    """Hyperparameters for each group of the target, from the saved group that its parameters were in."""
    group_of = {key: number for number, members in enumerate(saved.members) for key in members}
    plans: list[dict[Any, Plan]] = []
    for number, (members, packed) in enumerate(zip(names.groups, current["param_groups"], strict=True)):
        sources = {group_of[saved_key[name]] for name in members if name in saved_key}
        if not members and number < len(saved.groups):
            sources = {number}
        if len(sources) == 1:
            (source,) = sources
            keys = [saved_key.get(name) for name in members]
            plan = {key: restore.plan_new(item) for key, item in saved.groups[source].items()}
            if keys != saved.members[source]:
                plan.pop("param_names", None)  # these follow the order of the saved group
            plans.append(plan)
            continue
        if sources:
            restore.wrong(
                f"{place}.param_groups.{number}" if place else f"param_groups.{number}",
                f"keeps its parameters in {len(sources)} groups",
                None,
                "in one",
            )
        own = {key: value for key, value in packed.items() if key != "params"}
        plans.append({key: _constant(value) for key, value in own.items()})
    return plans


def _constant(value: Any) -> Plan:
    return lambda lookup: value


# --- what load_state_dict changed ---------------------------------------------------------------------------


def _undo_casts(optimizer: Any, ready: dict[Any, Any], parameters: dict[Any, Any]) -> None:
    """Give every state tensor the bits that were saved, after `Optimizer.load_state_dict` cast it.

    An optimizer that overrides `load_state_dict` may change its state on purpose, and is left alone.
    """
    import torch

    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for index, saved in ready.items():
        parameter = parameters.get(index)
        if parameter is not None and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(saved, optimizer.state[parameter])


def _exact(saved: Any, loaded: Any) -> Any:
    if type(saved) is not type(loaded):
        return loaded  # the optimizer's own upgrade, such as a step count that became a tensor
    if is_array(saved):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        if saved.keys() != loaded.keys():
            return loaded
        return {key: _exact(item, loaded[key]) for key, item in saved.items()}
    if type(saved) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(_exact(*pair) for pair in zip(saved, loaded, strict=True))
    # torch rebuilds every iterable from a generator, which ruins strings and forgets the limit of a deque.
    return saved
