"""Files of `torch.save`, read without torch and without running code.

`read_torch_file` gives the saved object with a `StoredTensor` in place of each tensor: where its elements
lie in the file, not the elements. The file is a zip archive (`zip_records`) with a pickle
(`pickle_machine`) and one record for each storage. This module owns what torch's names in that pickle mean.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import pathlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from holdfast.format import dtypes
from holdfast.format.geometry import Box
from holdfast.universal.numpy_pickles import NUMPY_MAKERS
from holdfast.universal.pickle_machine import MAX_PICKLE_NBYTES, Maker, Name, PickleMachine
from holdfast.universal.source import Stretch
from holdfast.universal.zip_records import LOCAL_MAGIC, OpenFile, ZipRecords

MAX_RUNS = 4096
"""A tensor that is not contiguous is read as at most so many pieces."""
_MAX_DIMENSIONS = 64
_MAX_INT = 2**63 - 1
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4_E2M1_X2",
}
STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.ComplexFloatStorage": "C64",
    "torch.ComplexDoubleStorage": "C128",
}
_UNTYPED = frozenset({"torch.storage.UntypedStorage", "torch.UntypedStorage"})
_TENSOR_TYPES = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. Element (i, j) lies ``i * strides[0] + j * strides[1]`` elements after `offset`."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_nbytes: int

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in C order."""
        if not self.count:
            return True
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True

    def stretches(self, box: Box | None = None, *, leaf: str = "") -> tuple[Stretch, ...]:
        """Where the elements lie, if the tensor is that box of a leaf (all of it without `box`)."""
        if box is None:
            box = Box((0,) * len(self.shape), self.shape)
        if box.shape != self.shape:
            raise ValueError(f"a tensor of shape {self.shape} is not the box {box}")
        if not self.count:
            return ()
        if self.contiguous:
            return (Stretch(self.file, self.offset, box),)
        # The trailing dimensions that follow each other make a run; one run for each index of the others.
        axis, length = len(self.shape), 1
        while axis and (self.shape[axis - 1] == 1 or self.strides[axis - 1] == length):
            axis -= 1
            length *= self.shape[axis]
        runs = math.prod(self.shape[:axis])
        if runs > MAX_RUNS:
            what = f"tensor {leaf!r}" if leaf else "a tensor"
            raise UnsupportedSource(
                f"{self.file}: {what} of shape {self.shape} is stored with strides {self.strides}, "
                f"in {runs} pieces (at most {MAX_RUNS} are read). Save it again with .contiguous()"
            )
        found: list[Stretch] = []
        ones = (1,) * axis
        for index in itertools.product(*map(range, self.shape[:axis])):
            at = sum(i * s for i, s in zip(index, self.strides[:axis], strict=True))
            start = tuple(b + i for b, i in zip(box.start[:axis], index, strict=True))
            place = Box((*start, *box.start[axis:]), (*ones, *box.shape[axis:]))
            found.append(Stretch(self.file, self.offset + at * self.itemsize, place))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Storage:
    offset: int
    nbytes: int
    dtype: str | None


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as `torch.save` files do, of the zip or of the old format."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_LEGACY_MAGIC))
    except OSError:
        return False
    return start.startswith(LOCAL_MAGIC) or start == _LEGACY_MAGIC


def read_torch_file(
    path: str | os.PathLike[str], allowed: Collection[str] = (), *, start: int = 0, nbytes: int | None = None
) -> Any:
    """The object in a file of `torch.save`, with a `StoredTensor` in place of each tensor.

    Objects of the classes in `allowed` become `Record`s. `start` and `nbytes` give a part of the file. Raises
    `UnsupportedSource` for a class that is not known, `CorruptCheckpoint` for damage and
    `IncompleteCheckpoint` if there is no such file.
    """
    path = os.path.abspath(path)
    try:
        file = OpenFile(path, start, nbytes)
    except FileNotFoundError:
        raise IncompleteCheckpoint("the file is missing", path=path) from None
    with file:
        if file.nbytes < 4:
            raise CorruptCheckpoint(f"the file has only {file.nbytes} bytes", path=path)
        if file.read(0, 4) != LOCAL_MAGIC:
            if file.nbytes >= len(_LEGACY_MAGIC) and file.read(0, len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
                raise UnsupportedSource(
                    f"{path}: the file has the old format of torch.save (before torch 1.6, or "
                    "_use_new_zipfile_serialization=False). Re-save it: "
                    "torch.save(torch.load(path), new_path)"
                )
            raise CorruptCheckpoint(
                "this is not a file of torch.save: it does not begin as a zip archive", path=path
            )
        return _TorchArchive(file, allowed).read()


class _TorchArchive:
    def __init__(self, file: OpenFile, allowed: Collection[str]) -> None:
        self._path = file.path
        self._records = ZipRecords(file)
        pickles = [
            name for name in self._records.names if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if any(name.endswith("/constants.pkl") for name in self._records.names):
            raise UnsupportedSource(
                f"{self._path}: a TorchScript archive holds code; save a state dict instead"
            )
        if len(pickles) != 1:
            raise CorruptCheckpoint(
                "the archive has no data.pkl: torch.save did not write it", path=self._path
            )
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = self._prefix + "byteorder"
        if order in self._records and self._records.read(order, 16) != b"little":
            raise UnsupportedSource(f"{self._path}: the file was written on a big-endian machine")
        self._storages: dict[str, _Storage] = {}
        self._machine = PickleMachine(
            self._records.read(pickles[0], MAX_PICKLE_NBYTES),
            path=self._path,
            makers={
                **PLAIN_MAKERS,
                "torch._utils._rebuild_tensor": self._tensor_v2,
                "torch._utils._rebuild_tensor_v2": self._tensor_v2,
                "torch._utils._rebuild_tensor_v3": self._tensor_v3,
                "torch._utils._rebuild_parameter": self._parameter,
                "torch._utils._rebuild_parameter_with_state": self._parameter,
                "torch._tensor._rebuild_from_type_v2": self._typed,
            },
            inert=allowed,
            persistent=self._storage,
        )

    def read(self) -> Any:
        return self._machine.run()

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self._path)

    def _storage(self, key: object) -> _Storage:
        if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage":
            raise self._corrupt("the pickle refers to something that is not a storage")
        _, kind, name, _, count = key[:5]
        if not isinstance(kind, Name) or not isinstance(name, str) or type(count) is not int or count < 0:
            raise self._corrupt("the pickle refers to a storage in a way torch does not")
        dtype = STORAGES.get(kind.text)
        if dtype is None and kind.text not in _UNTYPED:
            raise UnsupportedSource(f"{self._path}: storages of type {kind.text!r} are not known")
        known = self._storages.get(name)
        if known is None:
            extent = self._records.extent(f"{self._prefix}data/{name}")
            known = self._storages[name] = _Storage(extent.offset, extent.nbytes, dtype)
        size = 1 if dtype is None else dtypes.itemsize(dtype)
        if count * size > known.nbytes:
            raise self._corrupt(f"storage {name!r} has {known.nbytes} bytes, but {count * size} are needed")
        return _Storage(known.offset, known.nbytes, dtype)

    def _tensor(
        self, storage: object, first: object, shape: object, strides: object, dtype: str | None
    ) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise self._corrupt("a tensor without a storage")
        dtype = dtype or storage.dtype
        if dtype is None:
            raise self._corrupt("a tensor without an element type")
        if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
            raise self._corrupt("a tensor whose shape and strides do not fit")
        if len(shape) > _MAX_DIMENSIONS or not all(
            type(n) is int and 0 <= n <= _MAX_INT for n in (first, *shape, *strides)
        ):
            raise self._corrupt("a tensor with an impossible shape, offset or stride")
        assert isinstance(first, int)
        size = dtypes.itemsize(dtype)
        if math.prod(shape):
            end = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
            if end * size > storage.nbytes:
                raise self._corrupt(
                    f"a tensor of shape {shape} reaches past its storage of {storage.nbytes} bytes"
                )
        return StoredTensor(self._path, storage.offset + first * size, dtype, shape, strides, storage.nbytes)

    def _tensor_v2(
        self, storage: object, first: object, shape: object, strides: object, *_: object
    ) -> StoredTensor:
        return self._tensor(storage, first, shape, strides, None)

    def _tensor_v3(
        self,
        storage: object,
        first: object,
        shape: object,
        strides: object,
        requires_grad: object,
        hooks: object,
        dtype: object,
        *_: object,
    ) -> StoredTensor:
        return self._tensor(storage, first, shape, strides, _dtype_of(dtype))

    def _parameter(self, data: object, *_: object) -> StoredTensor:
        if not isinstance(data, StoredTensor):
            raise self._corrupt("a parameter without a tensor")
        return data

    def _typed(self, function: object, kind: object, args: object, state: object) -> Any:
        if not isinstance(kind, Name) or kind.text not in _TENSOR_TYPES:
            name = kind.text if isinstance(kind, Name) else type(kind).__name__
            raise UnsupportedSource(f"{self._path}: tensors of type {name!r} are not known")
        return self._machine.call(function, args)


def _dtype_of(value: object) -> str:
    if isinstance(value, Name) and value.text.startswith("torch."):
        found = DTYPES.get(value.text.removeprefix("torch."))
        if found is not None:
            return found
    raise ValueError(f"not an element type: {value!r}")


torch_dtype = _dtype_of
"""The name of an element type that a pickle mentions. `ValueError` if it is none."""


# --- what names without tensors make


def _ordered(items: Any = ()) -> dict[Any, Any]:
    """Dictionaries keep their order; the pairs of old pickles are lists."""
    if not isinstance(items, (list, tuple)):
        raise TypeError("an OrderedDict of something that is not pairs")
    made: dict[Any, Any] = {}
    for key, value in items:
        if not isinstance(key, (str, int)):
            raise TypeError("an OrderedDict with a key that is not text")
        made[key] = value
    return made


def _default(_: object = None, *rest: Any) -> dict[Any, Any]:
    return _counter(*rest)


def _counter(items: Any = None) -> dict[Any, Any]:
    if items is None:
        return {}
    if not isinstance(items, dict):
        raise TypeError("a dictionary of something that is not one")
    return dict(items)


def _size(items: Any = ()) -> tuple[Any, ...]:
    return tuple(_sequence(items))


def _sequence(items: Any = ()) -> list[Any]:
    if not isinstance(items, (list, tuple)):
        raise TypeError("a sequence of something that is not one")
    return list(items)


def _set(items: Any = ()) -> set[Any]:
    made = _sequence(items)
    if any(isinstance(one, (tuple, frozenset)) for one in made):
        raise TypeError("a set of something that is not text or numbers")
    return set(made)


def _frozen(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _deque(items: Any = (), maxlen: object = None) -> list[Any]:
    return _sequence(items)


def _device(kind: str, index: int | None = None) -> str:
    if not isinstance(kind, str):
        raise TypeError("a device that is not text")
    return kind if index is None else f"{kind}:{int(index)}"


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError("bytes in an encoding that pickle does not use")
    return text.encode("latin-1")


def _bytes(*args: Any) -> bytes:
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], bytes):
        return args[0]
    raise TypeError("bytes of something else")


def _bytearray(*args: Any) -> bytearray:
    if len(args) == 2 and isinstance(args[0], str):
        return bytearray(_encode(args[0], args[1]))
    return bytearray(_bytes(*args))


def _complex(real: float, imag: float) -> complex:
    return complex(float(real), float(imag))


def _path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path that is not text")
    return str(pathlib.PurePosixPath(*parts))


def _windows_path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path that is not text")
    return str(pathlib.PureWindowsPath(*parts))


class Namespace(dict[str, Any]):
    """`argparse.Namespace`: its attributes, as a dictionary."""

    def set_pickle_state(self, state: object) -> None:
        if not isinstance(state, dict):
            raise TypeError("a Namespace without attributes")
        self.update(state)


def _datetime(*args: Any) -> datetime.datetime:
    _check_time_args(args)
    return datetime.datetime(*args)


def _date(*args: Any) -> datetime.date:
    _check_time_args(args)
    return datetime.date(*args)


def _time(*args: Any) -> datetime.time:
    _check_time_args(args)
    return datetime.time(*args)


def _timedelta(*args: Any) -> datetime.timedelta:
    _check_time_args(args)
    return datetime.timedelta(*args)


def _timezone(*args: Any) -> datetime.timezone:
    _check_time_args(args)
    return datetime.timezone(*args)


def _check_time_args(args: tuple[Any, ...]) -> None:
    kinds = (int, bytes, str, datetime.timedelta, datetime.timezone)
    if not all(isinstance(one, kinds) for one in args):
        raise TypeError("a time of something that is not numbers")


def _not_called(name: str) -> Maker:
    def refuse(*args: object) -> object:
        raise TypeError(f"{name} is not made by calling it")

    return refuse


def _layout(name: str) -> str:
    return str(name)


PLAIN_MAKERS: Mapping[str, Maker] = {
    **{name: _not_called(name) for name in (*STORAGES, *_UNTYPED, *_TENSOR_TYPES)},
    **{f"torch.{name}": _not_called(f"torch.{name}") for name in DTYPES},
    **{f"builtins.{kind.__name__}": _not_called(kind.__name__) for kind in (int, float, bool, str, object)},
    **NUMPY_MAKERS,
    "builtins.set": _set,
    "builtins.frozenset": _frozen,
    "builtins.list": _sequence,
    "builtins.dict": _counter,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _default,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "argparse.Namespace": Namespace,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib.Path": _path,
    "pathlib._local.PosixPath": _path,
    "pathlib.WindowsPath": _windows_path,
    "pathlib.PureWindowsPath": _windows_path,
    "pathlib._local.WindowsPath": _windows_path,
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
"""What names that have nothing to do with storages make of their arguments."""
