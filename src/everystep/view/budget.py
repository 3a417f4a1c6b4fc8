"""How much may be read for a page: arrays are sampled, and sampling ends in time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Budget:
    """Seconds from now on, and bytes of files. Everything that takes from a budget shares it."""

    seconds: float = 10.0
    nbytes: int = 4 << 30
    spent_nbytes: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return max(self.seconds - (time.monotonic() - self._began), 0.0)

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes may still be read. If so, they count as read."""
        if self.spent_nbytes + nbytes > self.nbytes or not self.seconds_left:
            return False
        self.spent_nbytes += nbytes
        return True
