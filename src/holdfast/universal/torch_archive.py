"""Writes archives as `torch.save` does, with tensors that stream into them.

`pickled` makes the pickle of a state with meta tensors, which stand for bytes to come. `write_archive` writes
the pickle and, one after another, the bytes of the storages. No more than a block of them is in memory.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from holdfast.state.torch_arrays import load_torch

_ALIGNMENT = 64
_BLOCK_NBYTES = 4 << 20
_LOCAL_HEADER, _ZIP64_EXTRA, _EXTRA_HEADER = 30, 20, 4
_PADDING = b"FB"  # the tag of torch's own padding


@dataclass(frozen=True, slots=True)
class StorageBytes:
    """The bytes of a storage: `fill` writes those from an offset on into a block."""

    nbytes: int
    fill: Callable[[memoryview, int], None]


def write_archive(
    file: BinaryIO, data: bytes, storages: Sequence[StorageBytes], advance: Callable[[int], None]
) -> int:
    """Writes an archive where `file` stands; gives its length. `advance` is told of each block's bytes."""
    begin = file.tell()
    largest = max((storage.nbytes for storage in storages), default=0)
    block = memoryview(bytearray(min(_BLOCK_NBYTES, largest)))
    with zipfile.ZipFile(_Part(file, begin), "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), data)
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        for number, storage in enumerate(storages):
            member = zipfile.ZipInfo(f"archive/data/{number}")
            large = storage.nbytes >= zipfile.ZIP64_LIMIT
            member.extra = _padding(archive, member, large=large)
            with archive.open(member, "w", force_zip64=large) as out:
                for start in range(0, storage.nbytes, _BLOCK_NBYTES):
                    part = block[: min(_BLOCK_NBYTES, storage.nbytes - start)]
                    storage.fill(part, start)
                    out.write(part)
                    advance(len(part))
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
    return file.tell() - begin


class _Part(io.RawIOBase):
    """A file from some byte on, as a file of its own: zip archives count from their beginning."""

    def __init__(self, file: BinaryIO, begin: int) -> None:
        super().__init__()
        self._file = file
        self._begin = begin

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + self._begin if whence == io.SEEK_SET else offset
        return self._file.seek(at, whence) - self._begin

    def flush(self) -> None:
        if not self.closed:
            self._file.flush()


def _padding(archive: zipfile.ZipFile, member: zipfile.ZipInfo, *, large: bool) -> bytes:
    """So much that the bytes of the member are aligned, as those of torch are: they can be mapped."""
    assert archive.fp is not None
    at = (
        archive.fp.tell()
        + _LOCAL_HEADER
        + len(member.filename)
        + (_ZIP64_EXTRA if large else 0)
        + _EXTRA_HEADER
    )
    nbytes = -at % _ALIGNMENT
    return _PADDING + nbytes.to_bytes(2, "little") + b"Z" * nbytes


def storage_key(tensor: Any) -> int:
    """Tells storages apart. Tensors with one storage are tied."""
    return int(tensor.untyped_storage()._cdata)


def pickled(state: Any, numbers: Mapping[int, int]) -> bytes:
    """The pickle of a state. `numbers` gives the storage in the archive for the key of each tensor."""
    out = io.BytesIO()
    _pickler(out, numbers).dump(state)
    return out.getvalue()


class _Storage:
    """Stands for the bytes of a tensor in the archive."""

    __slots__ = ("dtype", "elements", "number")

    def __init__(self, number: int, dtype: Any, elements: int) -> None:
        self.number = number
        self.dtype = dtype
        self.elements = elements


def _pickler(out: io.BytesIO, numbers: Mapping[int, int]) -> pickle.Pickler:
    torch = load_torch()
    typed = {
        torch.float64: torch.DoubleStorage,
        torch.float32: torch.FloatStorage,
        torch.float16: torch.HalfStorage,
        torch.bfloat16: torch.BFloat16Storage,
        torch.int64: torch.LongStorage,
        torch.int32: torch.IntStorage,
        torch.int16: torch.ShortStorage,
        torch.int8: torch.CharStorage,
        torch.uint8: torch.ByteStorage,
        torch.bool: torch.BoolStorage,
        torch.complex64: torch.ComplexFloatStorage,
        torch.complex128: torch.ComplexDoubleStorage,
    }

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, _Storage):
                return None
            kind = typed.get(value.dtype, torch.storage.UntypedStorage)
            count = value.elements * (1 if value.dtype in typed else value.dtype.itemsize)
            return "storage", kind, str(value.number), "cpu", count

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.nn.Parameter):
                return torch._utils._rebuild_parameter, (value.data, value.requires_grad, OrderedDict())
            if not isinstance(value, torch.Tensor):
                return NotImplemented
            storage = _Storage(numbers[storage_key(value)], value.dtype, value.numel())
            shape, stride = tuple(value.shape), tuple(value.stride())
            common: tuple[Any, ...] = storage, 0, shape, stride, value.requires_grad, OrderedDict()
            if value.dtype in typed:
                return torch._utils._rebuild_tensor_v2, common
            return torch._utils._rebuild_tensor_v3, (*common, value.dtype)

    return Pickler(out, protocol=2)
