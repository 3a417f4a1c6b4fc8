"""Filling modules: the plan of `restore` for them.

Parameters and buffers are read straight into their memory, also where it is this rank's part of a larger
tensor. `load_state_dict` is called as well when something else takes part: extra state, hooks, a module that
overrides loading, or that hands out other tensors than those it computes with (FSDP1).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from holdfast.state import fsdp1, sharded
from holdfast.state.destinations import Lookup, Plan
from holdfast.state.node import STATE_DICT, Node, leaf_of, pairs_of, state_dict_body
from holdfast.state.restore_context import RestoreContext
from holdfast.state.targets import array_type, is_array, kind_of, load_state, memory_key
from holdfast.state.torch_arrays import destination
from holdfast.state.torch_objects import module_state
from holdfast.state.unflatten import decode_key, decode_value


def plan_module(context: RestoreContext, module: Any, node: Node, place: str) -> Plan:
    pairs = pairs_of(node)
    if pairs is None:
        return context.wrong(place, f"holds {kind_of(node)}", module, f"the module {type(module).__name__}")
    prefix = f"{place}." if place else ""
    state = module_state(module)
    live = _live_memory(module)
    plans: dict[Any, Plan] = {}
    seen: dict[Any, Node] = {}
    needs_load = _customises_loading(module)
    for key_node, item in pairs:
        stored = decode_key(key_node)
        key = context.renamed(stored)
        if key in seen:
            context.require_same(f"{prefix}{stored}", key, seen[key], item, module)
            continue
        seen[key] = item
        own = state.get(key)
        name = leaf_of(item)
        if context.leaves_out(item, f"{prefix}{stored}"):
            continue
        if key not in state:
            context.extra(f"{prefix}{stored}", item)
        elif name is None or not is_array(own) or _uninitialized(own):
            plans[key] = context.plan_new(item, place=f"{prefix}{key}")
            needs_load = True
        elif _nothing_here(own) or _memory(own) in live:
            plans[key] = context.plan_leaf(own, name, f"{prefix}{key}")
        elif sharded.is_sharded(own):
            # Made for this state dict only. Filled all the same: no rank needs the whole of it.
            plans[key] = context.plan_leaf(own, name, f"{prefix}{key}")
            needs_load = True
        else:
            # A hook made this tensor up: only the module knows where its contents belong.
            array_type(own, f"{prefix}{key}", context.shardings)
            plans[key] = context.plan_new(item, place=f"{prefix}{key}")
            needs_load = True
    for key, own in state.items():
        if key not in seen:
            context.missing(f"{prefix}{key}", own)
    context.compare_names(state, seen)
    metadata = _metadata(node)

    def fill(lookup: Lookup) -> Any:
        found: OrderedDict[Any, Any] = OrderedDict((key, plan(lookup)) for key, plan in plans.items())
        if needs_load:
            if metadata is not None:
                found._metadata = metadata  # type: ignore[attr-defined]
            load_state(_Lenient(module, state), found, place)
        return module

    return fill


@dataclass(frozen=True, slots=True)
class _Lenient:
    """A module whose loading does not mind absent keys: what is absent has been reported already."""

    module: Any
    own: Any

    def load_state_dict(self, state: Any) -> None:
        if not fsdp1.holds_fsdp1(self.module):
            self.module.load_state_dict(state, strict=False)
            return
        for key, tensor in self.own.items():
            state.setdefault(key, tensor)  # FSDP1 does mind absent keys
        fsdp1.load_module(self.module, state)


def _live_memory(module: Any) -> set[Any]:
    """Memory of the module's own parameters and buffers, where writing is the same as loading."""
    own = [*module.parameters(), *module.buffers()]
    return {_memory(tensor) for tensor in own if not _uninitialized(tensor)} - {None}


def _memory(tensor: Any) -> Any:
    local = sharded.local_tensor(tensor)
    return None if local is None else memory_key(destination(local))


def _nothing_here(tensor: Any) -> bool:
    local = sharded.local_tensor(tensor)
    return local is None or not local.numel()


def _uninitialized(tensor: Any) -> bool:
    from torch.nn.parameter import is_lazy

    return bool(is_lazy(tensor))


def _customises_loading(module: Any) -> bool:
    from torch import nn

    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    for part in module.modules():
        for hook in [*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()]:
            # `fully_shard` wants to know about tensors that were replaced, and these are not. That parameters
            # are whole at the moment was ended by the same hook before the module gave its state dict.
            if not _home(hook).startswith("torch.distributed.fsdp._fully_shard."):
                return True
        # torch's own layers override this only to upgrade the checkpoints of old versions.
        if not type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules."):
            return True
    return False


def _home(hook: Any) -> str:
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def _metadata(node: Node) -> Any:
    if type(node) is dict and STATE_DICT in node:
        return decode_value(state_dict_body(node[STATE_DICT])[0])
    return None
