"""Dividing the leaves of a save: those read in place, those copied, those read before training goes on.

Memory for copies has a fixed budget. It is kept from save to save, because fresh memory is slow: the kernel
has to map and clear it. Leaves that do not fit are read in place before the save returns, at the speed of the
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everystep import engine
from everystep.checkpointer.ownership import Owner
from everystep.engine import ALIGNMENT, Memory, WritePiece
from everystep.state import LeafSource

_LINE = 64


@dataclass(slots=True)
class Division:
    """The leaves of one save, by when they leave the memory that training uses."""

    urgent: list[LeafSource] = field(default_factory=list)
    """They leave it before the save returns."""
    in_place: dict[Owner, list[LeafSource]] = field(default_factory=dict)
    """By owner: they leave it before that owner changes them."""
    copied: list[LeafSource] = field(default_factory=list)
    """They have left it already: these are the copies."""
    in_place_nbytes: int = 0
    copied_nbytes: int = 0

    def groups(self) -> list[list[LeafSource]]:
        """In the order in which they are written."""
        return [self.urgent, *self.in_place.values(), self.copied]


class Staging:
    """The memory that copies go to. One save uses it at a time."""

    def __init__(self, budget_nbytes: int) -> None:
        self._budget = budget_nbytes
        self._buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def divide(
        self, leaves: tuple[LeafSource, ...], owner_of: Callable[[LeafSource], Owner | None]
    ) -> Division:
        """Divides the leaves, and copies those without an owner that fit the budget."""
        found = Division()
        loose = []
        for leaf in leaves:
            nbytes = leaf.source.nbytes
            owner = owner_of(leaf) if nbytes else None
            if owner is None:
                loose.append(leaf)
            else:
                found.in_place.setdefault(owner, []).append(leaf)
                found.in_place_nbytes += nbytes
        pieces: list[WritePiece] = []
        chosen: list[LeafSource] = []
        end = 0
        for leaf in loose:
            start = _round_up(end, _LINE)
            if start + leaf.nbytes <= self._budget:
                pieces.append(WritePiece(start, leaf.source))
                chosen.append(leaf)
                found.copied_nbytes += leaf.nbytes
                end = start + leaf.nbytes
            else:
                found.urgent.append(leaf)
        if chosen:
            buffer = self._buffer_of(end)
            engine.copy(pieces, buffer)
            base = buffer.ctypes.data
            found.copied = [
                LeafSource(
                    leaf.name,
                    leaf.dtype,
                    leaf.shape,
                    leaf.framework,
                    Memory(base + piece.offset, leaf.nbytes, buffer),
                    leaf.sharding,
                    leaf.fragment,
                )
                for leaf, piece in zip(chosen, pieces, strict=True)
            ]
        return found

    def _buffer_of(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = None  # so that the old and the new one are not in memory together
            self._buffer = engine.fresh_bytes(_round_up(max(nbytes, 1), ALIGNMENT))
        return self._buffer

    def clear(self) -> None:
        self._buffer = None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
