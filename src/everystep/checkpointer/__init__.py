"""checkpointer: the training loop's side. When to save, what waits for what, what stays, where to resume.

| module | what it owns |
|---|---|
| `checkpointer` | what the user calls, and the order of things |
| `opening`, `open_runs`, `context` | opening a run on all ranks; what saves and restores share |
| `save_task`, `pending_save` | one save, step by step; what the user holds of it |
| `announced_changes`, `ownership`, `observed_changes` | which leaves may be read in place, and who waits |
| `staging`, `live_memory`, `guard` | copies; which memory may change by now; whether it changed too early |
| `restore`, `in_place` | finding what to resume from; states that nothing can be put back into |
| `schedule`, `preemption`, `preemption_duty` | when to save; signals; deciding both for all ranks |
| `keep`, `retention`, `free_space` | which checkpoints stay; removing the others; space on the device |
| `run_observer`, `events`, `drilling` | the moments of a run; their log; the diary of a drill |
"""

from __future__ import annotations

from everystep.checkpointer.checkpointer import Checkpointer
from everystep.checkpointer.keep import Keep, Kept
from everystep.checkpointer.ownership import stable
from everystep.checkpointer.pending_save import PendingSave

__all__ = ["Checkpointer", "Keep", "Kept", "PendingSave", "stable"]
