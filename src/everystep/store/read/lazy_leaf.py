"""One leaf, of which only indexed parts are read."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from everystep.engine import Memory
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box
from everystep.state import Framework, LeafMeta, empty
from everystep.store.read.requests import BoxRequest


class LazyLeaf:
    """Looks like an array: has `shape` and `dtype`, and reads the part that is indexed."""

    def __init__(self, name: str, meta: LeafMeta, fetch: Callable[[Sequence[BoxRequest]], None]) -> None:
        self.name = name
        self._meta = meta
        self._fetch = fetch

    @property
    def shape(self) -> tuple[int, ...]:
        return self._meta.shape

    @property
    def dtype(self) -> str:
        """The stored element type, by its safetensors name."""
        return self._meta.dtype

    @property
    def framework(self) -> Framework:
        return self._meta.framework

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        size = itemsize(self.dtype)
        for extent in self.shape:
            size *= extent
        return size

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d leaf has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyLeaf {self.name} {self.dtype}{list(self.shape)}>"

    def __getitem__(self, index: Any) -> Any:
        """Integers, slices (any step) and ``...``; the result is an array of the leaf's framework."""
        key = _expand(index, len(self.shape))
        spans = [
            _axis_range(item, extent, axis)
            for axis, (item, extent) in enumerate(zip(key, self.shape, strict=True))
        ]
        starts = tuple(span.start for span in spans)
        elements = self._read_box(Box(starts, tuple(span.stop - span.start for span in spans)))
        inside = tuple(span.inside for span in spans)
        return _finish(elements[inside], self.dtype, self.framework)

    def _read_box(self, box: Box) -> np.ndarray[Any, Any]:
        """The elements of a box, as opaque items: indexing moves them and never interprets them."""
        out = np.empty(box.shape, np.dtype((np.void, itemsize(self.dtype))))
        if out.nbytes:
            self._fetch([BoxRequest(self._meta.name, box, Memory(out.ctypes.data, out.nbytes, out))])
        return out


class _AxisRange:
    """One axis of an index: the range to read, and what to take out of it afterwards."""

    __slots__ = ("inside", "start", "stop")

    def __init__(self, start: int, stop: int, inside: int | slice) -> None:
        self.start, self.stop, self.inside = start, stop, inside


def _expand(index: Any, ndim: int) -> tuple[Any, ...]:
    key = index if isinstance(index, tuple) else (index,)
    dots = sum(item is Ellipsis for item in key)
    if dots > 1 or len(key) - dots > ndim:
        raise IndexError(f"bad index for an array of {ndim} dimensions: {index!r}")
    fill = (slice(None),) * (ndim - len(key) + dots)
    if not dots:
        return (*key, *fill)
    at = next(position for position, item in enumerate(key) if item is Ellipsis)
    return (*key[:at], *fill, *key[at + 1 :])


def _axis_range(item: Any, extent: int, axis: int) -> _AxisRange:
    if isinstance(item, slice):
        steps = range(*item.indices(extent))
        if not steps:
            return _AxisRange(0, 0, slice(None))
        low, high = min(steps[0], steps[-1]), max(steps[0], steps[-1])
        return _AxisRange(low, high + 1, slice(None, None, steps.step))
    try:
        if _is_bool(item):
            raise TypeError("to numpy and torch a mask, to Python an integer")
        at = operator.index(item)
    except TypeError:
        raise IndexError(
            f"a leaf is indexed by integers, slices and '...', not {type(item).__name__}"
        ) from None
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is out of range for axis {axis} with {extent} elements")
    at %= extent
    return _AxisRange(at, at + 1, 0)


def _is_bool(item: Any) -> bool:
    return isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")


def _finish(elements: Any, dtype: str, framework: Framework) -> Any:
    packed = np.ascontiguousarray(elements)  # a full set of integers leaves a scalar
    shape = getattr(elements, "shape", ())
    array, memory = empty(dtype, shape, framework)
    if memory.nbytes:
        ctypes.memmove(memory.address, packed.ctypes.data, memory.nbytes)
    return array
