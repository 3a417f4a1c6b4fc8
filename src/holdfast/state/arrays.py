"""Arrays of either framework: fresh ones to read into, and the other framework's view of one.

Chooses between `numpy_arrays` and `torch_arrays`, which own everything that depends on the framework.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from holdfast.engine.buffers import Memory
from holdfast.errors import UnsupportedState
from holdfast.state import numpy_arrays, torch_arrays
from holdfast.state.leaves import Framework

FRAMEWORKS: Final[tuple[Framework, ...]] = ("torch", "numpy")


def empty(
    dtype: str, shape: tuple[int, ...], framework: Framework, address_residue: int = 0
) -> tuple[Any, Memory]:
    """A fresh, uninitialised array and its memory.

    From 64 KiB on its address is congruent to `address_residue` modulo 4096, so that a direct read of a file
    offset with that residue needs no staging. A residue that would misalign the elements is taken as 0.
    """
    side = torch_arrays if framework == "torch" else numpy_arrays
    return side.empty(dtype, shape, address_residue)


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
