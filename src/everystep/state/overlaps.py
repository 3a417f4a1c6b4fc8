"""Views of one buffer in a target: whether what is stored for them agrees, and which memory a restore fills.

Owns the comparison, by address, of memory with what will be written to it; and the list of all memory that is
filled, so that a tied weight is restored under any of its names. `destinations` decides which leaves are read
straight into memory and which are copied afterwards.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from everystep.engine.buffers import Memory, Strided
from everystep.state import boxed, sharded
from everystep.state.targets import span

Host = Memory | Strided
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Addresses = np.ndarray[Any, np.dtype[np.int64]]

_AT_ONCE_NBYTES = 1 << 20
"""Bytes that are compared at a time: each that differs takes eight more per dimension."""


def clash(where: Host, stored: Host, others: Sequence[tuple[str, Host]]) -> str | None:
    """The name of another array whose bytes would change if `where` were filled; None if there is none."""
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
    """Whether an element of `where` lies at one of these addresses. Strided memory has gaps."""
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


class FilledMemory:
    """The arrays of a target that get their bytes from leaves."""

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._views: set[tuple[Any, ...]] = set()
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        """Of each device the filled ranges of bytes, in order; they do not touch each other."""

    def add(self, array: Any) -> None:
        self._arrays.append(array)

    def covers(self, array: Any) -> bool:
        """Whether all bytes of an array are filled. False for one that has no bytes here."""
        self._look()
        found = _extent(array)
        if found is None:
            return False
        device, start, stop, view, _ = found
        if view in self._views:
            return True
        ranges = self._ranges.get(device, [])
        at = bisect.bisect_right(ranges, (start, sys.maxsize)) - 1
        return not sharded.is_sharded(array) and at >= 0 and stop <= ranges[at][1]

    def _look(self) -> None:
        if not self._arrays:
            return
        ranges = {device: list(found) for device, found in self._ranges.items()}
        for array in self._arrays:
            found = _extent(array)
            if found is not None:
                device, start, stop, view, is_range = found
                self._views.add(view)
                if is_range:
                    ranges.setdefault(device, []).append((start, stop))
        self._arrays.clear()
        self._ranges = {device: _joined(sorted(found)) for device, found in ranges.items()}


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _extent(array: Any) -> tuple[str, int, int, tuple[Any, ...], bool] | None:
    """Device, first byte, end, how the memory is seen, and whether the array is all of these bytes."""
    if isinstance(array, boxed.BoxedArray):
        return None
    if isinstance(array, np.ndarray):
        device, address, size = "cpu", int(array.ctypes.data), array.itemsize
        shape, steps = array.shape, array.strides
        solid, sharding = array.flags.c_contiguous, None
    else:
        part = sharded.held(array, "", {})
        tensor = array if part is None else part.tensor
        if tensor is None or tensor.layout != sys.modules["torch"].strided:
            return None
        device, address, size = str(tensor.device), int(tensor.data_ptr()), tensor.element_size()
        shape, steps = tuple(tensor.shape), tuple(step * size for step in tensor.stride())
        solid, sharding = tensor.is_contiguous(), None if part is None else part.sharding
    if not address or 0 in shape:
        return None
    reach = [step * (length - 1) for step, length in zip(steps, shape, strict=True)]
    start = address + sum(step for step in reach if step < 0)
    stop = address + sum(step for step in reach if step > 0) + size
    return device, start, stop, (device, address, size, shape, steps, sharding), solid and sharding is None
