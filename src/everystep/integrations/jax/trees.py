"""A pytree as nested dicts of named leaves, and back.

A leaf is named by its path, ``params.dense.kernel`` or ``opt_state.0.mu.dense.kernel``, whatever classes the
nodes have: named tuples, dataclasses, and what is registered with ``jax.tree_util``. Without JAX a checkpoint
reads as nested dicts of numpy arrays. What these do not say of a ``jax.Array`` is stored beside them, under
``_jax``: which arrays are typed random keys, and of which generator; which have a weak type; which have an
element type that is stored as bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax import tree_util

from everystep.errors import StateMismatch, UnsupportedState
from everystep.state import jax_arrays as arrays
from everystep.state.boxed import BoxedArray
from everystep.state.node import NAMELESS
from everystep.state.targets import Rebuilt

T = TypeVar("T")
BESIDE = "_jax"
_VERSION = 1
_Path = tuple[str, ...]


def pytree(tree: T) -> Pytree[T]:
    """A pytree as a part of a state, or as all of it, for `everystep.Checkpointer`, `save` and `load`.

    Saving stores the leaves of `tree`. Restoring leaves `tree` as it is and makes a new one like it: on the
    same devices, with the leaves of the checkpoint. It is what ``restore(into=pytree(tree))`` returns, and
    the attribute `value` afterwards.

    Args:
        tree: Dicts, named tuples, dataclasses and everything else that is registered with ``jax.tree_util``.
            To restore, its leaves may be ``jax.ShapeDtypeStruct``, with or without a sharding.
    """
    return Pytree(tree)


class Pytree(Rebuilt[T]):
    """What `pytree` returns: the tree as `value`."""

    def __init__(self, tree: T) -> None:
        self.value = tree
        self._unfilled: dict[int, BoxedArray] = {}

    def __repr__(self) -> str:
        return f"<everystep.integrations.jax.pytree of {type(self.value).__name__}>"

    def state_dict(self) -> dict[str, Any]:
        leaves, _ = _flatten(self.value)
        found: dict[str, Any] = {}
        weak: list[str] = []
        keys: dict[str, str] = {}
        dtypes: dict[str, str] = {}
        for path, leaf in leaves:
            name = ".".join(path)
            if isinstance(leaf, jax.Array):
                arrays.require_values(leaf, name)
                if arrays.is_key(leaf):
                    keys[name] = arrays.key_name(leaf)
                    leaf = jax.random.key_data(leaf)
                if leaf.weak_type:
                    weak.append(name)
                if (dtype := arrays.foreign_dtype(leaf)) is not None:
                    dtypes[name] = dtype
                leaf = arrays.boxed(leaf)
            _insert(found, path, leaf)
        found[BESIDE] = {"version": _VERSION, "keys": keys, "weak_types": weak, "dtypes": dtypes}
        return found

    def load_state_dict(self, state: object) -> None:
        raise TypeError("a pytree is restored by Everystep, into memory of its own")

    def memory(self, entries: Collection[object]) -> dict[str, Any]:
        """New arrays for all leaves: the tree itself stays as it is."""
        state: dict[str, Any] = {BESIDE: {}} if BESIDE in entries else {}
        self._unfilled = {}
        for path, leaf in _flatten(self.value)[0]:
            if _is_jax(leaf):
                leaf = arrays.empty(arrays.key_data_like(leaf) if arrays.is_key(leaf) else leaf)
                self._unfilled[id(leaf)] = leaf
            elif isinstance(leaf, np.ndarray):
                leaf = np.array(leaf)
            _insert(state, path, leaf)
        return state

    def rebuild(self, memory: dict[str, Any]) -> None:
        said = memory.get(BESIDE) or {"keys": {}, "weak_types": [], "dtypes": {}}
        if said.get("version", _VERSION) != _VERSION:
            raise UnsupportedState(f"a tree of version {said['version']}; this Everystep knows {_VERSION}")
        weak = frozenset(said["weak_types"])
        leaves, structure = _flatten(self.value)
        self.value = tree_util.tree_unflatten(
            structure, [self._leaf(memory, path, like, said, weak) for path, like in leaves]
        )
        self._unfilled = {}

    def _leaf(
        self, memory: Any, path: _Path, like: Any, said: Mapping[str, Any], weak: frozenset[str]
    ) -> Any:
        name, found = ".".join(path), memory
        for key in path:
            found = found[key]
        if not _is_jax(like):
            if isinstance(found, np.ndarray) and not isinstance(like, np.ndarray):
                # A number that has become an array since, as the step of a TrainState does.
                return arrays.typed(jax.device_put(found), weak=name in weak)
            return found
        assert isinstance(found, BoxedArray)
        if id(found) in self._unfilled:  # with strict=False: the checkpoint has nothing for it
            if isinstance(like, jax.Array):
                return like
            raise StateMismatch(f"{name}: not in the checkpoint, and the target has no value", missing=[name])
        is_key = arrays.is_key(like)
        _compare(name, "random keys of", said["keys"].get(name), arrays.key_name(like) if is_key else None)
        if is_key:
            data = arrays.placed(arrays.key_data_like(like), found, weak=False)
            return jax.random.wrap_key_data(data, dtype=like.dtype)
        _compare(name, "elements of type", said["dtypes"].get(name), arrays.foreign_dtype(like))
        return arrays.placed(like, found, weak=name in weak)


def _flatten(tree: object) -> tuple[list[tuple[_Path, Any]], Any]:
    leaves, structure = tree_util.tree_flatten_with_path(tree)
    return [(tuple(map(_key, path)) or (NAMELESS,), leaf) for path, leaf in leaves], structure


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _insert(state: dict[str, Any], path: _Path, leaf: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    if path[-1] in state or path[0] == BESIDE:
        name = ".".join(path)
        raise UnsupportedState(f"{name}: two parts of the tree have this name, or it is {BESIDE!r}, our own")
    state[path[-1]] = leaf


def _is_jax(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _compare(name: str, what: str, stored: str | None, wanted: str | None) -> None:
    if stored != wanted:
        has, wants = (f"{what} {it}" if it else "a plain array" for it in (stored, wanted))
        raise StateMismatch(f"{name}: checkpoint holds {has}, target {wants}", wrong=[name])
