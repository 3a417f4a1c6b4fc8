"""Optimizers whose step begins late: a save must overlap with the closure, and end before the change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import everystep
from everystep.checkpointer.announced_changes import LateStep


def test_hooks_run_when_that_optimizer_begins_and_not_for_another() -> None:
    optimizer, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    step, calls = LateStep(optimizer), []
    handle = step.register_step_pre_hook(lambda *given: calls.append(given))
    step.begin(other)
    assert calls == []
    step.begin(optimizer)
    assert calls == [(optimizer, (), {})]
    handle.remove()
    step.begin(optimizer)
    assert len(calls) == 1


def test_what_is_saved_is_the_state_before_the_step_that_ran_meanwhile(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    step = LateStep(optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 512)).mean()
        loss.backward()
        step.begin(optimizer)
        return loss

    weights: dict[int, torch.Tensor] = {}
    state = {"model": model, "optimizer": optimizer}
    with everystep.Checkpointer(
        tmp_path, state, optimizers=[step], preemption=False, keep=everystep.Keep(last=4)
    ) as ckpt:
        for number in range(1, 5):
            optimizer.step(closure)
            weights[number] = model.weight.detach().clone()
            ckpt.save(number)
    assert ckpt.steps == [1, 2, 3, 4]
    for number in ckpt.steps:
        with everystep.open(tmp_path / f"step-{number:012}") as saved:
            assert torch.equal(saved["model.weight"][:], weights[number])
