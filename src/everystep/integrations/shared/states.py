"""Objects of a framework as parts of a state: attributes, users' entries, and whether a checkpoint fits."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from everystep.errors import StateMismatch
from everystep.state.mismatch import Mismatch

_VALUES = (bool, int, float, str, bytes, type(None))


class Attributes:
    """Attributes of `owner` with these names."""

    def __init__(self, owner: object, *names: str) -> None:
        self._owner = owner
        self._names = names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._names:
            setattr(self._owner, name, state[name])


class ChangedAttributes:
    """Plain attributes of `owner` that have changed since this was made. It is made before training begins.

    Arguments of the constructor are not among them: the user may begin again with another patience, say.
    Restored attributes wait for `release`, since frameworks reset callbacks when training begins. Those in
    `derived` are left out: the object computes them again by itself.
    """

    def __init__(self, owner: object, derived: Collection[str] = ()) -> None:
        self._owner = owner
        self._derived = derived
        self._before = copy.deepcopy(_plain(owner))
        self._held: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        before = self._before
        return {
            name: value
            for name, value in _plain(self._owner).items()
            if name not in self._derived and (name not in before or not _same(value, before[name]))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = state

    def release(self) -> None:
        """Sets the restored attributes of the object, once."""
        held, self._held = self._held, {}
        for name, value in held.items():
            setattr(self._owner, name, value)


def _plain(owner: object) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if isinstance(value, dict):
        return kind is dict and all(type(key) is str and _is_plain(item) for key, item in value.items())
    if isinstance(value, (np.ndarray, np.generic)):
        return not value.dtype.hasobject and value.dtype.names is None
    return kind in _VALUES


def _same(value: Any, before: Any) -> bool:
    try:
        return type(value) is type(before) and bool(value == before)
    except ValueError:  # arrays say it for each element
        return False


def with_entries(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an integration with the user's entries. `ValueError` if a name is in both."""
    if twice := sorted(own.keys() & more.keys()):
        raise ValueError(f"state_of has entries of these names itself: {', '.join(twice)}. Choose others")
    return {**own, **more}


Shapes = Mapping[str, Sequence[int]]
"""The shapes of arrays, by name."""


def require_fit(saved: Shapes, own: Shapes, where: str = "") -> None:
    """`StateMismatch` that lists what differs, unless both have the same names and shapes."""
    missing = tuple(name for name in own if name not in saved)
    extra = tuple(name for name in saved if name not in own)
    wrong = tuple(
        f"{name}: checkpoint {list(shape)}, target {list(own[name])}"
        for name, shape in saved.items()
        if name in own and tuple(shape) != tuple(own[name])
    )
    found = Mismatch(missing, extra, wrong, stored=saved.keys())
    if found:
        raise StateMismatch(
            f"{where}{': ' if where else ''}{found}", missing=missing, extra=extra, wrong=wrong
        )


def merged(groups: Iterable[Shapes]) -> dict[str, Sequence[int]]:
    """The shapes of all groups, as an optimizer has them, in one."""
    return {name: shape for group in groups for name, shape in group.items()}
