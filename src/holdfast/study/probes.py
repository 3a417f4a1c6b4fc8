"""The two costs that are not throughput: making a tiny state durable, and ``import holdfast``.

Throughput is in `measure`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from holdfast.study.peers import remove
from holdfast.study.results import ImportCost, Latency, Spread

TINY_NBYTES = 64 * 1024
HEAVY = ("torch", "jax", "tensorflow", "sklearn")

# Run in a new interpreter: only there is the import a first import.
_IMPORT_PROBE = """
import sys, time
start = time.perf_counter()
import holdfast
imported = time.perf_counter() - start
holdfast.save
ready = time.perf_counter() - start
heavy = [name for name in {heavy!r} if name in sys.modules]
import json
print(json.dumps({{"imported": imported, "ready": ready, "heavy": heavy}}))
"""


class _ImportReading(msgspec.Struct, frozen=True):
    imported: float
    ready: float
    heavy: tuple[str, ...]


def import_cost(repetitions: int = 7) -> ImportCost:
    """The first repetition finds the files cold; the median does not mind."""
    probe = _IMPORT_PROBE.format(heavy=HEAVY)
    readings = []
    for _ in range(repetitions):
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"import holdfast failed in a new interpreter: {done.stderr.strip()}")
        readings.append(msgspec.json.decode(done.stdout, type=_ImportReading))
    return ImportCost(
        repetitions=repetitions,
        import_seconds=Spread.of([r.imported for r in readings]),
        ready_seconds=Spread.of([r.ready for r in readings]),
        heavy_modules=tuple(sorted({name for r in readings for name in r.heavy})),
    )


def latency(directory: Path, repetitions: int = 50) -> Latency:
    """A tiny durable save beside write, fsync, rename, fsync of the same bytes by hand, taking turns."""
    import holdfast

    weights = np.random.default_rng(0).integers(0, 256, TINY_NBYTES, dtype=np.uint8)
    state = {"weights": weights}
    data = weights.tobytes()
    room = directory / "latency"
    room.mkdir()
    checkpointer = holdfast.Checkpointer(room / "run", state, mode="sync", keep=holdfast.Keep(last=1))
    ways: dict[str, Callable[[int], object]] = {
        "hand": lambda i: by_hand(room, f"hand-{i}", data),
        "save": lambda i: holdfast.save(room / f"save-{i}", state),
        "checkpointer": lambda i: checkpointer.save(i + 1),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    warm_up = 3  # buffers, the probe of the directory, and two checkpoints to recycle
    try:
        os.sync()
        for i in range(warm_up + repetitions):
            order = list(ways.items())
            for way, act in order[i % 3 :] + order[: i % 3]:
                start = time.perf_counter()
                act(i)
                taken = time.perf_counter() - start
                if i >= warm_up:
                    seconds[way].append(taken)
    finally:
        checkpointer.close()
        remove(room)
    return Latency(
        nbytes=TINY_NBYTES,
        repetitions=repetitions,
        by_hand=Spread.of(seconds["hand"]),
        save=Spread.of(seconds["save"]),
        checkpointer=Spread.of(seconds["checkpointer"]),
    )


def by_hand(directory: Path, name: str, data: bytes) -> None:
    """The shortest sequence that makes a file durable and atomic."""
    temporary = directory / f"{name}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, directory / name)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
