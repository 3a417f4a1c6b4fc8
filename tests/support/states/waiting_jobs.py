"""A job that stops where a test wants it, without sleeping."""

from __future__ import annotations

import threading
from pathlib import Path

from everystep import engine
from everystep.engine import Backend, Produced, WriteJob, WritePiece
from support.states.random_pieces import small_windows

PATIENCE = 120.0
"""Seconds after which a test that waits for an event has failed."""


class Gate:
    """A producer that stops inside its first window until it is let through."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.windows = 0

    def fill(self, window: memoryview, offset: int) -> None:
        self.windows += 1
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        window[:] = bytes([7]) * len(window)

    def start(self, path: Path, backend: Backend) -> WriteJob:
        pieces = [WritePiece(0, Produced(self.nbytes, self.fill))]
        job = engine.write(path, self.nbytes, pieces, tuning=small_windows(backend))
        assert self.reached.wait(PATIENCE)
        return job
