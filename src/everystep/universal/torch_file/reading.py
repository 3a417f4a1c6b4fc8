"""Files of `torch.save`, read without torch and without running code.

`read_torch_file` gives the saved object with a `StoredTensor` in place of each tensor: where its elements
lie in the file, not the elements. The file is a zip archive (`zip_records`) with a pickle
(`pickle_machine`) and one record for each storage. This module owns what torch's names in that pickle mean.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.format import dtypes
from everystep.format.geometry import Box
from everystep.universal.source import SourceFragment
from everystep.universal.torch_file.pickle_classes import (
    PLAIN_MAKERS,
    PLAIN_SETTERS,
    PLAIN_VALUES,
    TORCH_DTYPES,
    not_called,
)
from everystep.universal.torch_file.pickle_machine import MAX_PICKLE_NBYTES, ClassName, PickleMachine, Refused
from everystep.universal.torch_file.torch_values import TorchDtype
from everystep.universal.torch_file.zip_reader import LOCAL_MAGIC, OpenFile, ZipRecords

MAX_RUNS = 4096
"""A tensor that is not contiguous is read in place in at most so many pieces."""
_MAX_DIMENSIONS = 64
_MAX_INT = 2**63 - 1
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

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
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor"})
_REBUILD = "torch._utils._rebuild_tensor"
_COMPLEX = frozenset({"C32", "C64", "C128"})
_SIGNED = _COMPLEX | {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. Element (i, j) lies ``i * strides[0] + j * strides[1]`` elements after `offset`.

    What lies there is the conjugate of the tensor if `conj` is set, and its negative if `neg` is: such a
    tensor is a computed leaf (`tensor_leaves`). If `is_parameter` is set, `torch.load` gives a
    `torch.nn.Parameter`. `attributes` are those that Python code has given to the tensor.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_nbytes: int
    conj: bool = False
    neg: bool = False
    is_parameter: bool = field(default=False, compare=False)
    requires_grad: bool = field(default=False, compare=False)
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in C order, as they are."""
        if not self.count:
            return True
        if self.conj or self.neg:
            return False
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True

    @property
    def _run_axis(self) -> int:
        """From here on, dimensions follow each other: they are one run for each index of those before."""
        axis, length = len(self.shape), 1
        while axis and (self.shape[axis - 1] == 1 or self.strides[axis - 1] == length):
            axis -= 1
            length *= self.shape[axis]
        return axis

    @property
    def scattered(self) -> bool:
        """Whether it is in more pieces than are read one by one, as convolutions in ``channels_last`` are."""
        return math.prod(self.shape[: self._run_axis]) > MAX_RUNS

    @property
    def span_nbytes(self) -> int:
        """From the first element to the end of the last one in memory."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (1 + last) * self.itemsize if self.count else 0

    def fragments(self, box: Box | None = None, *, leaf: str = "") -> tuple[SourceFragment, ...]:
        """Where the elements lie, if the tensor is that box of a leaf (all of it without `box`)."""
        if box is None:
            box = Box((0,) * len(self.shape), self.shape)
        if box.shape != self.shape:
            raise ValueError(f"a tensor of shape {self.shape} is not the box {box}")
        if not self.count:
            return ()
        if self.conj or self.neg:
            what = f"tensor {leaf!r}" if leaf else "a tensor"
            raise UnsupportedSource(
                f"{self.file}: {what} is a conjugated or negative view. "
                "Save it again with .resolve_conj().resolve_neg()"
            )
        if self.contiguous:
            return (SourceFragment(self.file, self.offset, box),)
        axis = self._run_axis
        runs = math.prod(self.shape[:axis])
        if self.scattered:
            what = f"tensor {leaf!r}" if leaf else "a tensor"
            raise UnsupportedSource(
                f"{self.file}: {what} of shape {self.shape} is stored with strides {self.strides}, "
                f"in {runs} pieces (at most {MAX_RUNS} are read). Save it again with .contiguous()"
            )
        found: list[SourceFragment] = []
        ones = (1,) * axis
        for index in itertools.product(*map(range, self.shape[:axis])):
            at = sum(i * s for i, s in zip(index, self.strides[:axis], strict=True))
            start = tuple(b + i for b, i in zip(box.start[:axis], index, strict=True))
            place = Box((*start, *box.start[axis:]), (*ones, *box.shape[axis:]))
            found.append(SourceFragment(self.file, self.offset + at * self.itemsize, place))
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

    Raises `UnsupportedSource` for a class that is not known, `CorruptCheckpoint` for damage and
    `IncompleteCheckpoint` if there is no such file.

    Args:
        path: The file.
        allowed: Classes whose objects become an `InertObject`.
        start: Where the archive begins in the file.
        nbytes: The archive's length; by default up to the end of the file.
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
        self._unused: list[str] = []  # a pickle refers to a storage right before the tensor of it is made
        self._machine = PickleMachine(
            self._records.read(pickles[0], MAX_PICKLE_NBYTES),
            path=self._path,
            makers={
                **PLAIN_MAKERS,
                **{name: not_called(name) for name in (*STORAGES, *_UNTYPED, *_TENSOR_TYPES)},
                _REBUILD: self._tensor_v1,
                f"{_REBUILD}_v2": self._tensor_v2,
                f"{_REBUILD}_v3": self._tensor_v3,
                "torch._utils._rebuild_parameter": self._parameter,
                "torch._utils._rebuild_parameter_with_state": self._parameter_with_state,
                "torch._tensor._rebuild_from_type_v2": self._typed,
            },
            values=PLAIN_VALUES,
            setters=PLAIN_SETTERS,
            inert=allowed,
            persistent=self._storage,
        )

    def read(self) -> Any:
        found = self._machine.run()
        if self._unused:
            raise UnsupportedSource(
                f"{self._path}: the file contains a {self._unused[-1]!r} itself, "
                "which cannot be kept exactly. Save a tensor of it instead"
            )
        return found

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self._path)

    def _storage(self, key: object) -> _Storage:
        if not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage":
            raise self._corrupt("the pickle refers to something that is not a storage")
        _, kind, name, _, count = key
        if (
            not isinstance(kind, ClassName)
            or not isinstance(name, str)
            or type(count) is not int
            or count < 0
        ):
            raise self._corrupt("the pickle refers to a storage in a way torch does not")
        dtype = STORAGES.get(kind.text)
        if dtype is None and kind.text not in _UNTYPED:
            raise UnsupportedSource(f"{self._path}: storages of type {kind.text!r} are not known")
        known = self._storages.get(name)
        if known is None:
            known = _Storage(*self._records.range_of(f"{self._prefix}data/{name}"), dtype)
            self._storages[name] = known
        size = 1 if dtype is None else dtypes.itemsize(dtype)
        if count * size > known.nbytes:
            raise self._corrupt(f"storage {name!r} has {known.nbytes} bytes, but {count * size} are needed")
        self._unused.append(kind.text)
        return _Storage(known.offset, known.nbytes, dtype)

    # These take exactly the arguments that torch writes: what an unknown one means is not known either.

    def _tensor_v1(self, storage: object, first: object, shape: object, strides: object) -> StoredTensor:
        return self._tensor_v2(storage, first, shape, strides, False, None)

    def _tensor_v3(self, *args: object) -> StoredTensor:
        if len(args) not in (7, 8):
            raise TypeError(f"{len(args)} arguments")
        return self._tensor_v2(*args[:6], *args[7:], dtype=torch_dtype(args[6]))

    def _tensor_v2(
        self,
        storage: object,
        first: object,
        shape: object,
        strides: object,
        requires_grad: object,
        hooks: object,
        bits: object = None,
        *,
        dtype: str | None = None,
    ) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise self._corrupt("a tensor without a storage")
        if self._unused:
            self._unused.pop()
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
        if type(requires_grad) is not bool:
            raise self._corrupt("a tensor that does not say whether it needs gradients")
        _require_no_hooks(hooks)
        bits = {} if bits is None else bits
        if type(bits) is not dict or not all(type(bit) is bool for bit in bits.values()):
            raise self._corrupt("a tensor with properties of an unknown form")
        conj, neg = bits.get("conj", False), bits.get("neg", False)
        if (
            not bits.keys() <= {"conj", "neg"}
            or (conj and dtype not in _COMPLEX)
            or (neg and dtype not in _SIGNED)
        ):
            raise Refused(f"a tensor of type {dtype} with unknown properties")
        return StoredTensor(
            self._path,
            storage.offset + first * size,
            dtype,
            shape,
            strides,
            storage.nbytes,
            conj=conj,
            neg=neg,
            requires_grad=requires_grad,
        )

    def _parameter(self, data: object, requires_grad: object, hooks: object) -> StoredTensor:
        if not isinstance(data, StoredTensor) or type(requires_grad) is not bool:
            raise self._corrupt("a parameter without a tensor")
        _require_no_hooks(hooks)
        return replace(data, is_parameter=True, requires_grad=requires_grad)

    def _parameter_with_state(
        self, data: object, requires_grad: object, hooks: object, state: object
    ) -> StoredTensor:
        return _with_attributes(self._parameter(data, requires_grad, hooks), state)

    def _typed(self, function: object, kind: object, args: object, state: object) -> StoredTensor:
        if not isinstance(kind, ClassName) or kind.text not in _TENSOR_TYPES:
            name = kind.text if isinstance(kind, ClassName) else type(kind).__name__
            raise Refused(f"a tensor of type {name!r}")
        if not isinstance(function, ClassName) or not function.text.startswith(_REBUILD):
            raise self._corrupt("a tensor that is made by something else")
        made = self._machine.call(function, args)
        return _with_attributes(made, state)


def _require_no_hooks(hooks: object) -> None:
    if hooks is not None and not (type(hooks) is OrderedDict and not hooks):
        raise Refused("a tensor with hooks")


def _with_attributes(tensor: StoredTensor, state: object) -> StoredTensor:
    if state is None:
        return tensor
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise Refused("a tensor with slots of its own")
    return replace(tensor, attributes=state)


def torch_dtype(value: object) -> str:
    """The name of an element type that a pickle mentions. `ValueError` if it is none."""
    if not isinstance(value, TorchDtype):
        raise ValueError(f"not an element type: {value!r}")
    return TORCH_DTYPES[value.name]
