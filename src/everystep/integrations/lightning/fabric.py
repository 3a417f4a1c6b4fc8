"""A training with Fabric, as a state for `everystep.Checkpointer`, `save` and `load`.

``Fabric.save`` with a sharded strategy writes files of its own and takes no ``CheckpointIO``. A
`Checkpointer` only needs the objects.
"""

from __future__ import annotations

from typing import Any

from lightning import Fabric
from lightning.fabric.wrappers import _unwrap_objects

from everystep.integrations.shared.states import with_entries
from everystep.state.marks import per_rank
from everystep.state.rng import rng


def state_of(fabric: Fabric, **objects: Any) -> dict[str, Any]:
    """What ``fabric.setup`` returned, by names of your choice, as a state for `everystep.Checkpointer`.

    The state also has the loss scale of the precision plugin and the random numbers of every rank, under
    the names ``precision`` and ``rng``. It works with every strategy, without gathering.
    """
    own = {"precision": fabric.strategy.precision, "rng": per_rank(rng())}
    return with_entries(own, _unwrap_objects(objects))
