"""Chainer's ``Serializer`` and ``Deserializer`` as a tree of named leaves, and as an object of the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from chainer.backends import _cpu
from chainer.serializer import Deserializer, Serializer

from everystep.errors import StateMismatch, UnsupportedState

_OPTIONAL = ("extensions.", "extension_triggers.")
"""What a trainer may leave out: an extension that has been removed since."""


class Writer(Serializer):
    """Collects what objects serialize in `tree`. Arrays are those of the objects, not copies."""

    def __init__(self, tree: dict[str, Any] | None = None) -> None:
        self.tree: dict[str, Any] = {} if tree is None else tree

    def __getitem__(self, key: str) -> Writer:
        child = self.tree.setdefault(leaf_name(key), {})
        if not isinstance(child, dict):
            raise UnsupportedState(
                f"{leaf_name(key)}: a value and a parameter have this name. Rename the parameter"
            )
        return Writer(child)

    def __call__(self, key: str, value: Any) -> Any:
        if isinstance(self.tree.get(leaf_name(key)), dict):
            raise UnsupportedState(
                f"{leaf_name(key)}: a value and a parameter have this name. Rename the parameter"
            )
        # Arrays on other devices are copied; numbers stay what they are.
        self.tree[leaf_name(key)] = _cpu._to_cpu(value) if is_array(value) else value
        return value


class Reader(Deserializer):
    """Restores objects from what a `Writer` has collected, with exactly the types that it had."""

    def __init__(self, tree: Mapping[str, Any], place: str = "", unread: set[str] | None = None) -> None:
        self._tree = tree
        self._place = place
        self.unread: set[str] = set(_arrays_in(tree, "")) if unread is None else unread
        """The names of arrays that have not been asked for yet."""

    def __getitem__(self, key: str) -> Reader:
        child = self._tree.get(leaf_name(key))
        return Reader(
            child if isinstance(child, Mapping) else {}, f"{self._place}{leaf_name(key)}.", self.unread
        )

    def __call__(self, key: str, value: Any) -> Any:
        name, place = leaf_name(key), self._place + leaf_name(key)
        if name not in self._tree or isinstance(self._tree[name], Mapping):
            raise _Missing(place)  # a KeyError, for which some objects have an answer
        found = self._tree[name]
        self.unread.discard(place)
        if found is None or value is None:
            return found
        if is_array(value):
            return _filled(place, value, found)
        if isinstance(value, str) is not isinstance(found, str) or np.ndim(found):
            raise _mismatch(place, found, value)
        return found


class _Missing(KeyError):
    """A place that the checkpoint does not have."""


class Serialized:
    """An object that Chainer serializes, as the state tree takes it."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def state_dict(self) -> dict[str, Any]:
        writer = Writer()
        writer.save(self._obj)
        return writer.tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        reader = Reader(tree)
        try:
            reader.load(self._obj)
        except _Missing as error:
            (place,) = error.args
            raise StateMismatch(f"{place}: not in the checkpoint", missing=[place]) from None
        extra = sorted(name for name in reader.unread if not name.startswith(_OPTIONAL))
        if extra:
            some = ", ".join(extra[:8]) + (f" and {len(extra) - 8} more" if len(extra) > 8 else "")
            raise StateMismatch(f"{some}: in the checkpoint only", extra=extra)


def leaf_name(key: str) -> str:
    return key.strip("/").replace("/", ".")


def is_array(value: object) -> bool:
    """Whether it is an array of NumPy, CuPy or ChainerX."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _arrays_in(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, item in tree.items():
        if isinstance(item, Mapping):
            yield from _arrays_in(item, f"{prefix}{key}.")
        elif isinstance(item, np.ndarray):
            yield prefix + key


def _filled(place: str, array: Any, found: Any) -> Any:
    if (array.shape, array.dtype) != (np.shape(found), getattr(found, "dtype", None)):
        raise _mismatch(place, found, array)
    if isinstance(array, np.ndarray):
        np.copyto(array, found, casting="no")
    elif hasattr(array, "set"):  # CuPy's
        array.set(np.asarray(found))
    else:
        array[...] = array.device.xp.array(found)
    return array


def _mismatch(place: str, found: Any, target: Any) -> StateMismatch:
    kinds = [
        f"{item.dtype}{list(item.shape)}" if hasattr(item, "dtype") else type(item).__name__
        for item in (found, target)
    ]
    return StateMismatch(f"{place}: checkpoint {kinds[0]}, target {kinds[1]}", wrong=[place])
