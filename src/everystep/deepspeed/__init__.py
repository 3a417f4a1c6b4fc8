"""Everystep under DeepSpeed: `use(engine)` where DeepSpeed saves, `state_of(engine)` for a `Checkpointer`.

| module | what it owns |
|---|---|
| `checkpoint_engine` | `use`: ``save_checkpoint`` and ``load_checkpoint`` of an engine go through Everystep |
| `live_state` | `state_of`: an engine as a state, for `everystep.Checkpointer`, `save` and `load` |
| `objects` | what both need: DeepSpeed's own classes, and which tensors only a step changes |

What needs no DeepSpeed is in `everystep.integrations`: names and contents of the files, and how they are
committed.
"""

from __future__ import annotations

from everystep.integrations.versions import require

require("deepspeed", "0.19.6", "0.20", extra="deepspeed")

from everystep.deepspeed.checkpoint_engine import EverystepEngine, use
from everystep.deepspeed.live_state import state_of

__all__ = ["EverystepEngine", "state_of", "use"]
