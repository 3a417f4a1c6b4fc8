"""A pytree as nested dicts of named leaves, and back.

A leaf is named by its path, ``params.dense.kernel`` or ``opt_state.0.mu.dense.kernel``, whatever classes the
nodes have: named tuples, dataclasses, and what is registered with ``jax.tree_util``. Without JAX a checkpoint
reads as nested dicts of numpy arrays. What these do not say of a ``jax.Array`` is stored beside them under
``_jax``: which are typed random keys, of which generator; which have a weak type; which have an element type
that is stored as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import tree_util

from everystep.errors import StateMismatch, UnsupportedState
from everystep.state import jax_arrays as arrays
from everystep.state.boxed import BoxedArray
from everystep.state.node import NAMELESS

BESIDE = "_jax"
_VERSION = 1
_Path = tuple[str, ...]


class Live:
    """A tree to be saved: an object of which the save asks the state, and only if it is due."""

    def __init__(self, tree: object) -> None:
        self._tree = tree

    def state_dict(self) -> dict[str, Any]:
        leaves, _ = _flatten(self._tree)
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
        raise TypeError(
            "a tree is restored by everystep.integrations.jax.load, or the restore of its Checkpointer"
        )


class Target:
    """A tree to be restored: `state` is what a load fills, and `tree` what it makes of that.

    The tree that says what it is like stays as it is. `described`: the checkpoint was saved by this module.
    """

    def __init__(self, like: Any, *, described: bool = True) -> None:
        self._leaves, self._structure = _flatten(like)
        self.state: dict[str, Any] = {BESIDE: {}} if described else {}
        self._unfilled: dict[int, BoxedArray] = {}
        for path, leaf in self._leaves:
            if _is_jax(leaf):
                leaf = arrays.empty(arrays.key_data_like(leaf) if arrays.is_key(leaf) else leaf)
                self._unfilled[id(leaf)] = leaf
            elif isinstance(leaf, np.ndarray):
                leaf = np.array(leaf)
            _insert(self.state, path, leaf)

    @property
    def filled(self) -> bool:
        """Whether a checkpoint of this module has been restored into it."""
        return bool(self.state.get(BESIDE))

    def tree(self) -> Any:
        said = self.state.get(BESIDE) or {"keys": {}, "weak_types": [], "dtypes": {}}
        if said.get("version", _VERSION) != _VERSION:
            raise UnsupportedState(f"a tree of version {said['version']}; this Everystep knows {_VERSION}")
        weak = frozenset(said["weak_types"])
        return tree_util.tree_unflatten(
            self._structure, [self._leaf(path, like, said, weak) for path, like in self._leaves]
        )

    def _leaf(self, path: _Path, like: Any, said: Mapping[str, Any], weak: frozenset[str]) -> Any:
        name = ".".join(path)
        found: Any = self.state
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


def knows_jax(values: Mapping[str, object]) -> bool:
    """Whether a checkpoint with these values was saved by this module."""
    return f"{BESIDE}.version" in values


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
