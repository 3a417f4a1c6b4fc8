"""Holdfast under DeepSpeed: `use(engine)` where DeepSpeed saves, `state_of(engine)` for a `Checkpointer`.

| module | what it owns |
|---|---|
| `checkpoint_engine` | `use`: ``save_checkpoint`` and ``load_checkpoint`` of an engine go through Holdfast |
| `live_state` | `state_of`: an engine as a state, for `holdfast.Checkpointer`, `save` and `load` |
| `objects` | what both need: DeepSpeed's own classes, and which tensors only a step changes |

What needs no DeepSpeed is in `holdfast.integrations`: names and contents of the files, and how they are
committed.
"""

from __future__ import annotations

from holdfast.integrations.versions import require

require("deepspeed", "0.19.6", "0.20", extra="deepspeed")

from holdfast.deepspeed.checkpoint_engine import HoldfastEngine, use
from holdfast.deepspeed.live_state import state_of

__all__ = ["HoldfastEngine", "state_of", "use"]
