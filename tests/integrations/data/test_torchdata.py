"""Promise: a loader that keeps its own state (torchdata's) goes into the state tree as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from support.states.datasets import Stream, joined, lists, take

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def shuffled(workers: int) -> Any:
    return stateful_dataloader.StatefulDataLoader(
        list(range(20)),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(3),
        timeout=240 if workers else 0,
    )


def streamed(workers: int) -> Any:
    return stateful_dataloader.StatefulDataLoader(
        Stream(20), batch_size=3, num_workers=workers, timeout=240 if workers else 0
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [shuffled, streamed])
def test_it_resumes_in_the_middle_of_an_epoch(make: Any, workers: int, tmp_path: Path) -> None:
    loader = make(workers)
    iterator = iter(loader)
    seen = take(iterator, 3)
    everystep.save(tmp_path / "c", {"data": loader})
    rest = lists(iterator)
    assert sorted(joined(seen + rest)) == list(range(20))
    again = make(workers)
    everystep.load(tmp_path / "c", into={"data": again})
    assert lists(again) == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_from_a_checkpointer_beside_the_random_numbers(workers: int, tmp_path: Path) -> None:
    loader = shuffled(workers)
    with everystep.Checkpointer(tmp_path, {"data": loader, "rng": everystep.rng()}, mode="sync") as ckpt:
        iterator = iter(loader)
        for step in range(4):
            next(iterator)
            ckpt.save(step + 1)
    wanted = lists(iterator), torch.rand(3).tolist()
    again = shuffled(workers)
    with everystep.Checkpointer(tmp_path, {"data": again, "rng": everystep.rng()}, mode="sync") as ckpt:
        assert ckpt.restore() == 4
        assert (lists(again), torch.rand(3).tolist()) == wanted
