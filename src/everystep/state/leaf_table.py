"""The leaves of a state as they are found: their names, and which of them share memory.

Owns names (every one is used once) and ties (an array that is met again is an alias of the first). `flatten`
walks the state and fills the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from everystep.errors import UnsupportedState
from everystep.format.dtypes import is_beyond_arrays
from everystep.format.records import MAX_DIMENSIONS
from everystep.format.validate import is_own_name
from everystep.state import sharded
from everystep.state.leaves import LeafSource
from everystep.state.node import NAMELESS
from everystep.state.refusals import unsupported
from everystep.state.value_encoder import is_text

_LIKE_PER_RANK = "names that begin with '@' are those of per_rank state. Use another key here"


def component(key: object) -> str:
    """How a dict key appears in leaf names. The tree holds the key itself."""
    try:
        text = key if type(key) is str else str(key)
    except Exception:  # huge integers, tuples nested too deep, anything a class of the user's does
        text = type(key).__name__
    return text if is_text(text) else text.encode("utf-8", "backslashreplace").decode()


class LeafTable:
    """The leaves and aliases found so far. `per_rank`: they belong to this rank alone."""

    def __init__(self, *, per_rank: bool) -> None:
        self.leaves: list[LeafSource] = []
        self.aliases: list[tuple[str, str]] = []
        self._per_rank = per_rank
        self._used: set[str] = set()
        # Address -> index of the first leaf there. Only a second one pays for a full comparison.
        self._first: dict[int, int] = {}
        # Index -> the array itself, for leaves whose source does not hold it.
        self._arrays: dict[int, Any] = {}
        self._exact: dict[tuple[Any, ...], str] = {}

    def __len__(self) -> int:
        return len(self.leaves) + len(self.aliases)

    def reserve(self, place: str) -> str:
        """Takes the name of a place for an array that is not here, or for something else than an array."""
        name = self._free_name(place)
        self._used.add(name)
        return name

    def add_produced(self, array: Any, address: int, place: str, leaf: LeafSource) -> str:
        """As `add`, for a leaf whose source does not hold the array."""
        index = len(self.leaves)
        name = self.add(array, address, place, leaf)
        if len(self.leaves) > index:
            self._arrays[index] = array
        return name

    def add(self, array: Any, address: int, place: str, leaf: LeafSource) -> str:
        """Add the array of a place: a leaf, or an alias of the leaf that has its bytes. Returns its name."""
        nbytes = leaf.source.nbytes
        if not nbytes or len(leaf.shape) > MAX_DIMENSIONS:
            _check_shape(leaf, place)
        used = self._used
        name = place
        if not name or name[0] == "@" or name in used or not name.isascii():
            name = self._free_name(place)
            leaf = LeafSource(name, leaf.dtype, leaf.shape, leaf.framework, leaf.source, leaf.sharding)
        used.add(name)
        if nbytes and address not in self._first:
            self._first[address] = len(self.leaves)
            self.leaves.append(leaf)
        else:
            known = self._known(array, address, leaf)
            if known is None:
                self.leaves.append(leaf)
            else:
                self.aliases.append((name, known))
        return name

    def check_names(self) -> None:
        """Names of what ranks share must not look like those of what they have for themselves."""
        for name in self._used:
            if name[:1] == "@":
                raise unsupported(name, _LIKE_PER_RANK)

    def _free_name(self, place: str) -> str:
        wanted = component(place) or NAMELESS
        if not self._per_rank and is_own_name(wanted):
            raise unsupported(place, _LIKE_PER_RANK)
        name, count = wanted, 0
        while name in self._used:
            count += 1
            name = f"{wanted}~{count}"
        return name

    def _known(self, array: Any, address: int, leaf: LeafSource) -> str | None:
        """The leaf that already has exactly these bytes, if one has; otherwise this one is it from now on."""
        key: tuple[Any, ...]
        if not leaf.source.nbytes and leaf.sharding is not None:
            key = sharded.memory_identity(array), leaf.sharding
        elif not leaf.source.nbytes:
            # No memory to share, but the same object twice still comes back as one object.
            key = (id(array),)
        else:
            index = self._first[address]
            first = self.leaves[index]
            owner = self._arrays.get(index)
            owner = first.source.owner if owner is None else owner
            self._exact.setdefault((_identity(owner), first.sharding), first.name)
            key = _identity(array), leaf.sharding
        known = self._exact.setdefault(key, leaf.name)
        return None if known == leaf.name else known


def _check_shape(leaf: LeafSource, place: str) -> None:
    """Readers refuse shapes beyond what arrays can have, but torch makes some: views without end of nothing.

    Asked of arrays without elements only, and of those with too many dimensions. Memory bounds all others.
    """
    shape = leaf.whole_shape
    if len(shape) > MAX_DIMENSIONS:
        raise unsupported(place, f"an array of {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    if is_beyond_arrays(leaf.dtype, shape):
        raise unsupported(place, f"an empty array of shape {list(shape)}, beyond what can be read back")


def require_readable(leaf: LeafSource) -> None:
    """`UnsupportedState` for a leaf that readers refuse. For those that `flatten` has not made."""
    if not is_text(leaf.name):
        raise UnsupportedState(f"the name {leaf.name!r} has no UTF-8")
    if is_own_name(leaf.name):
        raise unsupported(leaf.name, _LIKE_PER_RANK)
    _check_shape(leaf, leaf.name)


def _identity(array: Any) -> tuple[Any, ...]:
    """What two arrays must share to be the same bytes seen the same way."""
    shape = tuple(array.shape)
    if type(array) is np.ndarray or type(array) is np.memmap:
        return array.ctypes.data, "numpy", array.dtype, shape, _steps(shape, array.strides)
    flags = array.is_conj(), array.is_neg()
    return array.data_ptr(), str(array.device), array.dtype, shape, _steps(shape, array.stride()), flags


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    # The step of a dimension of length one leads nowhere and means nothing.
    return tuple(step if size > 1 else 0 for size, step in zip(shape, strides, strict=True))
