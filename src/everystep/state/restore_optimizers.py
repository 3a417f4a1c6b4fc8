"""Filling optimizers: the plan of `restore` for them.

Parameters are matched by name, state tensors that exist already are read in place, and the rest goes through
the optimizer's own `load_state_dict`. That casts state to the dtype of the parameter (float32 moments of a
bfloat16 parameter would lose bits), so what it cast is put right afterwards.

State of a parameter that is distributed over ranks is distributed as the parameter is: where the optimizer
has none yet, it gets tensors of that kind, and this rank reads its part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everystep.state import fsdp1, sharded
from everystep.state.destinations import FillPlan, Lookup
from everystep.state.node import Node, items_of, leaf_of, pairs_of, shorten
from everystep.state.refusals import type_name
from everystep.state.restore_context import RestoreContext
from everystep.state.targets import array_type, describe, is_array, kind_of, load_state
from everystep.state.torch_objects import OptimizerNames, OptimizerView, name_of_index, optimizer_view
from everystep.state.unflatten import decode_key, decode_value

_SWITCHES = frozenset(
    {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
)
"""Fields of groups that came with versions of torch. That one lacks them tells nothing of its kind."""
_ADDED = frozenset(
    {"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "param_names", "swa_lr"}
)
"""Fields that schedulers and names bring into the groups of any optimizer."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """An optimizer's state as it lies in the tree."""

    groups: list[dict[Any, Node]]
    members: list[list[Any]]
    state: dict[Any, Node]
    others: dict[Any, Node]


def _read_saved(context: RestoreContext, node: Node, place: str) -> _Saved | None:
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
        members.append([context.renamed(name) for name in names])
    renamed: dict[Any, Node] = {}
    for key, item in state.items():
        name = context.renamed(key)
        if name in renamed:
            context.wrong(
                f"{place}.{key}" if place else str(key),
                "has another entry of that name, too",
                None,
                f"takes one {name!r}",
            )
        renamed[name] = item
    return _Saved(groups, members, renamed, top)


def _by_key(node: Node) -> dict[Any, Node] | None:
    pairs = pairs_of(node)
    return None if pairs is None else {decode_key(key): item for key, item in pairs}


def plan_optimizer(context: RestoreContext, optimizer: Any, node: Node, place: str) -> FillPlan:
    view = optimizer_view(optimizer, context.parameter_names(), context.state, place)
    current = view.state
    index_names = name_of_index(current, view.names)
    if index_names is None:  # an optimizer with a state of its own form
        return context.plan_stateful(optimizer, node, place)
    saved = _read_saved(context, node, place)
    if saved is None:
        return context.wrong(place, f"holds {kind_of(node)}", optimizer, "an optimizer")
    prefix = f"{place}." if place else ""
    names = view.all_names
    saved_key = _match(names, saved)
    stranger = _other_kind(view, index_names, saved, saved_key)
    if stranger is not None:
        return context.wrong(place, stranger, optimizer, f"is a {type_name(optimizer)}")
    _report(context, names, saved, saved_key, prefix)
    here = set(view.names.flat())
    for name, key in saved_key.items():
        if name not in here:
            context.others(saved.state.get(key))

    # FSDP1's parameters are pieces without a shape; its state dict has distributed tensors.
    fsdp = view.fsdp1
    parameters = _parameter_of_index(view.optimizer, current) if fsdp is None else fsdp1.module_state(fsdp)
    states: dict[Any, dict[Any, FillPlan] | FillPlan] = {}
    # What the checkpoint does not know stays as it is; what it knows as never stepped becomes so.
    keeps = {index for index, name in index_names.items() if name not in saved_key}
    if _is_history_of_others(context, view.optimizer, index_names, saved, saved_key):
        context.wrong(place, "has the history of other parameters", optimizer, "keeps its own")
        keeps = set(index_names)
    for index, name in index_names.items():
        item = saved.state.get(saved_key.get(name))
        if index in keeps or item is None:
            continue
        entries = _by_key(item)
        own = current["state"].get(index)
        if entries is None:
            states[index] = context.plan_new(item)
        elif _of_another_parameter(context, view, own, entries, parameters[index], f"{prefix}{name}"):
            keeps.add(index)
        else:
            states[index] = {
                key: _plan_entry(context, own, key, entry, parameters[index], f"{prefix}{name}.{key}")
                for key, entry in entries.items()
            }
    kept = {index: current["state"][index] for index in keeps if index in current["state"]}
    claimed = {key for group in saved.members for key in group}
    shared: dict[Any, FillPlan] = {}
    for key, item in saved.state.items():
        if key not in claimed and key not in current["state"] and _is_stray(key, item, saved, claimed):
            context.extra(f"{prefix}{key}", item)
        elif key not in claimed:
            shared[key] = context.plan_new(item)
    groups = _plan_groups(context, current, names, saved, saved_key, place)
    others = {key: context.plan_new(item) for key, item in saved.others.items()}

    def fill(lookup: Lookup) -> Any:
        ready: dict[Any, Any] = dict(kept)
        ready |= {
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
    if (_nameless(keys) or not names.known) and _lengths(saved.members) == _lengths(names.groups):
        return dict(zip(own, keys, strict=True))
    return {name: name for name in own if name in known}


def _nameless(keys: Sequence[Any]) -> bool:
    numbered = all(type(key) is int for key in keys)
    return numbered or all(key == f"param.{position}" for position, key in enumerate(keys))


def _lengths(groups: Iterable[Sequence[Any]]) -> list[int]:
    return [len(group) for group in groups]


def _other_kind(
    view: OptimizerView, index_names: dict[Any, str], saved: _Saved, saved_key: dict[str, Any]
) -> str | None:
    """Why the checkpoint seems to be of another kind of optimizer; None when it may be of this one.

    No class is stored, and versions of one class differ in their fields. So do groups to which schedulers or
    users have added fields. Each of three facts is therefore normal by itself, but no two of them together:

    - the groups lack hyperparameters that this optimizer has by default (no ``momentum``);
    - they have some that it does not know (``betas``);
    - the state of a parameter lacks fields that it has here, and has others.

    What passes can be stepped with: fields that the groups lack keep the value that they have here. An
    optimizer that has its own way of loading may know what to do with others.
    """
    if _customises_loading(view.optimizer):
        return None
    defaults = set(view.optimizer.defaults)
    stored = {key for group in saved.groups for key in group}
    lacks = defaults - stored - _SWITCHES
    unknown = stored.difference(defaults, _SWITCHES, _ADDED, *view.state["param_groups"])
    conflict: set[Any] = set()
    for index, name in index_names.items():
        own = view.state["state"].get(index)
        entries = _by_key(saved.state.get(saved_key.get(name)))
        if isinstance(own, dict) and entries and own.keys() - entries.keys():
            conflict |= entries.keys() - own.keys()
    if (bool(lacks), bool(unknown), bool(conflict)).count(True) < 2:
        return None
    has = f"has {_listed(unknown | conflict)}"
    return f"is of another kind of optimizer: it {has}" + (f", and lacks {_listed(lacks)}" if lacks else "")


def _listed(fields: set[Any]) -> str:
    return shorten(", ".join(sorted(map(str, fields))))


def _report(
    context: RestoreContext, names: OptimizerNames, saved: _Saved, saved_key: dict[str, Any], prefix: str
) -> None:
    for name in names.flat():
        if name not in saved_key:
            context.missing(f"{prefix}{name}", None, arrays=True)
    keys = [key for group in saved.members for key in group]
    context.compare_names(names.flat(), keys)
    if not saved_key and keys and names.flat() and _nameless(keys):
        there, here = (", ".join(map(str, _lengths(groups))) for groups in (saved.members, names.groups))
        context.wrong(
            f"{prefix}param_groups", f"groups of {there} parameters without names", None, f"groups of {here}"
        )
    used = set(saved_key.values())
    for group in saved.members:
        for key in group:
            if key not in used:
                context.extra(f"{prefix}{key}", saved.state.get(key))


def _parameter_of_index(optimizer: Any, current: Any) -> dict[Any, Any]:
    return {
        index: parameter
        for group, packed in zip(optimizer.param_groups, current["param_groups"], strict=True)
        for parameter, index in zip(group["params"], packed["params"], strict=True)
    }


def _of_another_parameter(
    context: RestoreContext,
    view: OptimizerView,
    own: Any,
    entries: dict[Any, Node],
    parameter: Any,
    place: str,
) -> bool:
    """Whether saved state is that of a parameter of another shape. It is reported, and left out as a whole.

    Of the shape that the parameter had, its module tells, or the state that the optimizer has now. In
    torch's own optimizers nearly all tensors have the shape of their parameter. An optimizer with loading of
    its own decides about shapes, unless the parameter itself is not restored.
    """
    full = context.parameter_names().get(id(parameter))
    known = "" if full is None else full.full
    if known in context.resized:
        return False
    shape = sharded.whole_shape(parameter, place, context.shardings)
    found = False
    decides, follow = _customises_loading(view.optimizer), _follows_parameters(view.optimizer)
    for key, node in () if decides else entries.items():
        name = leaf_of(node)
        stored = () if name is None else tuple(context.meta(name).shape)
        tensor = own.get(key) if isinstance(own, dict) else None
        follows = follow
        if is_array(tensor):
            follows = array_type(tensor, place, context.shardings)[1] == shape
        if name is not None and follows and stored != shape and (stored or is_array(tensor)):
            wanted = describe(context.meta(name).dtype, shape)
            context.wrong(name, str(context.meta(name)), tensor, wanted)
            found = True
    if not found and known and known in context.misfits:
        context.wrong(place, "has the state of a parameter of another type", None, "keeps its own")
        return True
    return found


def _is_history_of_others(
    context: RestoreContext,
    optimizer: Any,
    index_names: dict[Any, str],
    saved: _Saved,
    saved_key: dict[str, Any],
) -> bool:
    """Whether saved state is one history of all parameters (as LBFGS has it), but of other parameters."""
    from torch.optim import LBFGS

    if not isinstance(optimizer, LBFGS) or _customises_loading(optimizer) or not saved.state:
        return False
    if saved_key.keys() != set(index_names.values()) or len(saved_key) != sum(map(len, saved.members)):
        return True
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {known.full for p in parameters if (known := context.parameter_names().get(id(p))) is not None}
    if places & context.resized:
        return False
    count = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
    shapes = {
        tuple(context.meta(name).shape)
        for item in saved.state.values()
        for entry in (_by_key(item) or {}).values()
        if (name := leaf_of(entry)) is not None
    }
    return bool(places & context.misfits) or not shapes <= {(), (count,)}


def _follows_parameters(optimizer: Any) -> bool:
    """Whether all tensors of a parameter's state have its shape, or none."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")


def _is_stray(key: Any, node: Node, saved: _Saved, claimed: set[Any]) -> bool:
    """Whether this looks like a parameter's state although no group has the parameter.

    Optimizers may keep state that belongs to no parameter, under names of their own.
    """
    if type(key) is not str:
        return True
    if any(key.startswith(f"{name}.") for name in claimed):
        return True
    fields = set(_by_key(node) or ())
    known = (set(_by_key(item) or ()) for name, item in saved.state.items() if name in claimed)
    return bool(fields) and fields in known


def _plan_entry(
    context: RestoreContext, own: Any, key: Any, node: Node, parameter: Any, place: str
) -> FillPlan:
    """One entry of a parameter's state: in place where the optimizer has such a tensor, else a new one.

    A different shape is normal (a history that grows): see `_of_another_parameter` for when it is not.
    """
    name = leaf_of(node)
    if name is None:
        return context.plan_new(node)
    meta = context.meta(name)
    tensor: Any = own.get(key) if isinstance(own, dict) else None
    if is_array(tensor):
        dtype, shape = array_type(tensor, place, context.shardings)
        if (dtype, shape) == (meta.dtype, tuple(meta.shape)):
            return context.plan_leaf(tensor, name, place)
    if key == "step" and not meta.shape:
        return context.plan_new(
            node
        )  # a count, also where the parameter is a single number that is distributed
    model = tensor if sharded.is_sharded(tensor) else parameter
    if sharded.is_sharded(model) and tuple(meta.shape) == sharded.whole_shape(
        model, place, context.shardings
    ):
        return context.plan_leaf(sharded.like(model, meta.dtype), name, place)
    return context.plan_new(node)


def _plan_groups(
    context: RestoreContext,
    current: Any,
    names: OptimizerNames,
    saved: _Saved,
    saved_key: dict[str, Any],
    place: str,
) -> Sequence[dict[Any, FillPlan]]:
    """Hyperparameters for each group of the target, from the saved group that its parameters were in.

    Those that it lacks keep their value: another version, or a schedule, has added them since.
    """
    group_of = {key: number for number, members in enumerate(saved.members) for key in members}
    plans: list[dict[Any, FillPlan]] = []
    for number, (members, packed) in enumerate(zip(names.groups, current["param_groups"], strict=True)):
        own = {key: _constant(value) for key, value in packed.items() if key != "params"}
        sources = {group_of[saved_key[name]] for name in members if name in saved_key}
        if not members and number < len(saved.groups):
            sources = {number}
        if len(sources) == 1:
            (source,) = sources
            keys = [saved_key.get(name) for name in members]
            group = dict(saved.groups[source])
            if keys != saved.members[source]:
                group.pop("param_names", None)  # these follow the order of the saved group
            restored = {key: context.plan_new(item) for key, item in group.items()}
            plans.append(restored | {key: plan for key, plan in own.items() if key not in group})
            continue
        if sources:
            context.wrong(
                f"{place}.param_groups.{number}" if place else f"param_groups.{number}",
                f"keeps its parameters in {len(sources)} groups",
                None,
                "in one",
            )
        plans.append(own)
    return plans


def _constant(value: Any) -> FillPlan:
    return lambda lookup: value


# --- what load_state_dict changed ---------------------------------------------------------------------------


def _undo_casts(optimizer: Any, ready: dict[Any, Any], parameters: dict[Any, Any]) -> None:
    """Give every state tensor the bits that were saved, after `Optimizer.load_state_dict` cast it.

    An optimizer that overrides `load_state_dict` may change its state on purpose, and is left alone.
    """
    if _overrides_loading(optimizer):
        return
    for index, saved in ready.items():
        parameter = parameters.get(index)
        if parameter is not None and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(saved, optimizer.state[parameter])


def _overrides_loading(optimizer: Any) -> bool:
    import torch

    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def _customises_loading(optimizer: Any) -> bool:
    return _overrides_loading(optimizer) or bool(optimizer._optimizer_load_state_dict_pre_hooks)


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
