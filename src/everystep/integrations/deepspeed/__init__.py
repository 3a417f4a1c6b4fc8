"""Everystep under DeepSpeed: `use(engine)` where DeepSpeed saves, `state_of(engine)` for a `Checkpointer`.

| module | what it owns |
|---|---|
| `checkpoint_engine` | `use`: ``save_checkpoint`` and ``load_checkpoint`` of an engine go through Everystep |
| `live_state` | `state_of`: an engine as a state, for `everystep.Checkpointer`, `save` and `load` |
| `objects` | what both need: DeepSpeed's own classes, and which tensors only a step changes |
| `saves`, `tags` | how a tag is committed by all ranks, and its directory; without DeepSpeed |

Names, and DeepSpeed, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everystep.integrations.shared.frameworks import names_on_first_use, require

if TYPE_CHECKING:
    from everystep.integrations.deepspeed.checkpoint_engine import EverystepEngine as EverystepEngine
    from everystep.integrations.deepspeed.checkpoint_engine import use as use
    from everystep.integrations.deepspeed.live_state import state_of as state_of

_HOME_OF = {"EverystepEngine": "checkpoint_engine", "state_of": "live_state", "use": "checkpoint_engine"}
__all__ = sorted(_HOME_OF)
__getattr__ = names_on_first_use(
    __name__, _HOME_OF, lambda: require("deepspeed", "0.19.6", "0.20", extra="deepspeed")
)
