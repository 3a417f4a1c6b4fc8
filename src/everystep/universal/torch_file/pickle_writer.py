"""Pickles as ``torch.save`` makes them, without torch: tensors are only announced, and classes only named.

`pickled` gives the bytes of the pickle and the tensors in the order of their numbers in the archive. It
writes plain values, containers, `PendingTensor`, and objects of other libraries as `Instance`.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from everystep.errors import UnsupportedState
from everystep.format.dtypes import itemsize
from everystep.universal.torch_file.pickle_classes import TORCH_DTYPES
from everystep.universal.torch_file.reading import STORAGES

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
_NAME_OF = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


@dataclass(frozen=True, slots=True, eq=False)
class PendingTensor:
    """A tensor whose bytes come later. `origin` is the caller's note of where they come from."""

    dtype: str
    shape: tuple[int, ...]
    origin: Any = None

    @property
    def count(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        return self.count * itemsize(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        found: list[int] = []
        step = 1
        for length in reversed(self.shape):
            found.append(step)
            step *= max(length, 1)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class that is only named, ``module.Class``: with these attributes."""

    name: str
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """A ``torch.Size``."""

    shape: tuple[int, ...]


def pickled(state: object) -> tuple[bytes, list[PendingTensor]]:
    """The pickle of a state, and the tensors in it, each once, in the order of their storages."""
    refuse_strange(state)
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(state)
    return out.getvalue(), pickler.tensors


def refuse_strange(value: object, place: str = "") -> None:
    """`UnsupportedState` for anything but plain values, containers and what this module announces."""
    kind = type(value)
    if kind in _PLAIN or kind in (PendingTensor, Size):
        return
    if isinstance(value, Instance):
        refuse_strange(dict(value.attributes), place)
    elif isinstance(value, dict) and kind in (dict, OrderedDict):
        for key, item in value.items():
            refuse_strange(key, place)
            refuse_strange(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple, set)) and kind in (list, tuple, set):
        for number, item in enumerate(value):
            refuse_strange(item, f"{place}.{number}")
    else:
        raise UnsupportedState(
            f"{place}: a {kind.__name__} has no place in a file for torch: select leaves, or convert to "
            "everystep"
        )


class _Global:
    """A name that the reader looks up."""

    __slots__ = ("module", "name")

    def __init__(self, text: str) -> None:
        self.module, _, self.name = text.rpartition(".")

    def __call__(self) -> None:  # pickle wants what it names in a reduction to be callable
        raise AssertionError("a name is not called")


@dataclass(frozen=True, slots=True)
class _Storage:
    number: int
    tensor: PendingTensor


_REBUILD, _REBUILD_ANY = (
    _Global("torch._utils._rebuild_tensor_v2"),
    _Global("torch._utils._rebuild_tensor_v3"),
)
_SIZE, _UNTYPED = _Global("torch.Size"), _Global("torch.storage.UntypedStorage")
_STORAGE_NAMES = {dtype: _Global(name) for dtype, name in _STORAGE_OF.items()}
_TYPE_NAMES = {dtype: _Global(f"torch.{name}") for dtype, name in _NAME_OF.items()}


_PurePickler: Any = pickle._Pickler


class _Pickler(_PurePickler):  # type: ignore[misc]
    """Python's own pickler in Python: the one in C writes only names that it can import."""

    dispatch: ClassVar[dict[type, Any]] = dict(_PurePickler.dispatch)

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.tensors: list[PendingTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.tensor
        typed = _STORAGE_NAMES.get(tensor.dtype)
        count = tensor.count if typed is not None else tensor.nbytes
        return "storage", typed or _UNTYPED, str(obj.number), "cpu", count

    def save_tensor(self, tensor: PendingTensor) -> None:
        storage = _Storage(len(self.tensors), tensor)
        self.tensors.append(tensor)
        hooks: OrderedDict[str, object] = OrderedDict()
        common = storage, 0, tensor.shape, tensor.strides, False, hooks
        if tensor.dtype in _STORAGE_NAMES:
            self.save_reduce(_REBUILD, common, obj=tensor)
        else:
            self.save_reduce(_REBUILD_ANY, (*common, _TYPE_NAMES[tensor.dtype]), obj=tensor)

    def save_name(self, name: _Global) -> None:
        self.write(b"c" + f"{name.module}\n{name.name}\n".encode())
        self.memoize(name)

    def save_size(self, size: Size) -> None:
        self.save_reduce(_SIZE, (size.shape,), obj=size)

    def save_instance(self, instance: Instance) -> None:
        self.save(_Global(instance.name))
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(instance)
        self.save(dict(instance.attributes))
        self.write(pickle.BUILD)

    dispatch[PendingTensor] = save_tensor
    dispatch[_Global] = save_name
    dispatch[Size] = save_size
    dispatch[Instance] = save_instance
