"""Host memory as numpy arrays, without a copy: for what is small enough to be done from Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from everystep.engine.buffers import Strided

Bytes = npt.NDArray[np.uint8]


class _Array:
    """Memory as numpy's array interface describes it. An array on it keeps this object alive."""

    def __init__(self, address: int, shape: tuple[int, ...], code: str, strides: Any = None) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": code,
            "strides": strides,
            "version": 3,
        }


def view(address: int, nbytes: int) -> Bytes:
    """So many bytes from an address on."""
    if not nbytes:
        return np.empty(0, np.uint8)  # an empty array may have no address at all
    return np.asarray(_Array(address, (nbytes,), "|u1"))


def view_strided(memory: Strided) -> npt.NDArray[np.void]:
    """Elements without a type, of the shape of `memory`."""
    if not memory.nbytes:
        return np.empty(memory.shape, f"V{memory.itemsize}")
    return np.asarray(_Array(memory.address, memory.shape, f"|V{memory.itemsize}", memory.strides))
