"""A thread of the user's own changes the state while it is saved: what is reported durable can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep import Checkpointer, Keep, Options
from everystep.checkpointer.checkpointer import Mode
from everystep.errors import MutatedDuringSave
from support.states.changing_memory import changing
from support.states.random_pieces import Bytes

NBYTES = 12 << 20
SAVES = 3


def _numpy(memory: Bytes) -> dict[str, Any]:
    return {"buffer": memory}


def _shifted(memory: Bytes) -> dict[str, Any]:
    return {"first": np.arange(1003), "buffer": memory[7:-11]}


def _strided(memory: Bytes) -> dict[str, Any]:
    return {"buffer": memory.reshape(-1, 2)[:, 0]}


def _many(memory: Bytes) -> dict[str, Any]:
    return {str(number): part for number, part in enumerate(np.array_split(memory, 37))}


def _torch(memory: Bytes) -> dict[str, Any]:
    return {"buffer": torch.from_numpy(memory)}


def _conjugate(memory: Bytes) -> dict[str, Any]:
    return {"buffer": torch.from_numpy(memory).view(torch.complex64).conj()}


def _owned(memory: Bytes) -> dict[str, Any]:
    """Read in place by an overlapped save: only the optimizer is expected to change it."""
    weight = torch.nn.Parameter(torch.from_numpy(memory).view(torch.float32))
    return {"buffer": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}


STATES = [_numpy, _shifted, _strided, _many, _torch, _conjugate, _owned]


@pytest.mark.parametrize("mode", ["sync", "snapshot", "overlap"])
@pytest.mark.parametrize("budget", [2 << 20, 256 << 20], ids=["more than the budget", "within the budget"])
@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_a_durable_checkpoint_can_be_read_while_a_thread_changes_the_state(
    tmp_path: Path, mode: Mode, budget: int, make: Any
) -> None:
    memory = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    durable = []
    with (
        Checkpointer(
            tmp_path / "run",
            make(memory),
            mode=mode,
            keep=Keep(last=SAVES),
            options=Options(memory_nbytes=budget),
            preemption=False,
        ) as checkpointer,
        changing(memory),
    ):
        for step in range(1, SAVES + 1):
            try:
                saving = checkpointer.save(step)
                assert saving is not None
                durable.append(saving.result().step)
            except MutatedDuringSave:
                assert make is _owned
    assert durable or make is _owned
    for step in durable:
        loaded = everystep.load(tmp_path / "run" / f"step-{step:012d}")
        assert loaded.keys() == make(memory).keys()


def test_a_checkpoint_saved_by_itself_can_be_read_while_a_thread_changes_the_state(tmp_path: Path) -> None:
    memory = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    with changing(memory):
        for number in range(SAVES):
            everystep.save(tmp_path / str(number), {"buffer": memory, "small": memory[:5000]})
    for number in range(SAVES):
        loaded = everystep.load(tmp_path / str(number))
        assert {name: array.nbytes for name, array in loaded.items()} == {"buffer": NBYTES, "small": 5000}
