"""Arranges what a foreign checkpoint holds as a training state: ``model``, ``optimizer``, and the rest.

`TrainingState` is filled by readers that know which parameter each tensor belongs to. `arranged_names` does
the same for files that have nothing but dotted names.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from everystep.errors import UnsupportedSource
from everystep.state.node import MAX_DEPTH
from everystep.universal.state_tree import OptimizerState
from everystep.universal.torch_file.pickle_machine import ClassName, InertObject

_MODEL, _OPTIMIZER, _GROUPS = "model", "optimizer", "param_groups"


@dataclass(slots=True)
class TrainingState:
    """A training state by its parts. `path` is for messages.

    `model` has parameters and buffers by name; `states` what the optimizer keeps, by parameter and by its own
    key; `groups` its param_groups; `optimizer` its other entries; `rest` the other entries of the state.
    """

    path: str
    model: dict[str, Any] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[Any] | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self.model:
            made[_MODEL] = self.model
        if self.optimizer and not self.states and self.groups is None:
            made[_OPTIMIZER] = dict(self.optimizer)
        elif self.states or self.groups is not None:
            groups = [{"params": sorted(self.states)}] if self.groups is None else self.groups
            taken = {"state", _GROUPS} & self.optimizer.keys()
            if taken:
                raise UnsupportedSource(f"{self.path}: the optimizer has {taken.pop()!r} twice")
            made[_OPTIMIZER] = OptimizerState({"state": self.states, _GROUPS: groups, **self.optimizer})
        for key, value in self.rest.items():
            if key in made:
                raise UnsupportedSource(f"{self.path}: there are two entries {key!r}")
            made[key] = value
        return made


def arranged_names(path: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays with dotted names: those below ``model.`` and ``optimizer.`` go where a training has them.

    A name below ``optimizer.`` is taken apart where a parameter of the model ends. One that no parameter
    claims stays an entry of the optimizer.
    """
    found = TrainingState(path)
    for name, array in arrays.items():
        head, _, below = name.partition(".")
        if head == _MODEL and below:
            found.model[below] = array
    for name, array in arrays.items():
        head, _, below = name.partition(".")
        if head == _OPTIMIZER and below:
            parameter = next((one for one in longest_first(below) if one in found.model), None)
            if parameter is None:
                found.optimizer[below] = array
            else:
                found.states.setdefault(parameter, {})[below[len(parameter) + 1 :]] = array
        elif head != _MODEL or not below:
            found.rest[name] = array
    return found.tree()


def longest_first(name: str) -> Iterator[str]:
    """What stands before each dot of a name."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def plain(value: Any, path: str) -> Any:
    """Objects of classes that only their own system knows, as what they are made of: attributes or items.

    For readers of systems that write such objects (a loss scaler, an enum of arguments). `path` is for
    messages.
    """
    return _plain(value, path, {}, 0)


def _plain(value: Any, path: str, known: dict[int, Any], depth: int) -> Any:
    """`known`: what was made of objects by their identity, for parts that several objects share."""
    kind = type(value)
    if kind is ClassName:
        return value.text
    if kind is Namespace:
        attributes = vars(value)
        inside = _plain(attributes, path, known, depth + 1)
        return value if inside is attributes else Namespace(**inside)
    if kind is not InertObject and kind not in (list, tuple) and not isinstance(value, dict):
        return value
    if depth > MAX_DEPTH:
        raise UnsupportedSource(f"{path}: objects are nested deeper than {MAX_DEPTH}, or contain themselves")
    if id(value) in known:
        return known[id(value)]
    if kind is InertObject:
        inside = dict(value.attributes) or value.items
        if not inside:
            inside = value.args[0] if len(value.args) == 1 else value.args
        made = _plain(inside, path, known, depth + 1)
    elif kind in (list, tuple):
        items = [_plain(one, path, known, depth + 1) for one in value]
        made = value if all(map(is_, items, value)) else kind(items)
    else:
        keys = [_plain(key, path, known, depth + 1) for key in value]
        items = [_plain(one, path, known, depth + 1) for one in value.values()]
        same = all(map(is_, keys, value)) and all(map(is_, items, value.values()))
        made = value if same else dict(zip(keys, items, strict=True))
    known[id(value)] = made
    return made
