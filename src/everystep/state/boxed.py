"""`BoxedArray`: an array of which this process has some boxes, each as a numpy array of its own.

Owns how such an array becomes leaves. It is what `jax_arrays` makes of an array that is cut over devices and
processes, and what integrations hand over for arrays that do not change. Nothing is put together in memory,
neither to save it nor to fill it. Every element of the array must be in exactly one box of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from everystep.engine.buffers import Memory, Strided
from everystep.format.geometry import Box, whole
from everystep.state import numpy_arrays
from everystep.state.leaves import FragmentPlace, LeafSource, Sharding
from everystep.state.refusals import unsupported


@dataclass(frozen=True, slots=True, eq=False)
class BoxedArray:
    """Boxes of an array of the given shape and type. To be filled, their arrays must be writable.

    They must not change during a save: it reads them in place, and no optimizer waits for it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    boxes: tuple[tuple[Box, numpy_arrays.Array], ...]


class Immutable:
    """Keeps memory that does not change: a save may read it in place at any time."""

    __slots__ = ("_array",)

    def __init__(self, array: numpy_arrays.Array) -> None:
        self._array = array


def unchanging(array: numpy_arrays.Array) -> BoxedArray:
    """All of an array that does not change any more: a save reads it in place."""
    return BoxedArray(array.shape, array.dtype, ((whole(array.shape), array),))


def element_type(array: BoxedArray, place: str) -> str:
    """The logical name of its element type."""
    name = numpy_arrays.logical_name(array.dtype)
    if name is None:
        raise unsupported(place, f"an array of dtype {array.dtype}. Store its plain fields instead")
    return name


def leaves_of(array: BoxedArray, name: str) -> Iterator[LeafSource]:
    """A leaf for each box that is here, all of the same name; the plain leaf of an array that is all here."""
    dtype = element_type(array, name)
    for index, (box, part) in enumerate(array.boxes):
        source = _immutable(numpy_arrays.source(part))
        if box == whole(array.shape):
            yield LeafSource(name, dtype, array.shape, "numpy", source)
        else:
            sharding = Sharding(array.shape, box=box)
            fragment = FragmentPlace(box.start, array.shape, index)
            yield LeafSource(name, dtype, box.shape, "numpy", source, sharding, fragment)


def _immutable(source: Memory | Strided) -> Memory | Strided:
    kept = Immutable(source.owner)  # type: ignore[arg-type]
    if isinstance(source, Memory):
        return Memory(source.address, source.nbytes, kept)
    return Strided(source.address, source.itemsize, source.shape, source.strides, kept)
