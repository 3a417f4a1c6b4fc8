"""Which parameter each entry of a torch optimizer's state belongs to.

An optimizer's state dict counts its parameters, in the order in which the optimizer got them; it has their
names only if it was made of `named_parameters`. Otherwise they follow from the order of the model's
parameters, if all shapes agree with exactly one of the usual ways to group them. When in doubt, the numbers
stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.universal.torch_file import StoredTensor
from holdfast.universal.trees import Collected

_BUFFER = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked)$")
# What Hugging Face's Trainer leaves without weight decay.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def is_optimizer_state(tree: object) -> bool:
    """Whether this is the state dict of a torch optimizer."""
    return (
        isinstance(tree, dict)
        and isinstance(tree.get("state"), dict)
        and isinstance(tree.get("param_groups"), list)
        and all(isinstance(group, dict) and "params" in group for group in tree["param_groups"])
    )


def collect_optimizer(
    into: Collected, tree: Mapping[str, Any], place: str, model: Mapping[str, StoredTensor]
) -> bool:
    """Adds an optimizer's state as ``<place>.<parameter>.<state>``, its groups as ``<place>.param_groups``.

    `model` has the model's tensors by the names of their parameters, in the model's order. False if the
    parameters keep their numbers, because their names are not known.
    """
    state, groups = tree["state"], tree["param_groups"]
    names = parameter_names(state, groups, model)
    for key, entries in state.items():
        into.add(entries, f"{place}.{names.get(key, key)}")
    renamed = [{**group, "params": [names.get(key, key) for key in _keys_of(group)]} for group in groups]
    into.add_value(f"{place}.param_groups", renamed)
    for key, value in tree.items():
        if key not in ("state", "param_groups"):
            into.add(value, f"{place}.{key}")
    return all(isinstance(names.get(key, key), str) for key in state)


def parameter_names(
    state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], model: Mapping[str, StoredTensor]
) -> dict[Any, str]:
    """The name of each parameter that an optimizer counts; empty when the file does not tell."""
    keys = [key for group in groups for key in _keys_of(group)]
    if any(isinstance(key, str) for key in (*keys, *state)):
        return {}  # named already
    given = [name for group in groups for name in _names_of(group)]
    if len(given) == len(keys) and len(set(given)) == len(given):
        return dict(zip(keys, given, strict=True))
    found: list[dict[Any, str]] = []
    for candidates in (_parameters(model, buffers=True), _parameters(model, buffers=False)):
        if len(candidates) != len(keys):
            continue
        for order in _orders(candidates, [len(_keys_of(group)) for group in groups], model):
            named = dict(zip(keys, order, strict=True))
            if named not in found and all(_fits(state.get(key), model[name]) for key, name in named.items()):
                found.append(named)
        break
    return found[0] if len(found) == 1 else {}


def _keys_of(group: Mapping[str, Any]) -> list[Any]:
    keys = group["params"]
    return [key for key in keys if isinstance(key, (str, int))] if isinstance(keys, list) else []


def _names_of(group: Mapping[str, Any]) -> list[str]:
    names = group.get("param_names")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _parameters(model: Mapping[str, StoredTensor], *, buffers: bool) -> list[str]:
    """The model's tensors without second names of one memory, with or without what looks like a buffer."""
    seen: set[StoredTensor] = set()
    names: list[str] = []
    for name, tensor in model.items():
        if tensor.count and tensor in seen:
            continue
        seen.add(tensor)
        if buffers or (tensor.dtype in _FLOATS and _BUFFER.search(name) is None):
            names.append(name)
    return names


def _orders(names: list[str], counts: list[int], model: Mapping[str, StoredTensor]) -> list[list[str]]:
    """The orders in which an optimizer with groups of these sizes usually gets the parameters."""
    if len(counts) == 1:
        return [names]
    rules: list[Callable[[str], bool]] = [
        lambda name: _NO_DECAY.search(name) is None,
        lambda name: len(model[name].shape) >= 2,
    ]
    orders = [names] if len(counts) != 2 else []
    for first in rules if len(counts) == 2 else ():
        split = [name for name in names if first(name)], [name for name in names if not first(name)]
        if [len(part) for part in split] == counts:
            orders.append([*split[0], *split[1]])
        if [len(part) for part in reversed(split)] == counts:
            orders.append([*split[1], *split[0]])
    return orders or [names]


def _fits(entries: object, parameter: StoredTensor) -> bool:
    """Whether an optimizer may keep these entries for that parameter."""
    if not isinstance(entries, dict):
        return entries is None
    shapes = [entry.shape for entry in entries.values() if isinstance(entry, StoredTensor) and entry.shape]
    return not shapes or any(shape == parameter.shape[: len(shape)] for shape in shapes)
