"""The attributes of an estimator as arrays and plain values, and back. No pickle, and no code in data.

`take_apart` turns attributes into a tree of plain values and named arrays; `put_together` is its inverse.
Other objects are kept if they are scikit-learn's: estimators, optimizers and losses. Their class is named in
the tree, and only such classes of scikit-learn are ever made from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator

from everystep.errors import CorruptCheckpoint, UnsupportedState

Array = np.ndarray[Any, Any]
_SPARSE = ("csr_matrix", "csc_matrix", "csr_array", "csc_array")
_PLAIN = (bool, int, float, complex, str, bytes)
_REBUILT = ("sklearn.linear_model._sgd_fast.", "sklearn._loss.")
"""Compiled classes: made again by a call with the arguments that `__reduce__` gives."""
_OPTIMIZERS = "sklearn.neural_network._stochastic_optimizers."


def attributes_of(estimator: Any) -> dict[str, Any]:
    """What fitting has added to an estimator: everything in it but its parameters and our own attributes."""
    parameters = estimator.get_params(deep=False)
    return {
        name: value
        for name, value in vars(estimator).items()
        if name not in parameters and not name.startswith("_everystep") and not _is_setting(name)
    }


def _is_setting(name: str) -> bool:
    """Whether scikit-learn sets this attribute from outside of ``fit``."""
    return "callback" in name or name in ("_sklearn_output_config", "_metadata_request")


def take_apart(attributes: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Any, dict[str, Array]]:
    """Attributes as a tree of plain values, and the arrays that it names.

    An object that is one of the `parameters` stays a reference to it, so that the two stay one.
    """
    writer = _Writer(parameters)
    tree = [[name, writer.node(value, name)] for name, value in attributes.items()]
    return tree, writer.arrays


def put_together(tree: Any, arrays: Mapping[str, Array], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that `take_apart` took apart. The arrays are copies: a shelf's are read-only."""
    reader = _Reader(arrays, parameters)
    return {name: reader.value(node) for name, node in tree}


class _Writer:
    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.arrays: dict[str, Array] = {}
        self._parameters = {
            id(value): name for name, value in parameters.items() if isinstance(value, np.random.RandomState)
        }
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # an id is only good while its object lives

    def node(self, value: Any, place: str) -> Any:
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, np.ndarray):
            return self._array(value, place)
        if isinstance(value, np.generic):
            return ["scalar", self.node(np.asarray(value), place)]
        if type(value) in (list, tuple, set, frozenset):
            return [type(value).__name__, [self.node(v, f"{place}.{i}") for i, v in enumerate(value)]]
        if isinstance(value, dict) and type(value) is dict:
            pairs = enumerate(value.items())
            return [
                "dict",
                [[self.node(k, f"{place}.key{i}"), self.node(v, f"{place}.{i}")] for i, (k, v) in pairs],
            ]
        if isinstance(value, np.random.RandomState):
            kind, key, *rest = value.get_state(legacy=True)
            state = [kind, self.node(key, f"{place}.key"), *(self.node(v, place) for v in rest)]
            return ["random state", self._parameters.get(id(value)), state]
        if sparse.issparse(value) and type(value).__name__ in _SPARSE:
            parts = [self.node(getattr(value, n), f"{place}.{n}") for n in ("data", "indices", "indptr")]
            return ["sparse", type(value).__name__, list(value.shape), parts]
        return self._object(value, place)

    def _array(self, value: Array, place: str) -> Any:
        if type(value) is not np.ndarray or value.dtype.names:
            raise _unsupported(value, place)
        if value.dtype.kind in "OU":
            items = [self.node(v, f"{place}.{i}") for i, v in enumerate(value.reshape(-1).tolist())]
            return ["texts", value.dtype.str, list(value.shape), items]
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = place
            self._kept.append(value)
            # Later sums may depend on the order in memory: an array in Fortran order comes back in it.
            self.arrays[name] = value.T if _in_fortran_order(value) else value
        return ["array", name, "F" if _in_fortran_order(value) else "C"]

    def _object(self, value: Any, place: str) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind.startswith(_REBUILT):
            made = value.__reduce__()
            if made[0] is type(value) and len(made) == 2:
                return ["rebuilt", kind, [self.node(v, f"{place}.{i}") for i, v in enumerate(made[1])]]
        if kind.startswith(_OPTIMIZERS) or (kind.startswith("sklearn.") and isinstance(value, BaseEstimator)):
            inner = [[name, self.node(v, f"{place}.{name}")] for name, v in vars(value).items()]
            return ["object", kind, inner]
        raise _unsupported(value, place)


class _Reader:
    def __init__(self, arrays: Mapping[str, Array], parameters: Mapping[str, Any]) -> None:
        self._arrays, self._parameters = arrays, parameters
        self._made: dict[tuple[str, str], Array] = {}

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind == "array":
            return self._array(*rest)
        if kind == "scalar":
            return self.value(rest[0])[()]
        if kind in ("list", "tuple", "set", "frozenset"):
            items = [self.value(v) for v in rest[0]]
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        if kind == "dict":
            return {self.value(k): self.value(v) for k, v in rest[0]}
        if kind == "texts":
            dtype, shape, items = rest
            array = np.empty(shape, dtype)
            array.reshape(-1)[:] = [self.value(v) for v in items]
            return array
        if kind == "random state":
            parameter, state = rest
            found = np.random.RandomState() if parameter is None else self._parameters[parameter]
            found.set_state(tuple(self.value(v) for v in state))
            return found
        if kind == "sparse":
            form, shape, parts = rest
            if form not in _SPARSE:
                raise CorruptCheckpoint(f"an estimator does not hold sparse data of type {form}")
            return getattr(sparse, form)(tuple(self.value(v) for v in parts), shape=tuple(shape))
        if kind == "rebuilt":
            return _class(rest[0], _REBUILT)(*(self.value(v) for v in rest[1]))
        if kind == "object":
            made: Any = object.__new__(_class(rest[0], ("sklearn.",)))
            vars(made).update({name: self.value(v) for name, v in rest[1]})
            return made
        raise CorruptCheckpoint(f"there is no kind {kind!r} of values in an estimator")

    def _array(self, name: str, order: str) -> Array:
        if (name, order) not in self._made:
            stored = self._arrays[name]
            self._made[name, order] = stored.T.copy(order="F") if order == "F" else stored.copy()
        return self._made[name, order]


def _in_fortran_order(array: Array) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _class(name: str, allowed: tuple[str, ...]) -> type:
    module, _, attribute = name.rpartition(".")
    found: Any = None
    if name.startswith(allowed):
        found = getattr(importlib.import_module(module), attribute, None)
    known = isinstance(found, type) and (
        name.startswith((*_REBUILT, _OPTIMIZERS)) or issubclass(found, BaseEstimator)
    )
    if not known:
        raise CorruptCheckpoint(f"an estimator does not hold objects of type {name}")
    return cast(type, found)


def _unsupported(value: Any, place: str) -> UnsupportedState:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedState(
        f"attribute {place} is a {kind}, which everystep.integrations.sklearn does not store; nothing was "
        "written. Supported: arrays, plain values, RandomState, and scikit-learn's "
        "estimators, optimizers and losses."
    )
