"""checkpointer: the training loop's side. When to save, what to keep, where to resume."""

from __future__ import annotations

from holdfast.checkpointer.checkpointer import Checkpointer
from holdfast.checkpointer.keep import Keep, Kept

__all__ = ["Checkpointer", "Keep", "Kept"]
