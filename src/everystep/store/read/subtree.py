"""All leaves whose names begin alike, such as those of ``model``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from everystep.errors import LeafNotFound
from everystep.state import Framework
from everystep.state.name_groups import did_you_mean
from everystep.store.read.stored_checkpoint import StoredCheckpoint


class Subtree(Mapping[str, Any]):
    """The leaves of a subtree, by their names inside of it. Reads nothing until it is asked to.

    ``ck["model"]["h.0.w"]`` is the leaf ``model.h.0.w``, and ``ck["model"]["h.0"]`` a subtree again.
    """

    def __init__(self, checkpoint: StoredCheckpoint, name: str) -> None:
        """`LeafNotFound` if there are no such leaves."""
        self.name = name
        self._checkpoint = checkpoint
        start = len(name) + 1
        self._leaves = {
            leaf[start:]: leaf for leaf in checkpoint.leaves if leaf.startswith(f"{name}.") and leaf[start:]
        }
        if not self._leaves:
            raise LeafNotFound(_absent(checkpoint, name))

    @property
    def nbytes(self) -> int:
        """Of the arrays; tied leaves count once."""
        infos = (self._checkpoint.leaves[name] for name in self._leaves.values())
        return sum(info.nbytes for info in infos if info.alias_of is None)

    def read(self, *, framework: Framework | None = None, verify: bool = True) -> dict[str, Any]:
        """All of its leaves as arrays in memory. Of a module: what its ``load_state_dict`` takes."""
        found = self._checkpoint.read(list(self._leaves.values()), framework=framework, verify=verify)
        return {name: found[leaf] for name, leaf in self._leaves.items()}

    def __getitem__(self, name: str) -> Any:
        return leaf_or_subtree(self._checkpoint, f"{self.name}.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<Subtree {self.name}, {len(self)} leaves, {self.nbytes} bytes>"


def leaf_or_subtree(checkpoint: StoredCheckpoint, name: str) -> Any:
    """The `LazyLeaf` of that name, or else the `Subtree`. `LeafNotFound` for neither."""
    if type(name) is str and name not in checkpoint:
        return Subtree(checkpoint, name)
    return checkpoint[name]


def _absent(checkpoint: StoredCheckpoint, name: str) -> str:
    if name in checkpoint.values:
        return f"{name!r} of {checkpoint.path} is a value, not a leaf: see `values`"
    guess = did_you_mean(name, checkpoint.leaves)
    return f"{checkpoint.path} has no leaf {name!r}{guess or '; `everystep show` lists them'}"
