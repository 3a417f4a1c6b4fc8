"""Memory that is held between measurements and let go just before each.

A virtual machine whose host takes back unused memory pays for its return page by page, up to seconds per
GiB. That is a cost of that host, not of the system being measured, and it would fall on whoever comes first
after a pause. What is let go here is at hand for the next few moments, for everybody alike; on other machines
it makes no difference.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class Ballast:
    """`nbytes` of touched memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(nbytes, mmap.PAGESIZE)
        self._block: mmap.mmap | None = None
        self._take()

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """The memory is free for others inside the block, and taken again after it."""
        self.close()
        try:
            yield
        finally:
            self._take()

    def close(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None

    def _take(self) -> None:
        self._block = mmap.mmap(-1, self._nbytes)
        view = np.frombuffer(self._block, np.uint8)
        view[:: mmap.PAGESIZE] = 1
        del view  # a mapping that is looked at cannot be closed
