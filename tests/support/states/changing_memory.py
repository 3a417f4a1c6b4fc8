"""Memory that changes while it is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from support.states.random_pieces import Bytes


@contextmanager
def changing(array: Bytes) -> Iterator[None]:
    """Another thread flips bytes all over the array, there and back, as fast as it can."""
    stop, began = threading.Event(), threading.Event()
    positions = np.random.default_rng(1).integers(0, array.size, 512)

    def change() -> None:
        while not stop.is_set():
            array[positions] ^= 0xFF
            began.set()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert began.wait(60)
        yield
    finally:
        stop.set()
        thread.join()
