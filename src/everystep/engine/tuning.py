"""How the engine moves bytes: the one source of window sizes and queue depths.

Saves, loads, export, doctor and the drill take their numbers from here. The native side has no defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from everystep import _native
from everystep.engine.probe import Backend

ALIGNMENT = 4096
"""Of addresses, offsets and lengths in direct I/O: covers every device and filesystem block in use."""
MAX_WINDOW_NBYTES, MAX_DEPTH = 1 << 30, 256
"""Far more than helps: their product is memory."""

STAGING_NBYTES = 32 << 20
"""More did not keep the device busier, and the first save of a process pays for every page."""
WINDOW_NBYTES = 4 << 20
"""Eight of them kept the device busier than four of twice the size, in as much memory."""
SMALL_NBYTES = 1 << 20
"""Files up to this size go through the page cache: the latency of direct I/O costs more than a copy."""
READ_WINDOW_NBYTES = 8 << 20
"""Loads want 64 MiB under way: with the 32 MiB of saves, 1 GiB took a third longer, cold and warm alike."""

MAX_INFLATION = 100.0
"""Arrays of zeros compress to a thousandth, whole checkpoints seldom to a tenth."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the engine works. The defaults suit NVMe drives; `window * depth` is all the memory a job takes.

    `max_inflation` is for checkpoints of other systems: how many times the bytes of its files the arrays may
    take.
    """

    backend: Backend | None = None
    window_nbytes: int = WINDOW_NBYTES
    depth: int = STAGING_NBYTES // WINDOW_NBYTES
    small_nbytes: int = SMALL_NBYTES
    max_inflation: float = MAX_INFLATION

    def __post_init__(self) -> None:
        if not 0 < self.window_nbytes <= MAX_WINDOW_NBYTES or self.window_nbytes % ALIGNMENT:
            raise ValueError(
                f"engine tuning: window_nbytes must be a multiple of {ALIGNMENT} up to {MAX_WINDOW_NBYTES}, "
                f"not {self.window_nbytes!r}"
            )
        if not 0 < self.depth <= MAX_DEPTH:
            raise ValueError(f"engine tuning: depth must be from 1 to {MAX_DEPTH}, not {self.depth!r}")
        if not 0 <= self.small_nbytes < 1 << 64:
            raise ValueError(f"engine tuning: small_nbytes must be from 0 on, not {self.small_nbytes!r}")

    def count_writes(self, nbytes: int) -> int:
        """How many write calls the engine makes for a file of `nbytes`, once its staging is in memory."""
        return _native.count_writes(
            nbytes, self.backend or "buffered", self.window_nbytes, self.depth, self.small_nbytes
        )


SAVING = Tuning()
READING = Tuning(window_nbytes=READ_WINDOW_NBYTES)
