"""Which parameter each entry of a torch optimizer's state belongs to.

An optimizer's state dict counts its parameters, in the order in which the optimizer got them; it has their
names only if it was made of `named_parameters`. The order of the model's parameters proves nothing: groups
may have been made in any order. So numbers become names only where the file has the names, or where the
shapes admit exactly one assignment. Otherwise the numbers stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from everystep.universal.source import SourceLeaf
from everystep.universal.state_tree import OptimizerState
from everystep.universal.torch_file.reading import StoredTensor

Tensor = StoredTensor | SourceLeaf

_BUFFER = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked)$")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def is_optimizer_state(tree: object) -> bool:
    """Whether this is the state dict of a torch optimizer."""
    return (
        isinstance(tree, dict)
        and isinstance(tree.get("state"), dict)
        and isinstance(tree.get("param_groups"), list)
        and all(isinstance(group, dict) and "params" in group for group in tree["param_groups"])
    )


def optimizer_state(tree: Mapping[str, Any], model: Mapping[str, Tensor]) -> OptimizerState:
    """The state dict of an optimizer, by the names of parameters where they are certain.

    `model` has the model's tensors by name.
    """
    state, groups = tree["state"], tree["param_groups"]
    names = parameter_names(state, groups, model)
    if not names:
        return OptimizerState(tree)
    return OptimizerState(
        {
            **tree,
            "state": {names.get(key, key): entries for key, entries in state.items()},
            "param_groups": [
                {**group, "params": [names.get(key, key) for key in group["params"]]} for group in groups
            ],
        }
    )


def is_named(optimizer: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer is by names, all of it."""
    return all(isinstance(key, str) for key in optimizer["state"])


def parameter_names(
    state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], model: Mapping[str, Tensor]
) -> dict[Any, str]:
    """The name of each parameter that an optimizer counts; empty unless all of them are certain."""
    keys = [key for group in groups for key in _keys_of(group)]
    if len(set(keys)) != len(keys) or not set(state) <= set(keys):
        return {}
    if any(isinstance(key, str) for key in keys):
        return {}  # named already
    given = [name for group in groups for name in _names_of(group)]
    if len(given) == len(keys) and len(set(given)) == len(given):
        return dict(zip(keys, given, strict=True))
    for candidates in (_parameters(model, buffers=True), _parameters(model, buffers=False)):
        if len(candidates) == len(keys):
            return _by_shape(keys, state, {name: model[name].shape for name in candidates})
    return {}


def _keys_of(group: Mapping[str, Any]) -> list[Any]:
    keys = group["params"]
    return [key for key in keys if isinstance(key, (str, int))] if isinstance(keys, list) else []


def _names_of(group: Mapping[str, Any]) -> list[str]:
    names = group.get("param_names")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _parameters(model: Mapping[str, Tensor], *, buffers: bool) -> list[str]:
    """The model's tensors without second names of one memory, with or without what looks like a buffer."""
    seen: set[Tensor] = set()
    names: list[str] = []
    for name, tensor in model.items():
        if math.prod(tensor.shape) and tensor in seen:
            continue
        seen.add(tensor)
        if buffers or (tensor.dtype in _FLOATS and _BUFFER.search(name) is None):
            names.append(name)
    return names


def _by_shape(
    keys: Sequence[Any], state: Mapping[Any, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[Any, str]:
    """The only assignment of parameters to keys in which shapes agree; empty if there are several.

    A key without such tensors (never stepped) may be any parameter. If there is exactly one way, then there
    is always a key with one choice left, or a parameter that one key is left for.
    """
    choices: dict[Any, set[str]] = {}
    for key in keys:
        seen = _shapes_in(state.get(key))
        choices[key] = {name for name, shape in shapes.items() if shape in seen} if seen else set(shapes)
    found: dict[Any, str] = {}
    while choices:
        takers: dict[str, list[Any]] = {}
        for key, names in choices.items():
            for name in names:
                takers.setdefault(name, []).append(key)
        forced = [(key, next(iter(names))) for key, names in choices.items() if len(names) == 1]
        forced += [(its[0], name) for name, its in takers.items() if len(its) == 1]
        if not forced or any(not names for names in choices.values()):
            return {}
        for key, name in forced:
            if key in choices:
                if name not in choices.pop(key):
                    return {}
                found[key] = name
                for names in choices.values():
                    names.discard(name)
    return found if len(set(found.values())) == len(keys) else {}


def _shapes_in(entries: object) -> set[tuple[int, ...]]:
    if not isinstance(entries, dict):
        return set()
    return {entry.shape for entry in entries.values() if isinstance(entry, StoredTensor) and entry.shape}
