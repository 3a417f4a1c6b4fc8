"""The line of the user's code that a warning of this library is about."""

from __future__ import annotations

import sys


def stack_level() -> int:
    """The `stacklevel` with which ``warnings.warn`` in the calling function names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("everystep."):
        frame, level = frame.f_back, level + 1
    return level
