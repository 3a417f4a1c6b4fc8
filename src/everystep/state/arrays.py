"""Arrays of either framework: fresh ones to read into, and the other framework's view of one.

Chooses between `numpy_arrays` and `torch_arrays`, which own everything that depends on the framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from everystep.engine import array_memory
from everystep.engine.buffers import Memory
from everystep.errors import UnsupportedState
from everystep.state import numpy_arrays, torch_arrays
from everystep.state.leaves import Framework

FRAMEWORKS: Final[tuple[Framework, ...]] = ("torch", "numpy")


def empty(
    dtype: str, shape: tuple[int, ...], framework: Framework, address_residue: int = 0
) -> tuple[Any, Memory]:
    """A fresh, uninitialised array and its memory.

    From 64 KiB on its address is congruent to `address_residue` modulo 4096, so that a direct read of a file
    offset with that residue needs no staging. A residue that would misalign the elements is taken as 0.
    """
    if framework == "torch":
        return torch_arrays.empty(dtype, shape, address_residue)
    return numpy_arrays.empty(dtype, shape, address_residue)


class FreshArrays:
    """Makes arrays for many leaves: as `empty`, but what depends on the type alone is looked up once."""

    def __init__(self) -> None:
        self._makers: dict[tuple[Framework, str], Callable[[tuple[int, ...]], Any]] = {}

    def make(
        self, dtype: str, shape: tuple[int, ...], framework: Framework, nbytes: int, address_residue: int
    ) -> tuple[Any, int]:
        """A fresh array of so many bytes, as `empty` makes it, and its address."""
        if nbytes >= numpy_arrays.ALIGNED_FROM_NBYTES:
            array, memory = empty(dtype, shape, framework, address_residue)
            return array, memory.address
        make = self._makers.get((framework, dtype))
        if make is None:
            side = torch_arrays if framework == "torch" else numpy_arrays
            make = self._makers[framework, dtype] = side.small_maker(dtype)
        array = make(shape)
        return array, array.data_ptr() if framework == "torch" else array_memory(array)[0]


def check_framework(framework: object) -> None:
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(map(repr, FRAMEWORKS))}, not {framework!r}")


def convert(array: Any, framework: Framework) -> Any:
    """The same bytes as an array of the other framework, without a copy where memory allows.

    Raises `UnsupportedState` if that framework has no such element type, `ValueError` if there is no such
    framework.
    """
    check_framework(framework)
    if isinstance(array, np.ndarray):
        return array if framework == "numpy" else torch_arrays.from_numpy(array)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        raise UnsupportedState(f"cannot convert {type(array).__name__} to a {framework} array")
    return array if framework == "torch" else torch_arrays.to_numpy(array)
