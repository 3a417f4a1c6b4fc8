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
    """A training with Fabric as a state for `everystep.Checkpointer`, with every strategy and no gathering.

    The state also has the loss scale of the precision plugin and the random numbers of every rank, under
    the names ``precision`` and ``rng``.

    Args:
        fabric: The ``Fabric`` of the training.
        objects: What ``fabric.setup`` returned, and anything else to save, by names of your choice.
    """
    own = {"precision": fabric.strategy.precision, "rng": per_rank(rng())}
    return with_entries(own, _unwrap_objects(objects))
