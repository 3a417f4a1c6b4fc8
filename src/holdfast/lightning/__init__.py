"""Holdfast under Lightning: where Lightning saves, after every step, and with Fabric.

| module | what it owns |
|---|---|
| `own_saves` | Lightning's own checkpoints through Holdfast: `HoldfastIO`, `HoldfastSharded` |
| `callback` | `HoldfastCallback`: a checkpoint after every step, while the next step runs |
| `fabric` | `state_of`: a training with Fabric, for `holdfast.Checkpointer`, `save` and `load` |

Private names of Lightning that these rely on: ``Trainer.fit_loop`` with ``epoch_loop.batch_progress``,
``_combined_loader``, ``state_dict`` and ``restarting`` of loops; ``_unwrap_objects`` of Fabric.
"""

from __future__ import annotations

from holdfast.integrations.versions import require

require("lightning", "2.6", "2.7", extra="lightning")

from holdfast.lightning.callback import HoldfastCallback
from holdfast.lightning.fabric import state_of
from holdfast.lightning.own_saves import HoldfastIO, HoldfastSharded, load_from_checkpoint

__all__ = ["HoldfastCallback", "HoldfastIO", "HoldfastSharded", "load_from_checkpoint", "state_of"]
