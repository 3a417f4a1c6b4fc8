"""Promise: rank 0's value of what is marked `rank_zero` comes back on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import everystep
from support.worlds.launcher import launch, values


def _state(rank: int) -> dict[str, Any]:
    return {
        "w": np.arange(300.0),
        "log": everystep.rank_zero({"loss": 0.5 + rank, "curve": np.full(3, float(rank))}),
        "own": everystep.per_rank({"draws": np.full(2, rank)}),
    }


def _train(run: str) -> None:
    rank = dist.get_rank()
    state = _state(rank)
    with everystep.Checkpointer(run, state, mode="sync") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            state["log"].value["loss"] = step + 10.0 * rank
            ckpt.save(step)


def _resume(run: str) -> tuple[float, list[float], list[int]]:
    state = _state(7)
    with everystep.Checkpointer(run, state) as ckpt:
        assert ckpt.restore() == 2
    again = _state(8)
    everystep.load(run, into=again, select="own.*")  # each rank its own, and nothing else
    assert again["log"].value["loss"] == 8.5
    log = state["log"].value
    return log["loss"], log["curve"].tolist(), again["own"].value["draws"].tolist()


def test_every_rank_gets_back_what_rank_zero_saved(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    values(launch(2, _train, run))
    found = values(launch(2, _resume, run))
    assert found == [(2.0, [0.0] * 3, [rank] * 2) for rank in range(2)]
    whole = everystep.load(run)
    assert whole["log"]["loss"] == 2.0
    assert everystep.verify(tmp_path / "run" / "step-000000000002").problems == ()
