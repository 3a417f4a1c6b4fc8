"""Noticing that memory changed while a save was reading it.

Two signs show it. Torch counts the in-place operations on each tensor, but fused optimizers, ``.data`` and
foreign code do not count. So a fingerprint, a hash over a sample of the bytes, is taken as well; it shows any
update of a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everystep import engine
from everystep.checkpointer.ownership import Owner, span
from everystep.engine import Memory, Strided
from everystep.state import LeafSource


@dataclass(slots=True)
class _Watched:
    leaves: list[LeafSource]
    versions: list[int | None]
    plain: list[LeafSource]
    addresses: list[int | None]
    fingerprints: list[int]


Look = tuple[int, int | None, int]
"""The address of a leaf, torch's count of its changes, and a fingerprint, to compare with a later look."""


def look_at(leaf: LeafSource) -> Look | None:
    """None for a leaf that has gaps in its memory: its changes may not show."""
    memory = _memory(leaf)
    if memory is None:
        return None
    return memory.address, _version(memory.owner), engine.fingerprints([memory])[0]


def _memory(leaf: LeafSource) -> Memory | None:
    """The memory that a leaf fills, in any order of its elements; None if there are gaps."""
    source = leaf.source
    if type(source) is Strided:
        start, stop = span(source.address, source.itemsize, source.shape, source.strides)
        return Memory(start, source.nbytes, source.owner) if stop - start == source.nbytes else None
    return source if type(source) is Memory else None


class Guard:
    """What the leaves read in place looked like when the save began, by owner."""

    def __init__(self, in_place: Mapping[Owner, list[LeafSource]]) -> None:
        self._watched = {owner: _look(leaves) for owner, leaves in in_place.items()}

    @property
    def owners(self) -> set[Owner]:
        """Those whose leaves have not been looked at again."""
        return set(self._watched)

    def take(self, owner: Owner | None = None) -> list[str]:
        """Names of an owner's leaves (None: of everybody's) that have changed.

        Each owner is looked at once: after that it may change them. A look that was interrupted is no look.
        """
        wanted = list(self._watched) if owner is None else [owner] if owner in self._watched else []
        found = [name for key in wanted for name in _changed(self._watched[key])]
        for key in wanted:
            del self._watched[key]
        return found


def _look(leaves: list[LeafSource]) -> _Watched:
    found = [(leaf, memory) for leaf in leaves if (memory := _memory(leaf)) is not None]
    plain = [leaf for leaf, _ in found]
    return _Watched(
        leaves,
        [_version(leaf.source.owner) for leaf in leaves],
        plain,
        [_address(leaf.source.owner) for leaf in plain],
        engine.fingerprints([memory for _, memory in found]),
    )


def _changed(before: _Watched) -> list[str]:
    moved = {
        leaf.name
        for leaf, old in zip(before.plain, before.addresses, strict=True)
        if _address(leaf.source.owner) != old
    }
    if moved:
        return [leaf.name for leaf in before.leaves if leaf.name in moved]  # not to be looked at: it is gone
    after = _look(before.leaves)
    names = {
        leaf.name
        for leaf, old, new in zip(before.leaves, before.versions, after.versions, strict=True)
        if old != new
    } | {
        leaf.name
        for leaf, old, new in zip(before.plain, before.fingerprints, after.fingerprints, strict=True)
        if old != new
    }
    return [leaf.name for leaf in before.leaves if leaf.name in names]


def _address(array: Any) -> int | None:
    """Where a tensor lies: ``share_memory_`` and ``resize_`` of its storage change that."""
    found = getattr(array, "data_ptr", None)
    return None if found is None else int(found())


def _version(array: Any) -> int | None:
    try:
        version: int | None = getattr(array, "_version", None)
    except RuntimeError:  # tensors made in inference mode do not count
        return None
    return version
