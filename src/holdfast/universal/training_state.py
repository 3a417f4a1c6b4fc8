"""Arranges what a foreign checkpoint holds as a training state: ``model``, ``optimizer``, and the rest.

`TrainingState` is filled by readers that know which parameter each tensor belongs to. `arranged_names` does
the same for files that have nothing but dotted names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import UnsupportedSource
from holdfast.universal.pickle_machine import Name, Record
from holdfast.universal.state_tree import OptimizerState

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


def plain(value: Any) -> Any:
    """Objects of classes that only their own system knows, as what they are made of: attributes or items.

    For readers of systems that write such objects (a loss scaler, an enum of arguments).
    """
    kind = type(value)
    if kind is Record:
        inside = dict(value.attributes) or value.items
        if not inside:
            inside = value.args[0] if len(value.args) == 1 else value.args
        return plain(inside)
    if kind is Name:
        return value.text
    if kind in (list, tuple):
        return kind(plain(one) for one in value)
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    return value
