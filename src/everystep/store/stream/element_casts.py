"""Elements from one type to another: floating-point ones rounded to nearest, ties to even; byte orders.

Needs numpy only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from everystep.state.numpy_arrays import logical_name

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[Any]]

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The types that can be cast to each other."""
_CODES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def cast(data: Bytes, dtype: str, to: str) -> Bytes:
    """The bytes of elements of type `dtype` as those of type `to`."""
    if dtype == to:
        return data
    known = little_endian(dtype)
    if known != dtype:
        data = data.view(dtype.removeprefix("NP:")).byteswap().view(np.uint8)
    return data if known == to else from_floats(to_floats(data, known), to)


def little_endian(dtype: str) -> str:
    """The type of the same elements in the order of bytes that most formats have; of others, the type itself.

    >>> little_endian("NP:>f4"), little_endian("I64")
    ('F32', 'I64')
    """
    if not dtype.startswith("NP:>"):
        return dtype
    return logical_name(np.dtype(dtype.removeprefix("NP:")).newbyteorder("<")) or dtype


def to_floats(data: Bytes, dtype: str) -> Floats:
    """The elements in a type of numpy that has all their values."""
    if dtype == "BF16":
        wide: Floats = (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
        return wide
    return data.view(_CODES[dtype])


def from_floats(values: Floats, dtype: str) -> Bytes:
    """The bytes of the elements in a type, each rounded once."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):  # what is too large becomes infinite, as everywhere
            return np.ascontiguousarray(values, _CODES[dtype]).view(np.uint8).reshape(-1)
    narrow = np.ascontiguousarray(values, "<f4") if values.dtype.itemsize <= 4 else _to_odd(values)
    bits = narrow.view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    found: Bytes = np.where(np.isnan(narrow), quiet, rounded).astype("<u2").view(np.uint8).reshape(-1)
    return found


def _to_odd(values: Floats) -> Floats:
    """Doubles as floats that round on as the doubles would: what is not exact gets an odd last bit."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(values, "<f4")
    back = narrow.astype("<f8")
    inexact = (back != values) & np.isfinite(narrow)
    bits = narrow.view("<u4").copy()
    # Towards zero first, then the last bit says that something was cut off.
    bits[inexact & (np.abs(back) > np.abs(values))] -= np.uint32(1)
    bits[inexact] |= np.uint32(1)
    odd: Floats = bits.view("<f4")
    return odd
