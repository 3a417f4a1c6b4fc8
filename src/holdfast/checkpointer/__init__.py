"""checkpointer: the training loop's side. When to save, what waits for what, what stays, where to resume.

`checkpointer` owns the order of things and names the rooms it uses; `restoring` finds what to resume from,
`in_place` refuses states that nothing can be put back into.
"""

from __future__ import annotations

from holdfast.checkpointer.checkpointer import Checkpointer
from holdfast.checkpointer.keep import Keep, Kept
from holdfast.checkpointer.ownership import stable
from holdfast.checkpointer.pending_save import PendingSave

__all__ = ["Checkpointer", "Keep", "Kept", "PendingSave", "stable"]
