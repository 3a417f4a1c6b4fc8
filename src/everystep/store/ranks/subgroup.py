"""Ranks of a subgroup: meshes count the ranks of the world, and a checkpoint counts ranks from 0.

Plans, messages and parts count the ranks of the process group that saves or loads. A mesh of torch counts the
ranks of the world. This module converts between the two; a group of all ranks needs no conversion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from msgspec import structs

from everystep.errors import UnsupportedState
from everystep.state import FlatState, LeafSource, Restore, Sharding
from everystep.store.ranks.transport import Subgroup


def renumber_leaves(flat: FlatState, subgroup: Subgroup | None) -> FlatState:
    """A flattened state whose meshes have the ranks of the subgroup."""
    if subgroup is None:
        return flat
    numbers = _numbers(subgroup.ranks)
    return dataclasses.replace(
        flat,
        leaves=tuple(_leaf(leaf, numbers) for leaf in flat.leaves),
        local_leaves=tuple(_leaf(leaf, numbers) for leaf in flat.local_leaves),
    )


def renumber_targets(restore: Restore, subgroup: Subgroup | None) -> None:
    """The same for the arrays that a restore fills."""
    if subgroup is None:
        return
    numbers = _numbers(subgroup.ranks)
    for name, (sharding, local) in list(restore.parts.items()):
        restore.parts[name] = _sharding(sharding, numbers, name), local


def _numbers(ranks: Sequence[int]) -> dict[int, int]:
    return {rank: number for number, rank in enumerate(ranks)}


def _leaf(leaf: LeafSource, numbers: Mapping[int, int]) -> LeafSource:
    if leaf.sharding is None:
        return leaf
    return structs.replace(leaf, sharding=_sharding(leaf.sharding, numbers, leaf.name))


def _sharding(sharding: Sharding, numbers: Mapping[int, int], name: str) -> Sharding:
    outside = [rank for rank in sharding.mesh_ranks if rank not in numbers]
    if outside:
        raise UnsupportedState(
            f"{name}: its device mesh includes ranks {outside[:8]} of the world, which are not in the given "
            f"process_group ({sorted(numbers)[:8]}). Save and load it with a group of all its ranks"
        )
    return dataclasses.replace(sharding, mesh_ranks=tuple(numbers[rank] for rank in sharding.mesh_ranks))
