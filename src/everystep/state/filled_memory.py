"""Which memory of a target a restore fills, so that a tied weight is restored under any of its names.

Looked into only when a leaf is missing: until then the arrays are only listed.
"""

from __future__ import annotations

import bisect
import sys
from typing import Any

import numpy as np

from everystep.state import boxed, sharded


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
        """Whether all bytes of an array are filled. Never for one without bytes here."""
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
