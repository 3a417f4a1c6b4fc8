"""From the words of torch's DTensor to splits, without torch.

DTensor lists one placement per mesh dimension and reads them from left to right; where the truth is another
order (`fully_shard` on top of tensor parallel splits by the right one first), it says "strided" and how many
shards were there before. Read literally, that gives what ranks really hold only where sizes divide evenly.
The order is what happened, so the order is what is taken from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everystep.plan.placement import Split


def splits_of(mesh_shape: Sequence[int], placements: Sequence[tuple[int, int] | None]) -> tuple[Split, ...]:
    """The splits for one placement per mesh dimension: None where replicated, else (axis, split factor).

    The factor is 1 for `Shard`, and that of `_StridedShard`. One that is not the number of shards made by
    some of the mesh dimensions to its right (rows interleaved on purpose) stays a strided split.

    >>> splits_of((4, 2), [(0, 2), (0, 1)])  # fully sharded over 4, on top of tensor parallel over 2
    (Split(axis=0, mesh_dim=1, factor=1), Split(axis=0, mesh_dim=0, factor=1))
    """
    if len(mesh_shape) != len(placements):
        raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh_shape)} dimensions")
    orders: dict[int, list[Split]] = {}
    for dim in range(len(placements) - 1, -1, -1):
        placement = placements[dim]
        if placement is None:
            continue
        axis, factor = placement
        order = orders.setdefault(axis, [])
        shards = [math.prod(mesh_shape[split.mesh_dim] for split in order[:n]) for n in range(len(order) + 1)]
        # A strided one whose number of shards fits comes after those that made them; all others come first.
        if factor in shards and all(split.factor == 1 for split in order[: shards.index(factor)]):
            order.insert(shards.index(factor), Split(axis, dim))
        else:
            order.insert(0, Split(axis, dim, factor))
    return tuple(split for axis in sorted(orders) for split in orders[axis])
