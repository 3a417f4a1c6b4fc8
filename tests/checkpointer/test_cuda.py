"""Overlapped saves of tensors in device memory. Skipped without a GPU, so rarely run (docs/training.md)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from everystep import Checkpointer, Keep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3000, 3000), torch.nn.BatchNorm1d(3000), torch.nn.Linear(3000, 8)
    ).cuda()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}


def advance(state: dict[str, Any], step: int) -> None:
    torch.manual_seed(step)
    state["optimizer"].zero_grad()
    state["model"](torch.randn(16, 3000, device="cuda")).square().mean().backward()
    state["optimizer"].step()


@pytest.mark.parametrize("mode", ["overlap", "snapshot", "sync"])
def test_each_step_is_stored_as_it_was_while_the_device_runs_on(tmp_path: Path, mode: Any) -> None:
    state = build()
    wanted = {}
    with Checkpointer(tmp_path, state, mode=mode, keep=Keep(last=9)) as ckpt:
        for step in range(1, 5):
            advance(state, step)
            wanted[step] = copy.deepcopy(state["model"].state_dict())
            ckpt.save(step)
    for step, weights in wanted.items():
        found = everystep.load(tmp_path / f"step-{step:012d}", select="model.*")["model"]
        for name, tensor in weights.items():
            assert torch.equal(found[name].cpu(), tensor.cpu()), (step, name)


def test_a_resumed_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = build()
    for step in range(1, 5):
        advance(whole, step)
    state = build()
    with Checkpointer(tmp_path, state) as ckpt:
        for step in range(1, 3):
            advance(state, step)
            ckpt.save(step)
    state = build()
    with Checkpointer(tmp_path, state) as ckpt:
        for step in range(ckpt.restore() + 1, 5):
            advance(state, step)
    for name, tensor in whole["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], tensor), name
