"""Threads on every rank change the state while the ranks save it: what is reported durable can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import everystep
from everystep.checkpointer.checkpointer import Mode
from support.states.changing_memory import changing
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS

NBYTES = 12 << 20
STEPS = 3


def _save(run: str, mode: Mode) -> list[int]:
    memory = np.random.default_rng(dist.get_rank()).integers(0, 256, NBYTES, np.uint8)
    state = {f"stage{dist.get_rank()}": torch.from_numpy(memory), "shared": torch.arange(300_000)}
    with (
        everystep.Checkpointer(
            run, state, mode=mode, timeout=PATIENCE_SECONDS, preemption=False, keep=everystep.Keep(last=STEPS)
        ) as checkpointer,
        changing(memory),
    ):
        savings = [checkpointer.save(step) for step in range(1, STEPS + 1)]
        return [saving.result().step for saving in savings if saving is not None]


def _save_in_every_mode(folder: str) -> list[list[int]]:
    return [_save(f"{folder}/{mode}", mode) for mode in ("sync", "snapshot", "overlap")]


def test_what_ranks_report_durable_can_be_read_while_threads_change_the_state(tmp_path: Path) -> None:
    for durable in values(launch(2, _save_in_every_mode, str(tmp_path))):
        assert durable == [[1, 2, 3]] * 3
    for mode in ("sync", "snapshot", "overlap"):
        for step in range(1, STEPS + 1):
            loaded = everystep.load(tmp_path / mode / f"step-{step:012d}")
            assert loaded["stage0"].nbytes == loaded["stage1"].nbytes == NBYTES
