"""checkpointer: the training loop's side. When to save, what waits for what, what stays, where to resume.

How a checkpoint is written and read is `store`'s; nothing here knows a file of a checkpoint, and nothing here
knows a framework.

| module | what it owns |
|---|---|
| `checkpointer` | what the user calls, and the order of things |
| `opening` | arguments; opening a run on all ranks; what saves and restores share |
| `save_task`, `pending_save` | one save, step by step; what the user holds of it |
| `announced_changes`, `ownership` | who announces changes of the state; which leaves may be read in place |
| `staging`, `live_memory`, `guard` | copies; which memory may change by now; whether any changed too early |
| `restore` | finding what to resume from, and filling the state |
| `schedule`, `preemption` | when to save; signals that ask the process to end |
| `keep`, `retention`, `free_space` | which checkpoints stay; removing the others; space on the device |
| `run_observer`, `events`, `drilling` | the moments of a run; their log; the diary of a drill |
"""

from __future__ import annotations

from everystep.checkpointer.checkpointer import Checkpointer, check_options
from everystep.checkpointer.keep import Keep, Kept
from everystep.checkpointer.ownership import stable
from everystep.checkpointer.pending_save import PendingSave

__all__ = ["Checkpointer", "Keep", "Kept", "PendingSave", "check_options", "stable"]
