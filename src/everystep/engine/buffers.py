"""Where bytes come from and go to: the vocabulary between `state` (which knows arrays) and the engine.

`owner` keeps the memory alive for as long as the description of it. The native engine moves the bytes; small
things are done from Python, on numpy arrays (`view`, `view_strided`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Memory(msgspec.Struct, frozen=True, gc=False):
    """Contiguous host memory. Reads go straight into it where alignment and its pages allow."""

    address: int
    nbytes: int
    owner: object


@dataclass(frozen=True, slots=True)
class Strided:
    """Host memory seen through byte strides (zero or negative allowed); its C-order bytes are what counts."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: object

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Produced:
    """Bytes that must be fetched (device memory): ``fill(window, offset)`` writes one window of them."""

    nbytes: int
    fill: Callable[[memoryview, int], None]
    owner: object = None


@dataclass(frozen=True, slots=True)
class Consumed:
    """The mirror of `Produced`: ``drain(window, offset)`` takes one window of the C-order bytes.

    ``fetch(window, offset)`` gives them back, where that can be done.
    """

    nbytes: int
    drain: Callable[[memoryview, int], None]
    fetch: Callable[[memoryview, int], None] | None = None


ByteSource = Memory | Strided | Produced
Destination = Memory | Strided | Consumed


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
