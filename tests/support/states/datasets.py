"""Datasets for the tests of loaders: one notes every access, one has random samples, one fails."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Noted(Dataset[int]):
    """Its samples are their indices; every access, in whatever process, becomes a line of a file."""

    def __init__(self, length: int, diary: Path) -> None:
        self.length = length
        self.diary = str(diary)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        out = os.open(self.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(out, f"{index}\n".encode())
        os.close(out)
        return index

    def accesses(self) -> list[int]:
        return [int(line) for line in Path(self.diary).read_text().split()]


class Augmented(Dataset[torch.Tensor]):
    """Samples made of numbers from all three global generators, with gaussians left in their caches."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [index, random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]
        return torch.tensor(drawn, dtype=torch.float64)


def jitter(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function with random numbers of its own."""
    return torch.stack(samples) + torch.rand(()) + random.random() + np.random.rand()


class Failing(Dataset[int]):
    """Fails once at one index, until its marker file is there."""

    def __init__(self, at: int, marker: Path, error: type[BaseException]) -> None:
        self.at, self.marker, self.error = at, marker, error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.at and not self.marker.exists():
            raise self.error("the file server is away")
        return index


class Dying(Failing):
    """Ends its process instead, as the kernel does when memory is short."""

    def __init__(self, at: int, marker: Path) -> None:
        super().__init__(at, marker, OSError)

    def __getitem__(self, index: int) -> int:
        if index == self.at and not self.marker.exists():
            os._exit(9)
        return index


class Together(Dataset[int]):
    """Fetches a batch in one call."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("asked for a single sample")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 10 for index in indices]


class Stream(IterableDataset[int]):
    """A stream that knows where it is, as torchdata wants it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        step = 1 if info is None else info.num_workers
        first = 0 if info is None else info.id
        while first + self.at * step < self.length:
            self.at += 1
            yield first + (self.at - 1) * step
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def lists(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


def joined(parts: list[Any]) -> list[Any]:
    return list(chain.from_iterable(parts))


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    return [plain(next(iterator)) for _ in range(count)]
