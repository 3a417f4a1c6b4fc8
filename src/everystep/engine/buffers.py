"""Where bytes come from and go to: the vocabulary between `state` (which knows arrays) and the engine.

Nothing here touches the bytes; the native engine does. `owner` keeps the memory alive for as long as
the description of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec


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


Source = Memory | Strided | Produced
Destination = Memory | Strided | Consumed
