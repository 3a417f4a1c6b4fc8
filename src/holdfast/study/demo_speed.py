"""The demo's small race: Holdfast and torch.save, durable both, on the same state and the same device.

Interleaved and repeated, medians reported. It is a taste; `holdfast bench` is the measurement.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

TENSORS = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of one contestant."""

    name: str
    save_seconds: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Race:
    nbytes: int
    repeats: int
    holdfast: Speed
    torch: Speed

    @property
    def save_ratio(self) -> float:
        """How many times faster Holdfast saved."""
        return self.torch.save_seconds / self.holdfast.save_seconds

    @property
    def load_ratio(self) -> float:
        return self.torch.load_seconds / self.holdfast.load_seconds


class Contestant(Protocol):
    """Saves and loads one state; `times` collects what each took."""

    times: Times

    def save(self) -> None: ...
    def load(self) -> dict[str, torch.Tensor]: ...
    def remove(self) -> None: ...


@dataclass(slots=True)
class Times:
    save_seconds: list[float] = field(default_factory=list)
    load_seconds: list[float] = field(default_factory=list)

    def medians(self, name: str) -> Speed:
        return Speed(name, statistics.median(self.save_seconds), statistics.median(self.load_seconds))


@dataclass(slots=True)
class Ours:
    path: Path
    state: dict[str, torch.Tensor]
    times: Times = field(default_factory=Times)

    def save(self) -> None:
        import holdfast

        holdfast.save(self.path, self.state)

    def load(self) -> dict[str, torch.Tensor]:
        import holdfast

        loaded: dict[str, torch.Tensor] = holdfast.load(self.path)
        return loaded

    def remove(self) -> None:
        shutil.rmtree(self.path)


@dataclass(slots=True)
class Theirs:
    path: Path
    state: dict[str, torch.Tensor]
    times: Times = field(default_factory=Times)

    def save(self) -> None:
        import torch

        torch.save(self.state, self.path)
        sync(self.path)
        sync(self.path.parent)

    def load(self) -> dict[str, torch.Tensor]:
        import torch

        loaded: dict[str, torch.Tensor] = torch.load(self.path, weights_only=True)
        return loaded

    def remove(self) -> None:
        self.path.unlink()


def race(directory: Path, *, nbytes: int, repeats: int) -> Race:
    """Saves and loads a state of about `nbytes`, `repeats` times each, in turns."""
    import torch

    elements = nbytes // TENSORS // 4
    state = {f"layer.{i}.weight": torch.randn(elements) for i in range(TENSORS)}
    ours, theirs = Ours(directory / "race-holdfast", state), Theirs(directory / "race-torch.pt", state)
    order: list[Contestant] = [ours, theirs]
    for _ in range(repeats):
        for contestant in order:
            contestant.times.save_seconds.append(timed(contestant.save)[0])
        forget_cached(directory)
        for contestant in order:
            seconds, loaded = timed(contestant.load)
            contestant.times.load_seconds.append(seconds)
            require_equal(state, loaded, type(contestant).__name__)
            del loaded
        for contestant in order:
            contestant.remove()
        # Whoever goes second finds the device busy with the first one's aftermath, so they take turns.
        order.reverse()
    return Race(
        nbytes=TENSORS * elements * 4,
        repeats=repeats,
        holdfast=ours.times.medians("holdfast"),
        torch=theirs.times.medians("torch.save + fsync"),
    )


def timed(action: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(directory: Path) -> None:
    """Asks the kernel to drop what it has cached of the files there, so that a load reads the device."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def require_equal(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], who: str) -> None:
    """A race won with wrong bytes is lost."""
    import torch

    for name, tensor in expected.items():
        if not torch.equal(tensor.view(torch.int32), actual[name].view(torch.int32)):
            raise AssertionError(f"{who} returned other bytes for {name!r} than were saved")
