"""States of callbacks that Lightning keys by the callback's class: stored by its name, as data.

A class is found again among the subclasses of ``Callback`` that there are: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback

_MARK = "callback of the type"


def stored_key(key: Any) -> Any:
    if isinstance(key, type) and issubclass(key, Callback):
        return _MARK, key.__module__, key.__qualname__
    return key


def with_names(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of Lightning without classes for keys."""
    return _with_keys(checkpoint, {key: stored_key(key) for key in _keys(checkpoint)})


def with_types(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Reverses `with_names`. The name of an unknown class stays a name, which no callback reads."""
    named = [key for key in _keys(checkpoint) if type(key) is tuple and key[:1] == (_MARK,)]
    if not named:
        return dict(checkpoint)
    types = {stored_key(found): found for found in _subclasses(Callback)}
    return _with_keys(checkpoint, {key: types.get(key, key) for key in named})


def _keys(checkpoint: Mapping[str, Any]) -> list[Any]:
    states = checkpoint.get("callbacks")
    return list(states) if isinstance(states, dict) else []


def _with_keys(checkpoint: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    if all(new is old for old, new in keys.items()):
        return dict(checkpoint)
    states = {keys.get(key, key): state for key, state in checkpoint["callbacks"].items()}
    return {**checkpoint, "callbacks": states}


def _subclasses(of: type[Any]) -> Iterator[type[Any]]:
    for found in of.__subclasses__():
        yield found
        yield from _subclasses(found)
