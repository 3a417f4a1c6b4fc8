"""Arrays of every element type and memory layout, and bit-exact comparison."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

SHAPE = (6, 4)


def _split(names: str) -> list[str]:
    return names.split()


NUMPY_TYPES = [
    np.dtype(code)
    for code in _split(
        "? u1 i1 <u2 <i2 <u4 <i4 <u8 <i8 <f2 <f4 <f8 <c8 <c16 >f4 >i8 M8[ns] m8[s] U5 S3 g V7 V0"
    )
]

TORCH_TYPES: list[torch.dtype] = [
    getattr(torch, name)
    for name in _split(
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
        "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
        "float8_e8m0fnu float4_e2m1fn_x2"
    )
]


def random_array(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> Any:
    """Every bit random, so that NaNs come with all payloads and signs. Only a bool has but two values."""
    count = int(np.prod(shape, dtype=np.int64))
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if not dtype.itemsize * count:
        return np.empty(shape, dtype)
    if dtype.kind == "U":  # code points, not any bits
        return rng.integers(65, 0x2000, count * dtype.itemsize // 4, np.uint32).view(dtype).reshape(shape)
    return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    high = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, high, count * dtype.itemsize, np.uint8)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def numpy_layouts(dtype: np.dtype[Any]) -> Iterator[tuple[str, Any]]:
    yield "contiguous", random_array(dtype, SHAPE)
    yield "scalar", random_array(dtype, ())
    yield "empty", random_array(dtype, (0, 3))
    yield "transposed", random_array(dtype, SHAPE, 1).T
    yield "reversed", random_array(dtype, SHAPE, 2)[::-1, ::-1]
    yield "sliced", random_array(dtype, (9, 9), 3)[1:8:2, 2:9:3]
    yield "expanded", np.broadcast_to(random_array(dtype, (1, 4), 4), SHAPE)
    yield "fortran", np.asfortranarray(random_array(dtype, SHAPE, 5))
    yield "one", random_array(dtype, (1, 1, 1), 7)
    if dtype.itemsize:
        raw = np.frombuffer(b"x" + random_array(dtype, SHAPE, 6).tobytes(), np.uint8)
        yield "unaligned and read-only", raw[1:].view(dtype)


def torch_layouts(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    yield "contiguous", random_tensor(dtype, SHAPE)
    yield "scalar", random_tensor(dtype, ())
    yield "empty", random_tensor(dtype, (0, 3))
    yield "transposed", random_tensor(dtype, SHAPE, 1).T
    yield "sliced", random_tensor(dtype, (9, 9), 3)[1:8:2, 2:9:3]
    yield "expanded", random_tensor(dtype, (1, 4), 4).expand(SHAPE)
    yield "offset", random_tensor(dtype, (30,), 5)[3:27]
    yield "channels_last", random_tensor(dtype, (2, 4, 5, 3), 6).permute(0, 3, 1, 2)
    yield "permuted", random_tensor(dtype, (2, 3, 4), 7).permute(2, 0, 1)


def bits(array: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """All that makes two arrays equal bit for bit, whatever their strides: framework, type, shape, bytes."""
    if not isinstance(array, torch.Tensor):
        return "numpy", array.dtype.str, array.shape, array.tobytes()
    size = array.element_size()
    storage = array.untyped_storage()
    raw = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if array.numel() else b""
    # Not through torch: some of its types have no kernel that copies them.
    seen = np.ndarray(
        tuple(array.shape),
        np.dtype((np.void, size)),
        raw,
        array.storage_offset() * size if raw else 0,
        [step * size for step in array.stride()] if raw else None,
    )
    return "torch", str(array.dtype), tuple(array.shape), seen.tobytes()
