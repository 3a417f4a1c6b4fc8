"""Everystep with TensorFlow: `state_of(checkpoint)`, for `everystep.Checkpointer`, `save` and `load`.

It takes what ``tf.train.Checkpoint`` would save of its objects (variables of models and optimizers, iterators
of datasets, random generators, tables), by the paths of these objects.

Names of TensorFlow that this relies on, private but for the first: ``tf.train.TrackableView``;
``_serialize_to_tensors`` and ``_restore_from_tensors`` of trackable objects; ``_seed`` and ``_rng`` of the
eager context.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from everystep.integrations.shared.frameworks import require

require("tensorflow", "2.21", "2.22", extra="tensorflow", builds=("tensorflow-cpu",))

import tensorflow as tf
from tensorflow.python.eager.context import context

from everystep.errors import StateMismatch, UnsupportedState
from everystep.integrations.keras import names as keras_names
from everystep.integrations.shared.states import with_entries
from everystep.state.boxed import unchanging
from everystep.state.mismatch import Mismatch
from everystep.state.rng import rng

_Trackable = tf.__internal__.tracking.Trackable


def state_of(root: Any, **more: Any) -> dict[str, Any]:
    """What ``tf.train.Checkpoint`` saves of `root`, as a state for `everystep.Checkpointer`.

    The state also has the random numbers of Python and NumPy, and the seeds of TensorFlow's eager operations.

    Args:
        root: A ``tf.train.Checkpoint``, a model, a ``tf.Module``, or any other trackable object. Each save
            looks its objects up. To restore them, their variables must exist: build model and optimizer
            first.
        more: Other entries of the state, by name.
    """
    taken = {"objects": _Objects(root), "seeds": _EagerSeeds(), "rng": rng()}
    return with_entries(taken, more)


class _Objects:
    """The objects with state that can be reached from a root, by their paths."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def state_dict(self) -> dict[str, Any]:
        return {
            name: _plain(tensor, name)
            for item in _with_state(self._root)
            for name, tensor in item.tensors().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compares all of it before the first object is changed."""
        items = [(item, item.tensors()) for item in _with_state(self._root)]
        own = {name: item for item, tensors in items for name in tensors}
        different = [
            f"{name}: checkpoint {_form(state[name])}, target {item.form}"
            for name, item in own.items()
            if name in state and not item.takes(state[name])
        ]
        missing = [name for name in own if name not in state]
        extra = [name for name in state if name not in own]
        if mismatch := Mismatch(tuple(missing), tuple(extra), tuple(different)):
            raise StateMismatch(f"{mismatch}", missing=missing, extra=extra, wrong=different)
        for item, tensors in items:
            item.restore({name: _tensor(state[name], tensor.dtype) for name, tensor in tensors.items()})


class _Variable:
    def __init__(self, name: str, variable: Any) -> None:
        self._name, self._variable = name, variable
        self.form = f"{variable.dtype.name}{variable.shape}"

    def tensors(self) -> dict[str, Any]:
        return {self._name: self._variable.read_value()}

    def takes(self, value: Any) -> bool:
        if isinstance(value, bytes):
            return self._variable.dtype in _WITHOUT_NUMPY
        variable = self._variable
        return bool(value.dtype == variable.dtype and variable.shape.is_compatible_with(value.shape))

    def restore(self, tensors: Mapping[str, Any]) -> None:
        self._variable.assign(tensors[self._name])


class _Serializable:
    """An object that turns itself into tensors: an iterator, a table, a ``PythonState``."""

    form = "an object of TensorFlow"

    def __init__(self, name: str, target: Any) -> None:
        self._prefix, self._target = f"{name}.", target

    def tensors(self) -> dict[str, Any]:
        made = self._target._serialize_to_tensors()
        return {f"{self._prefix}{key}": each() if callable(each) else each for key, each in made.items()}

    def takes(self, value: Any) -> bool:
        return True

    def restore(self, tensors: Mapping[str, Any]) -> None:
        start = len(self._prefix)
        if isinstance(self._target, tf.train.experimental.PythonState):
            (text,) = tensors.values()
            self._target.deserialize(text.numpy())
            return
        self._target._restore_from_tensors({name[start:]: tensor for name, tensor in tensors.items()})


def _with_state(root: Any) -> Iterator[_Variable | _Serializable]:
    """The objects with state, each once, the nearest to the root first.

    Layers and optimizers of Keras list their variables by paths of their own. These include their seeds,
    which are not trackable objects.
    """
    waiting = deque([("", root)])
    seen: set[int] = set()
    names: set[str] = set()
    while waiting:
        place, target = waiting.popleft()
        if id(target) in seen:
            continue
        seen.add(id(target))
        prefix = f"{place}." if place else ""
        if isinstance(target, (tf.distribute.DistributedValues, tf.compat.v1.train.Optimizer)):
            raise UnsupportedState(
                f"{place}: everystep.integrations.tensorflow does not support {type(target).__name__}"
            )
        for name, variable in _keras_variables(target, seen).items():
            if id(variable.value) not in seen:
                seen.update((id(variable), id(variable.value)))
                yield _Variable(_unused(prefix + name, names), variable.value)
        plain = getattr(target, "value", None) if _is_keras_variable(target) else target
        if isinstance(plain, tf.Variable):
            yield _Variable(_unused(place, names), plain)
        elif type(target)._serialize_to_tensors is not _Trackable._serialize_to_tensors:
            yield _Serializable(_unused(place, names), target)
        children = tf.train.TrackableView.children(target)
        if isinstance(target, tf.train.Checkpoint):
            children.pop("save_counter", None)  # of checkpoints that TensorFlow writes
        waiting.extend((prefix + name, child) for name, child in children.items())


def _keras_variables(target: Any, seen: set[int]) -> Mapping[str, Any]:
    """Those of an object of Keras by name. None of a layer whose model has listed all of them before: naming
    them layer by layer takes longer than the rest of a save.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    if isinstance(target, keras.optimizers.Optimizer):
        return keras_names.named_slots(target.variables, target._trainable_variables)
    variables = target.variables if isinstance(target, keras.Layer) else []
    listed = all(id(variable.value) in seen for variable in variables)
    return {} if listed else keras_names.named(variables)


def _is_keras_variable(target: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(target, keras.Variable)


def _unused(name: str, names: set[str]) -> str:
    found, count = name, 0
    while found in names:
        count += 1
        found = f"{name}~{count}"
    names.add(found)
    return found


_WITHOUT_NUMPY = (tf.string, tf.variant)
"""Types whose tensors are stored as TensorFlow's own serialized bytes."""


def _plain(tensor: Any, place: str) -> Any:
    if tensor.dtype == tf.resource:
        raise UnsupportedState(f"{place}: TensorFlow has no way to save this resource")
    if tensor.dtype in _WITHOUT_NUMPY:
        return tf.io.serialize_tensor(tensor).numpy()
    return unchanging(np.asarray(tensor))  # TensorFlow puts new values elsewhere while this exists


def _tensor(value: Any, dtype: Any) -> Any:
    return tf.io.parse_tensor(value, dtype) if isinstance(value, bytes) else tf.constant(value)


def _form(value: Any) -> str:
    return "bytes" if isinstance(value, bytes) else f"{value.dtype.name}{value.shape}"


class _EagerSeeds:
    """The seeds of eager random operations: that of ``tf.random.set_seed``, and the ones drawn from it."""

    restore_last = True

    def state_dict(self) -> dict[str, Any]:
        eager = context()
        state: dict[str, Any] = {"seed": eager._seed}
        if eager._seed is not None:
            state["drawn"] = rng(eager._rng).state_dict()["generators"]["0"]["state"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["seed"] is None:
            return
        tf.random.set_seed(state["seed"])  # also forgets kernels that have drawn from these seeds
        words, gauss = state["drawn"]["words"], state["drawn"]["gauss"]
        context()._rng.setstate((3, tuple(words.tolist()), gauss))
