"""How a long function reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes in all."""


def no_progress(done_nbytes: int, total_nbytes: int) -> None:
    """The default: does nothing."""
