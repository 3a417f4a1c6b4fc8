"""The numbers that stored bytes stand for, and how far apart two arrays are.

Works on stored bytes, so it needs neither torch nor ml_dtypes for any element type.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.errors import UnsupportedState
from everystep.format.dtypes import itemsize
from everystep.state.numpy_arrays import NATIVE, numpy_dtype
from everystep.store.stream.leaf_windows import Bytes

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 18
"""Elements looked at together: their values take up to 16 bytes each, in a handful of arrays."""


@dataclass(frozen=True, slots=True)
class _SmallFloat:
    """A float of one byte: sign, exponent, mantissa. `nan` are the codes that are none of the numbers."""

    mantissa_bits: int
    bias: int
    nan: tuple[int, ...]
    infinite: tuple[int, ...] = ()


_SMALL_FLOATS = {
    "F8_E4M3": _SmallFloat(3, 7, (0x7F, 0xFF)),
    "F8_E5M2": _SmallFloat(2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC)),
    "F8_E4M3FNUZ": _SmallFloat(3, 8, (0x80,)),
    "F8_E5M2FNUZ": _SmallFloat(2, 16, (0x80,)),
}
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values(dtype: str, data: Bytes) -> Array | None:
    """The numbers that elements stand for; None for types that are not numbers (text, times)."""
    if dtype in NATIVE:
        native: Array = data.view(NATIVE[dtype])
        return native
    if dtype == "BF16":
        return (data.view("<u2").astype("<u4") << 16).view("<f4")
    if dtype == "C32":
        halves: Array = data.view("<f2").astype("<f4")
        return halves.view("<c8")
    table = _table(dtype)
    if table is not None:
        found: Array = table[data]
        return found
    if not dtype.startswith("NP:"):
        return None
    try:
        kind = numpy_dtype(dtype)
    except UnsupportedState:  # a long double of another platform
        return None
    return data.view(kind) if kind.kind in "iufc" else None


@functools.cache
def _table(dtype: str) -> Array | None:
    """All 256 values of a type of one byte."""
    if dtype == "F8_E8M0":
        powers: Array = np.ldexp(1.0, np.arange(256) - 127)
        powers[255] = np.nan
        return powers
    if dtype == "F4_E2M1_X2":
        nibbles = np.array([*_FOUR_BITS, *(-value for value in _FOUR_BITS)])
        codes = np.arange(256)
        # Both of the byte's numbers in one: the distance of two such pairs is that of the complex numbers.
        pairs: Array = nibbles[codes & 15] + 1j * nibbles[codes >> 4]
        return pairs
    layout = _SMALL_FLOATS.get(dtype)
    if layout is None:
        return None
    codes = np.arange(256)
    mantissa = codes & ((1 << layout.mantissa_bits) - 1)
    exponent = (codes & 0x7F) >> layout.mantissa_bits
    implied = np.where(exponent == 0, 0, 1 << layout.mantissa_bits)
    power = np.maximum(exponent, 1) - layout.bias - layout.mantissa_bits
    table: Array = np.ldexp((mantissa + implied).astype(float), power) * np.where(codes & 0x80, -1.0, 1.0)
    table[list(layout.infinite)] = np.copysign(np.inf, table[list(layout.infinite)])
    table[list(layout.nan)] = np.nan
    return table


@dataclass(slots=True)
class Tally:
    """How two arrays of the same type and shape differ, added up a window at a time.

    Elements differ when any bit of them does. `max_abs` and `max_rel` are over differing elements that are
    both finite numbers, `max_rel` being relative to the larger of the two; `not_finite` counts the others.
    """

    dtype: str
    elements: int = 0
    differing: int = 0
    first: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    not_finite: int = 0

    def add(self, a: Bytes, b: Bytes) -> None:
        """The next bytes of both, in whole elements."""
        size = itemsize(self.dtype)
        if not size:
            return
        if np.array_equal(a, b):
            self.elements += len(a) // size
            return
        for start in range(0, len(a), _BLOCK * size):
            self._add_block(a[start : start + _BLOCK * size], b[start : start + _BLOCK * size], size)

    def _add_block(self, a: Bytes, b: Bytes, size: int) -> None:
        rows_a, rows_b = a.reshape(-1, size), b.reshape(-1, size)
        unlike = _unlike(a, b, size)
        if len(unlike):
            if self.first is None:
                self.first = self.elements + int(unlike[0])
            self.differing += len(unlike)
            left = values(self.dtype, rows_a[unlike].reshape(-1))
            right = values(self.dtype, rows_b[unlike].reshape(-1))
            if left is not None and right is not None:
                self._measure(left, right)
        self.elements += len(rows_a)

    def _measure(self, left: Array, right: Array) -> None:
        if left.dtype.kind in "biu":
            # Modulo 2^64 the difference of the larger and the smaller is exact for any width and sign.
            apart = np.maximum(left, right).astype(np.uint64) - np.minimum(left, right).astype(np.uint64)
            self._note(int(apart.max()), _relative(left.astype(float), right.astype(float)))
            return
        # Exact, and differences do not overflow; long doubles are wider already.
        wide = np.result_type(left.dtype, np.complex128 if left.dtype.kind == "c" else np.float64)
        left, right = left.astype(wide), right.astype(wide)
        finite = np.isfinite(left) & np.isfinite(right)
        self.not_finite += int(np.count_nonzero(~finite))
        left, right = left[finite], right[finite]
        if len(left):
            with np.errstate(over="ignore"):
                self._note(float(np.abs(left - right).max()), _relative(left, right))

    def _note(self, apart: float, relative: float) -> None:
        self.max_abs = apart if self.max_abs is None else max(self.max_abs, apart)
        self.max_rel = relative if self.max_rel is None else max(self.max_rel, relative)


def _unlike(a: Bytes, b: Bytes, size: int) -> Array:
    """Places of the elements that differ in any bit. Where they have the size of integers, that is faster."""
    unlike: Array
    if size in (1, 2, 4, 8):
        unlike = np.flatnonzero(a.view(f"u{size}") != b.view(f"u{size}"))
    else:
        unlike = np.flatnonzero((a.reshape(-1, size) != b.reshape(-1, size)).any(axis=1))
    return unlike


def _relative(left: Array, right: Array) -> float:
    larger = np.maximum(np.abs(left), np.abs(right))
    larger[larger == 0] = 1  # both are zeros, of different sign
    with np.errstate(over="ignore", under="ignore"):
        return float(np.abs(left / larger - right / larger).max())
