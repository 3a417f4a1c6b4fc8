"""Views of one buffer in a target: whether what is stored for them agrees where they share bytes.

Owns the comparison, by address, of memory with what will be written to it. `destinations` decides which
leaves are read straight into memory and which are copied afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from everystep.engine.buffers import Memory, Strided
from everystep.state.targets import span

Host = Memory | Strided
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Addresses = np.ndarray[Any, np.dtype[np.int64]]

_AT_ONCE_NBYTES = 1 << 20
"""Bytes that are compared at a time: each that differs takes eight more per dimension."""


def clash(where: Host, stored: Host, others: Sequence[tuple[str, Host]]) -> str | None:
    """The name of the other whose bytes would change if `where` became as it is stored; None for no other."""
    here = _bytes(where)
    for addresses in _unlike(here, _bytes(stored).reshape(here.shape), where.address):
        for name, other in others:
            if _lie_in(addresses, other):
                return name
    return None


def _unlike(here: _Bytes, wanted: _Bytes, address: int) -> Iterator[_Addresses]:
    """Addresses of the bytes that differ, some at a time. `address` is that of the first."""
    if here.size > _AT_ONCE_NBYTES:
        axis = int(np.argmax(here.shape))
        half = here.shape[axis] // 2
        for first, last in ((0, half), (half, here.shape[axis])):
            part = (slice(None),) * axis + (slice(first, last),)
            yield from _unlike(here[part], wanted[part], address + first * here.strides[axis])
        return
    places = np.nonzero(here != wanted)
    if len(places[0]):
        found = np.full(len(places[0]), address, np.int64)
        for index, step in zip(places, here.strides, strict=True):
            found += index * step
        yield found


def _lie_in(addresses: _Addresses, where: Host) -> bool:
    """Whether any of these addresses is one of an element's, not only between two of them."""
    low, end = span(where)
    offsets = addresses[(addresses >= low) & (addresses < end)] - low
    if isinstance(where, Memory):
        return bool(len(offsets))
    # Targets that overlap themselves are not written in place, so each step leads past all smaller ones.
    dimensions = sorted(
        ((abs(step), size) for step, size in zip(where.strides, where.shape, strict=True) if size > 1),
        reverse=True,
    )
    for step, size in dimensions:
        offsets -= np.minimum(offsets // step, size - 1) * step
    return bool(np.any(offsets < where.itemsize))


def _bytes(where: Host) -> _Bytes:
    """Memory as an array of bytes: those of an element are the last dimension of a strided one."""
    low, end = span(where)
    memory = memoryview((ctypes.c_uint8 * (end - low)).from_address(low))
    if isinstance(where, Memory):
        return np.frombuffer(memory, np.uint8)
    shape, strides = (*where.shape, where.itemsize), (*where.strides, 1)
    found: _Bytes = np.ndarray(shape, np.uint8, memory, where.address - low, strides)
    return found
