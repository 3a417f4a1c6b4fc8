"""All leaves whose names begin alike, such as those of ``model``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from everystep.errors import LeafNotFound
from everystep.state import Framework
from everystep.state.name_groups import did_you_mean
from everystep.store.read.lazy_leaf import LazyLeaf
from everystep.store.read.leaf_reader import LeafReader
from everystep.store.read.parts import Parts


class Subtree(Mapping[str, Any]):
    """The leaves of a subtree, by their names inside it. Reads nothing by itself.

    ``ck["model"]["h.0.w"]`` is the leaf ``model.h.0.w``, and ``ck["model"]["h.0"]`` a subtree again.
    """

    def __init__(self, reader: LeafReader, name: str) -> None:
        """`LeafNotFound` if there are no such leaves."""
        self.name = name
        self._reader = reader
        start = len(name) + 1
        leaves = reader.parts.leaf_infos
        self._leaves = {leaf[start:]: leaf for leaf in leaves if leaf.startswith(f"{name}.") and leaf[start:]}
        if not self._leaves:
            raise LeafNotFound(_absent(reader.parts, name))

    @property
    def nbytes(self) -> int:
        """Of the arrays; tied leaves count once."""
        infos = (self._reader.parts.leaf_infos[name] for name in self._leaves.values())
        return sum(info.nbytes for info in infos if info.alias_of is None)

    def read(self, *, framework: Framework | None = None, verify: bool = True) -> dict[str, Any]:
        """All of its leaves as arrays in memory; of a module, what its ``load_state_dict`` takes.

        Args:
            framework: ``"torch"`` or ``"numpy"``; by default the one that each leaf was saved from.
            verify: Compare what is read with its checksums.
        """
        found = self._reader.read_fresh([*self._leaves.values()], framework, verify=verify)
        return {name: found[leaf] for name, leaf in self._leaves.items()}

    def __getitem__(self, name: str) -> Any:
        return leaf_or_subtree(self._reader, f"{self.name}.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<Subtree {self.name}, {len(self)} leaves, {self.nbytes} bytes>"


def leaf_or_subtree(reader: LeafReader, name: str) -> LazyLeaf | Subtree:
    """The leaf of that name, or else the subtree. `LeafNotFound` for neither."""
    if type(name) is str and not reader.parts.has_leaf(name):
        return Subtree(reader, name)
    return LazyLeaf(name, reader.parts.meta(name), reader.fetch)


def _absent(parts: Parts, name: str) -> str:
    if name in parts.values:
        return f"{name!r} of {parts.path} is a value, not a leaf: see `values`"
    guess = did_you_mean(name, parts.leaf_infos)
    return f"{parts.path} has no leaf {name!r}{guess or '; `everystep show` lists them'}"
