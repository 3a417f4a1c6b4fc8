"""Pickles as ``torch.save`` makes them, without torch: tensors are only announced, and classes only named.

`pickled` gives the bytes of the pickle and the tensors in the order of their numbers in the archive. It
writes plain values, containers, `PendingTensor`, torch's own small values, and objects of other libraries as
`Instance`.
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
_TORCH_VALUES = frozenset({("torch", "dtype"), ("torch", "Size"), ("torch", "device")})
_INT_NBYTES = 255
"""Of larger integers, and of empty bytes, pickles say what ``weights_only`` does not know."""


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
class FlaggedTensor:
    """A tensor as a parameter, or as one that requires gradients. It has the memory of `tensor`."""

    tensor: PendingTensor
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class that is only named, ``module.Class``: with these attributes."""

    name: str
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """A ``torch.Size``."""

    shape: tuple[int, ...]


def pickled(state: object, *, weights_only: bool = False) -> tuple[bytes, list[PendingTensor]]:
    """The pickle of a state, and the tensors in it, each once, in the order of their storages.

    `UnsupportedState` for anything but plain values, containers and what this module announces; with
    `weights_only`, also for what ``torch.load(weights_only=True)`` refuses of these.
    """
    _refuse_strange(state, "", weights_only)
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(state)
    return out.getvalue(), pickler.tensors


def _refuse_strange(value: object, place: str, weights_only: bool) -> None:
    kind = type(value)
    if weights_only and kind is bytes and not value:
        raise _refused(place, "empty bytes")
    if weights_only and kind is int and len(pickle.encode_long(value)) > _INT_NBYTES:  # type: ignore[arg-type]
        raise _refused(place, f"an integer of more than {_INT_NBYTES} bytes")
    if kind in _PLAIN or kind in (PendingTensor, FlaggedTensor, Size):
        return
    if isinstance(value, Instance):
        _refuse_strange(dict(value.attributes), place, weights_only)
    elif isinstance(value, dict) and kind in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_strange(key, place, weights_only)
            _refuse_strange(item, f"{place}.{key}" if place else str(key), weights_only)
    elif isinstance(value, (list, tuple, set)) and kind in (list, tuple, set):
        for number, item in enumerate(value):
            _refuse_strange(item, f"{place}.{number}", weights_only)
    elif (kind.__module__, kind.__name__) not in _TORCH_VALUES:
        raise _refused(place, kind.__name__)


def _refused(place: str, what: str) -> UnsupportedState:
    return UnsupportedState(
        f"{place or 'the state'}: torch.load(weights_only=True) refuses {what}, so a file for torch cannot "
        "hold it: select leaves, or convert to everystep"
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
_PARAMETER = _Global("torch._utils._rebuild_parameter")
_SIZE, _UNTYPED = _Global("torch.Size"), _Global("torch.storage.UntypedStorage")
_STORAGE_NAMES = {dtype: _Global(name) for dtype, name in _STORAGE_OF.items()}
_TYPE_NAMES = {dtype: _Global(f"torch.{name}") for dtype, name in _NAME_OF.items()}


_PurePickler: Any = pickle._Pickler


class _Pickler(_PurePickler):  # type: ignore[misc]
    """Python's own pickler in Python: the one in C writes only names that it can import."""

    dispatch: ClassVar[dict[type, Any]] = dict(_PurePickler.dispatch)

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self._storages: dict[int, _Storage] = {}

    @property
    def tensors(self) -> list[PendingTensor]:
        return [storage.tensor for storage in self._storages.values()]

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.tensor
        typed = _STORAGE_NAMES.get(tensor.dtype)
        count = tensor.count if typed is not None else tensor.nbytes
        return "storage", typed or _UNTYPED, str(obj.number), "cpu", count

    def save_tensor(self, tensor: PendingTensor) -> None:
        self._save_tensor(tensor, tensor, requires_grad=False)

    def save_flagged(self, flagged: FlaggedTensor) -> None:
        if flagged.is_parameter:
            hooks: OrderedDict[str, object] = OrderedDict()
            self.save_reduce(_PARAMETER, (flagged.tensor, flagged.requires_grad, hooks), obj=flagged)
        else:
            self._save_tensor(flagged, flagged.tensor, requires_grad=flagged.requires_grad)

    def _save_tensor(self, obj: object, tensor: PendingTensor, *, requires_grad: bool) -> None:
        storage = self._storages.setdefault(id(tensor), _Storage(len(self._storages), tensor))
        hooks: OrderedDict[str, object] = OrderedDict()
        common = storage, 0, tensor.shape, tensor.strides, requires_grad, hooks
        if tensor.dtype in _STORAGE_NAMES:
            self.save_reduce(_REBUILD, common, obj=obj)
        else:
            self.save_reduce(_REBUILD_ANY, (*common, _TYPE_NAMES[tensor.dtype]), obj=obj)

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
    dispatch[FlaggedTensor] = save_flagged
    dispatch[_Global] = save_name
    dispatch[Size] = save_size
    dispatch[Instance] = save_instance
