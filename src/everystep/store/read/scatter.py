"""From the bytes of a fragment, window by window, to all destinations that take some of its elements.

Windows may end inside an element. So an array is treated as bytes, with a last dimension of the size of an
element. Then any range of it is a handful of boxes, and so is the part that a destination takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.engine import Consumed, Destination, Memory
from everystep.format.geometry import Box, boxes_of_range, contiguous_runs, intersect, whole

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Put = Callable[[Box, Bytes], None]


@dataclass(frozen=True, slots=True)
class Receiver:
    """One destination of a fragment: it takes `box`, in bytes of the fragment, part by part."""

    box: Box
    span: tuple[int, int]
    put: _Put

    @classmethod
    def of(
        cls,
        wanted: Box,
        fragment: Box,
        size: int,
        shape: tuple[int, ...],
        local: Box,
        destination: Destination,
    ) -> Receiver:
        """Elements `wanted` of a leaf go from a fragment to the box `local` of an array of `shape`."""
        start = tuple(at - base for at, base in zip(wanted.start, fragment.start, strict=True))
        box = Box((*start, 0), (*wanted.shape, size))
        span = contiguous_runs(box, whole((*fragment.shape, size))).span
        return cls(box, span, _put(destination, shape, size, local))


class Scatter:
    """Takes the bytes of a fragment of `shape`, from byte `first` on, in windows of any size."""

    __slots__ = ("_first", "_receivers", "_shape")

    def __init__(self, shape: tuple[int, ...], size: int, first: int, receivers: Sequence[Receiver]) -> None:
        self._shape = (*shape, size)
        self._first = first
        self._receivers = tuple(receivers)

    def __call__(self, window: memoryview, offset: int) -> None:
        data = np.frombuffer(window, np.uint8)
        start = self._first + offset
        stop = start + len(data)
        touched = [
            receiver for receiver in self._receivers if receiver.span[0] < stop and start < receiver.span[1]
        ]
        if not touched:
            return
        at = 0
        for box in boxes_of_range(self._shape, start, stop):
            part = data[at : at + box.volume].reshape(box.shape)
            at += box.volume
            for receiver in touched:
                both = intersect(box, receiver.box)
                if both is not None:
                    receiver.put(_relative(both, receiver.box), part[_slices(_relative(both, box))])


def _put(destination: Destination, shape: tuple[int, ...], size: int, local: Box) -> _Put:
    """Puts a part of what goes to the box `local` of an array; given as a box relative to that."""
    if isinstance(destination, Consumed):
        return _Hand(destination, (*shape, size), Box((*local.start, 0), (*local.shape, size)))
    if isinstance(destination, Memory):
        strides = tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    else:
        strides = destination.strides
    address = destination.address + sum(at * by for at, by in zip(local.start, strides, strict=True))
    target = np.asarray(_View(address, (*local.shape, size), (*strides, 1), destination.owner))

    def put(box: Box, data: Bytes) -> None:
        target[_slices(box)] = data

    return put


class _Hand:
    """Hands parts of an array on to where its C-order bytes are consumed, run by run."""

    def __init__(self, destination: Consumed, shape: tuple[int, ...], local: Box) -> None:
        self._drain = destination.drain
        self._shape = whole(shape)
        self._local = local

    def __call__(self, box: Box, data: Bytes) -> None:
        start = tuple(at + by for at, by in zip(box.start, self._local.start, strict=True))
        runs = contiguous_runs(Box(start, box.shape), self._shape)
        packed = np.ascontiguousarray(data).reshape(-1).data
        for number, offset in enumerate(runs.offsets()):
            self._drain(packed[number * runs.length : (number + 1) * runs.length], offset)


class _View:
    """Memory for numpy to view; `owner` keeps it alive as long as the view exists."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: object) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }
        self._owner = owner


def _relative(box: Box, outer: Box) -> Box:
    return Box(tuple(at - base for at, base in zip(box.start, outer.start, strict=True)), box.shape)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(box.start, box.shape, strict=True))
