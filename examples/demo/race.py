"""The speed part of the demo: Everystep and torch.save with the same state, durable both, in turns.

It is a taste; `everystep bench` is the measurement.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import everystep

State = dict[str, torch.Tensor]
Seconds = dict[str, list[float]]
TENSORS = 16


def race(directory: Path, nbytes: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds of a save and of a cold load, by system."""
    state = {f"layer.{number}": torch.randn(nbytes // TENSORS // 4) for number in range(TENSORS)}
    ours, theirs = directory / "everystep", directory / "torch.pt"
    saves: dict[str, Callable[[], object]] = {
        "everystep": lambda: everystep.save(ours, state),
        "torch.save": lambda: save_durably(theirs, state),
    }
    loads: dict[str, Callable[[], State]] = {
        "everystep": lambda: everystep.load(ours),
        "torch.save": lambda: torch.load(theirs, weights_only=True),
    }
    seconds: dict[str, Seconds] = {name: {"save": [], "load": []} for name in saves}
    for number in range(repeats):
        # The second one finds the device still busy with the first one, so they take turns.
        order = sorted(saves, reverse=bool(number % 2))
        for name in order:
            began = time.perf_counter()
            saves[name]()
            seconds[name]["save"].append(time.perf_counter() - began)
        forget_cached(directory)
        for name in order:
            began = time.perf_counter()
            loaded = loads[name]()
            seconds[name]["load"].append(time.perf_counter() - began)
            require_equal(state, loaded, name)
        shutil.rmtree(ours)
        theirs.unlink()
    return {name: (median(found["save"]), median(found["load"])) for name, found in seconds.items()}


def save_durably(path: Path, state: State) -> None:
    torch.save(state, path)
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget_cached(directory: Path) -> None:
    """Asks the kernel to drop its cache of the files there, so that a load reads the device."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def require_equal(expected: State, actual: State, name: str) -> None:
    """A race won with wrong bytes is lost."""
    for key, tensor in expected.items():
        if not torch.equal(tensor.view(torch.int32), actual[key].view(torch.int32)):
            raise AssertionError(f"{name} returned other bytes for {key!r} than were saved")
