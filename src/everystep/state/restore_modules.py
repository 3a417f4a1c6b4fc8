"""Filling modules: the plan of `restore` for them.

Parameters and buffers are read straight into their memory, also where it is this rank's part of a larger
tensor. `load_state_dict` is called as well when something else takes part: extra state, hooks, a module that
overrides loading, or that hands out other tensors than those it computes with (FSDP1).

A part with loading of its own may size its buffers by what it loads, or know entries under old names. Where
such a part differs from the checkpoint, it gets the tensors and decides, as in torch.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from everystep.state import fsdp1, sharded
from everystep.state.destinations import FillPlan, Lookup
from everystep.state.mismatch import Mismatch
from everystep.state.node import STATE_DICT, Node, leaf_of, pairs_of, state_dict_body
from everystep.state.restore_context import RestoreContext
from everystep.state.targets import (
    array_type,
    describe,
    is_array,
    kind_of,
    load_failed,
    load_state,
    memory_key,
)
from everystep.state.torch_arrays import destination
from everystep.state.torch_objects import module_state
from everystep.state.unflatten import decode_key, decode_value


def plan_module(context: RestoreContext, module: Any, node: Node, place: str) -> FillPlan:
    pairs = pairs_of(node)
    if pairs is None:
        return context.wrong(place, f"holds {kind_of(node)}", module, f"the module {type(module).__name__}")
    prefix = f"{place}." if place else ""
    state = module_state(module)
    live = _live_memory(module)
    metadata = _metadata(node)
    deciding = _Deciding(module, metadata)
    plans: dict[Any, FillPlan] = {}
    seen: dict[Any, Node] = {}
    needs_load = _customises_loading(module)
    unknown: dict[Any, Node] = {}
    for key_node, item in pairs:
        stored = decode_key(key_node)
        key = context.renamed(stored)
        if key in seen:
            context.require_same(f"{prefix}{stored}", key, seen[key], item, module)
            continue
        seen[key] = item
        at = f"{prefix}{key}"
        own = state.get(key)
        name = leaf_of(item)
        if context.leaves_out(item, f"{prefix}{stored}"):
            continue
        if key not in state:
            unknown[key] = item
        elif name is None or not is_array(own) or _uninitialized(own):
            plans[key] = context.plan_new(item, place=at)
            needs_load = True
        elif _another_shape(context, own, name, at) and deciding.about_shape(key):
            plans[key] = context.plan_new(item, place=at)
            target = describe(*array_type(own, at, context.shardings))
            deciding.given[key] = f"{name}: checkpoint {context.meta(name)}, target {target}"
            context.resized.add(at)
        elif _nothing_here(own) or _memory(own) in live:
            plans[key] = context.plan_leaf(own, name, at)
        elif sharded.is_sharded(own):
            # Made for this state dict only. Filled all the same: no rank needs the whole of it.
            plans[key] = context.plan_leaf(own, name, at)
            needs_load = True
        else:
            # A hook made this tensor up: only the module knows where its contents belong.
            array_type(own, at, context.shardings)
            plans[key] = context.plan_new(item, place=at)
            needs_load = True
    for key, own in state.items():
        if key in seen:
            continue
        if context.only is None and deciding.about_absence(key):
            deciding.lacking[key] = own
        else:
            context.missing(f"{prefix}{key}", own)
    for key, item in unknown.items():
        if deciding.about_key(key, shared=context.shared):
            plans[key] = context.plan_new(item, place=f"{prefix}{key}")
            deciding.strange[key] = item
        else:
            context.extra(f"{prefix}{key}", item)
    context.compare_names(state, seen)

    def fill(lookup: Lookup) -> Any:
        found: OrderedDict[Any, Any] = OrderedDict((key, plan(lookup)) for key, plan in plans.items())
        if needs_load or deciding:
            if metadata is not None:
                found._metadata = metadata  # type: ignore[attr-defined]
            if deciding:
                _let_decide(context, module, state, found, deciding, place)
            else:
                load_state(_Lenient(module, state), found, place)
        return module

    return fill


def _another_shape(context: RestoreContext, own: Any, name: str, at: str) -> bool:
    return tuple(context.meta(name).shape) != array_type(own, at, context.shardings)[1]


class _Deciding:
    """What a module decides by itself while it loads, because it has code of its own for that.

    `given`: entries of another shape, with the words for a report. `strange`: entries that it does not have
    now. `lacking`: what it has and the checkpoint does not, with its present value. True if there are any.
    """

    def __init__(self, module: Any, metadata: Any) -> None:
        self._module = module
        self._metadata = metadata
        self.given: dict[Any, str] = {}
        self.strange: dict[Any, Node] = {}
        self.lacking: dict[Any, Any] = {}

    @functools.cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str]]:
        """The paths of parts that decide, and of those that add what old versions lack."""
        if fsdp1.holds_fsdp1(self._module):
            return frozenset(), frozenset()
        parts = list(self._module.named_modules(remove_duplicate=False))
        return (
            frozenset(path for path, part in parts if _decides(part, is_whole=not path)),
            frozenset(path for path, part in parts if _upgrades(part, path, self._metadata)),
        )

    def about_shape(self, key: Any) -> bool:
        return _is_in(key, self._parts[0])

    def about_absence(self, key: Any) -> bool:
        deciding, upgrading = self._parts
        return _is_in(key, deciding) or (type(key) is str and key.rpartition(".")[0] in upgrading)

    def about_key(self, key: Any, *, shared: bool) -> bool:
        """On ranks, what this one does not know belongs to another one, unless it lacks something."""
        return _is_in(key, self._parts[0]) and (not shared or bool(self.lacking))

    def __bool__(self) -> bool:
        return bool(self.given or self.strange or self.lacking)


def _is_in(key: Any, parts: frozenset[str]) -> bool:
    """Whether a key of a state dict belongs to one of these parts of a module."""
    if not parts or type(key) is not str:
        return False
    while key:
        key = key.rpartition(".")[0]
        if key in parts:
            return True
    return False


def _let_decide(
    context: RestoreContext, module: Any, own: Any, found: Any, deciding: _Deciding, place: str
) -> None:
    """Give a module what it decides about. What it does not take is a `StateMismatch`, or reported."""
    prefix = f"{place}." if place else ""
    filled = context.memory_plan.filled
    for key, value in own.items():
        if key not in deciding.lacking or (is_array(value) and filled.covers(value)):
            found.setdefault(key, value)  # tied, or not selected
    saved = {key: (found[key].dtype, found[key].shape) for key in deciding.given}
    strict = context.strict and not context.shared and context.only is None
    try:
        outcome = _load(module, found, strict=strict)
    except Exception as error:
        if context.strict:
            raise load_failed(module, place, error) from error
        # What it does not take stays as it is.
        context.refused(wrong=deciding.given.values())
        found.update((key, own[key]) for key in deciding.given)
        saved = {}
        outcome = _load(module, found, strict=False)
    missing = [f"{prefix}{key}" for key in getattr(outcome, "missing_keys", ()) if key in deciding.lacking]
    unknown = [key for key in getattr(outcome, "unexpected_keys", ()) if key in deciding.strange]
    if context.shared:  # other ranks may have the parts that this one has not
        parts = {path for path, _ in module.named_modules(remove_duplicate=False) if path}
        unknown = [key for key in unknown if key.rpartition(".")[0] in parts]
    extra = [f"{prefix}{key}" for key in unknown]
    now = module_state(module) if saved else {}
    cast = [
        f"{words}, which the module has cast to {now[key].dtype}"
        for key, words in deciding.given.items()
        if key in saved and is_array(now.get(key)) and now[key].shape == saved[key][1]
        if now[key].dtype != saved[key][0]
    ]
    if context.strict and (missing or extra or cast):
        raise load_failed(module, place, Mismatch(tuple(missing), tuple(extra), tuple(cast)))
    context.refused(missing=missing, extra=extra, wrong=cast)


def _load(module: Any, state: Any, *, strict: bool) -> Any:
    """Calls ``load_state_dict``. A module's own version may not have the argument `strict`."""
    known = inspect.signature(module.load_state_dict).parameters
    if "strict" in known or any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return module.load_state_dict(state, strict=strict)
    return module.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class _Lenient:
    """A module that ignores absent keys while it loads, because they have been reported already."""

    module: Any
    own: Any

    def load_state_dict(self, state: Any) -> None:
        if not fsdp1.holds_fsdp1(self.module):
            _load(self.module, state, strict=False)
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
    return any(_takes_part(part, is_whole=part is module) for part in module.modules())


def _takes_part(part: Any, *, is_whole: bool) -> bool:
    """Whether a part of a module has its own code for loading."""
    from torch import nn

    if is_whole and type(part).load_state_dict is not nn.Module.load_state_dict:
        return True
    # `fully_shard` wants to know about tensors that were replaced, and these are not. That parameters
    # are whole at the moment was ended by the same hook before the module gave its state dict.
    if any(not _home(hook).startswith("torch.distributed.fsdp._fully_shard.") for hook in _hooks(part)):
        return True
    # torch's own layers override this only to upgrade the checkpoints of old versions.
    return not type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")


def _decides(part: Any, *, is_whole: bool) -> bool:
    """Whether that code may change which entries there are, and their shapes. Hooks of ranks do not."""
    hooks = _hooks(part)
    if not hooks or not all(_home(hook).startswith("torch.distributed.") for hook in hooks):
        return _takes_part(part, is_whole=is_whole)
    return not type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")


def _upgrades(part: Any, path: str, metadata: Any) -> bool:
    """Whether this is a layer of torch that adds what checkpoints of an old version lack."""
    from torch import nn

    if type(part)._load_from_state_dict is nn.Module._load_from_state_dict:
        return False
    version = metadata.get(path, {}).get("version") if isinstance(metadata, dict) else None
    return bool(version != part._version)


def _hooks(part: Any) -> list[Any]:
    return [*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()]


def _home(hook: Any) -> str:
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def _metadata(node: Node) -> Any:
    if type(node) is dict and STATE_DICT in node:
        return decode_value(state_dict_body(node[STATE_DICT])[0])
    return None
