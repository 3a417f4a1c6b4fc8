"""A state taken apart: its named leaves, and how each lies in memory and in the world.

Owns the records only; `flatten` makes them, `restore` and the layers above use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from everystep.engine.buffers import ByteSource
from everystep.format.geometry import Box
from everystep.state.node import Node

Framework = Literal["torch", "numpy"]
"""The library whose arrays a leaf was saved from."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an array of this rank is part of a larger one of the given shape.

    Distributed over a mesh (a DTensor): `mesh_shape`, the mesh's ranks in C order, and one placement per mesh
    dimension: None where it is replicated, else the axis it is split along and the factor of a strided split
    (1 for a plain one). Without a mesh (`mesh_shape` is None): the one `box` of it that is here.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] | None = None
    mesh_ranks: tuple[int, ...] = ()
    placements: tuple[tuple[int, int] | None, ...] = ()
    box: Box | None = None


class FragmentPlace(msgspec.Struct, frozen=True, gc=False):
    """Which fragment of a leaf is written: the one that starts at `start` of an array of shape `whole`.

    `index` counts the fragments of that leaf in the same shard; `volume` says which shard that is.
    """

    start: tuple[int, ...]
    whole: tuple[int, ...]
    index: int = 0
    volume: int = 0


class LeafSource(msgspec.Struct, frozen=True, gc=False):
    """An array to store: its name, what it is, and where its bytes come from.

    Shape and source are those of what is here. `sharding` says what it is a part of, if it is. `fragment` is
    set once it is decided which fragment of the leaf is written. Not tracked by the garbage collector: 20,000
    of them would make it search the whole heap in every save.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    framework: Framework
    source: Any  # Source; msgspec does not look inside
    sharding: Any = None  # Sharding | None
    fragment: FragmentPlace | None = None

    @property
    def nbytes(self) -> int:
        source: ByteSource = self.source
        return source.nbytes

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        if self.fragment is not None:
            return self.fragment.whole
        sharding: Sharding | None = self.sharding
        return self.shape if sharding is None else sharding.shape


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart: its tree, its leaves in order, and names that share another leaf's memory.

    `local` has the trees of what belongs to this rank alone (`per_rank`), by place; the leaves they refer to
    are `local_leaves`, under names that no other rank has; `local_aliases` are those that share memory.
    """

    tree: Node
    leaves: tuple[LeafSource, ...]
    aliases: tuple[tuple[str, str], ...]
    local: Mapping[str, Node] = field(default_factory=dict)
    local_leaves: tuple[LeafSource, ...] = ()
    local_aliases: tuple[tuple[str, str], ...] = ()
