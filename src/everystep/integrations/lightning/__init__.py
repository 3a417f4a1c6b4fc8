"""Everystep under Lightning: where Lightning saves, after every step, and with Fabric.

| module | what it owns |
|---|---|
| `own_saves` | Lightning's own checkpoints through Everystep: `EverystepIO`, `EverystepSharded` |
| `callback` | `EverystepCallback`: a checkpoint after every step, while the next step runs |
| `fabric` | `state_of`: a training with Fabric, for `everystep.Checkpointer`, `save` and `load` |

Private names of Lightning that these rely on: ``Trainer.fit_loop`` with ``epoch_loop.batch_progress``,
``_combined_loader``, ``state_dict`` and ``restarting`` of loops; ``_unwrap_objects`` of Fabric.
"""

from __future__ import annotations

from everystep.integrations.shared.frameworks import require

require("lightning", "2.6", "2.7", extra="lightning")

from everystep.integrations.lightning.callback import EverystepCallback
from everystep.integrations.lightning.fabric import state_of
from everystep.integrations.lightning.own_saves import EverystepIO, EverystepSharded, load_from_checkpoint

__all__ = ["EverystepCallback", "EverystepIO", "EverystepSharded", "load_from_checkpoint", "state_of"]
