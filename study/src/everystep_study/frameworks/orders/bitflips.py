"""The orders of the suite ``bitflips``: a bit of a weight is flipped, in memory or in a file.

In memory, training goes on and its losses are compared; in a file, the checkpoint is loaded. Which bits are
tried, and who is said to have noticed, is the suite's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everystep_study.frameworks.api import Arrays
from everystep_study.frameworks.orders.context import Context
from everystep_study.frameworks.orders.formats import load
from everystep_study.peers.base import files_below

NOTICED_LOSS = 0.01
"""A loss that is off by more than this part of it would be seen by whoever watches the curve."""
_NEIGHBOURS = 8


def flip_and_train(
    context: Context, bits: int, weights: int, steps: int, seed: int, draw: int, directory: str
) -> dict[str, float]:
    """Trains; then for each bit position goes back to that state, flips the bit in some weights, trains
    on, and compares the losses with those of a training without the flip.

    `draw` chooses the weights. Our own checkpoint goes back, where there is one: it is quick and exact.
    """
    model, quick, _ = context.built
    training = context.framework.build(model, quick, seed)
    for _ in range(steps):
        training.step()
    kinds = context.framework.mechanisms
    chosen = next((each.key for each in kinds if each.ours), kinds[0].key)
    readings: dict[str, float] = {}
    with context.opened(chosen, directory, durable=False, training=training) as opened:
        opened.save_and_wait()
        clean = [training.step() for _ in range(steps)]
        for bit in range(bits):
            opened.load()
            training.set_weights(flip_in_memory(training.weights(), bit, weights, draw))
            found = _compared(clean, [training.step() for _ in range(steps)])
            readings |= {f"{name}, bit {bit}": value for name, value in found.items()}
    return readings


def flip_in_file(context: Context, mechanism: str, directory: str, bit: int, seed: int) -> dict[str, float]:
    """Flips one bit of one weight inside of the files of a checkpoint, loads it, and flips it back.

    A weight is found by its bytes and those of its neighbours. A format that compresses, or stores them
    in another order, has them nowhere.
    """
    with context.opened(mechanism, directory, durable=False) as opened:
        path = opened.path
    array = max(context.training.weights().values(), key=lambda array: array.nbytes)
    flat = np.ascontiguousarray(array).reshape(-1)
    index = random.Random(seed * 1000 + bit).randrange(_NEIGHBOURS, flat.size - _NEIGHBOURS)
    place = find_bytes(path, flat[index - _NEIGHBOURS : index + _NEIGHBOURS].tobytes())
    if place is None:
        return {"found": 0.0}
    file, offset = place
    offset += _NEIGHBOURS * flat.itemsize + bit // 8
    with file_bit_flipped(file, offset, bit % 8):
        try:
            equal = load(context, mechanism, directory, again=True)["readings"]["equal"]
        except Exception:
            return {"found": 1.0, "refused": 1.0}
    return {"found": 1.0, "refused": 0.0, "silent": 1.0 - equal}


@contextmanager
def file_bit_flipped(file: Path, offset: int, bit: int) -> Iterator[None]:
    """A context in which one bit of a file is the other way round."""

    def flip() -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            old = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([old ^ (1 << bit)]))

    flip()
    try:
        yield
    finally:
        flip()


def flip_in_memory(weights: Arrays, bit: int, count: int, seed: int) -> dict[str, NDArray[Any]]:
    """The weights that change: bit `bit` of `count` elements, drawn from all floating-point ones of four
    bytes.
    """
    names = sorted(name for name, array in weights.items() if array.dtype == np.float32 and array.ndim > 1)
    sizes = [weights[name].size for name in names]
    draw = random.Random(seed * 1000 + bit)
    changed: dict[str, NDArray[Any]] = {}
    for name in draw.choices(names, sizes, k=count):
        array = changed.setdefault(name, np.array(weights[name], order="C"))
        flat = array.reshape(-1).view(np.uint32)
        flat[draw.randrange(flat.size)] ^= np.uint32(1 << bit)
    return changed


def find_bytes(path: Path, wanted: bytes) -> tuple[Path, int] | None:
    for file in files_below(path):
        at = file.read_bytes().find(wanted)
        if at >= 0:
            return file, at
    return None


def _compared(clean: list[float], losses: list[float]) -> dict[str, float]:
    """The first step whose loss is off, or no number at all, and how far off the worst one is."""
    noticed = broken = 0
    worst = 0.0
    for step, (loss, expected) in enumerate(zip(losses, clean, strict=True), 1):
        off = abs(loss - expected) / max(abs(expected), 1e-12) if math.isfinite(loss) else math.inf
        if not math.isfinite(loss) and not broken:
            broken = step
        if off > NOTICED_LOSS and not noticed:
            noticed = step
        worst = max(worst, min(off, 1e30))
    return {"noticed_step": noticed, "broken_step": broken, "worst_loss_change": worst}
