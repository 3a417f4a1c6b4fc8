"""Writes archives as `torch.save` does, with tensors that stream into them.

`pickled` makes the pickle of a state with meta tensors, which stand for bytes to come. `write_archive` writes
the pickle and, one after another, the bytes of the storages. No more than a block of them is in memory. The
zip format belongs to `torch_zip`.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from everystep.state.torch_arrays import load_torch
from everystep.universal.torch_file.zip_format import TorchArchive

_BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StorageBytes:
    """The bytes of a storage: `fill` writes those from an offset on into a block."""

    nbytes: int
    fill: Callable[[memoryview, int], None]


def write_archive(
    file: BinaryIO, data: bytes, storages: Sequence[StorageBytes], advance: Callable[[int], None]
) -> int:
    """Writes an archive where `file` stands; gives its length. `advance` is told of each block's bytes."""
    archive = TorchArchive(data, [storage.nbytes for storage in storages])
    block = memoryview(bytearray(min(_BLOCK_NBYTES, max(archive.sizes, default=0))))
    crcs = [0] * len(storages)
    for number, storage in enumerate(storages):
        file.write(archive.between(number, crcs)[1])
        for start in range(0, storage.nbytes, _BLOCK_NBYTES):
            part = block[: min(_BLOCK_NBYTES, storage.nbytes - start)]
            storage.fill(part, start)
            crcs[number] = zlib.crc32(part, crcs[number])
            file.write(part)
            advance(len(part))
    file.write(archive.between(len(storages), crcs)[1])
    return archive.nbytes


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
