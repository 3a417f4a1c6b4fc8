"""Promise: what an optimizer changes is known to be its own, also where it has only a part of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.state.worlds import world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.checkpointer.ownership import NOBODY, UPDATE, Hooks, owners
from holdfast.state import flatten


class Steps:
    """Counts the steps that are announced."""

    def __init__(self) -> None:
        self.owners: list[int] = []

    def before(self, owner: int) -> None:
        self.owners.append(owner)


def stepped(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_parts_of_parameters_and_of_their_state_are_the_optimizers() -> None:
    with world(1, 4):
        model = nn.Linear(6, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        optimizer = torch.optim.AdamW(model.parameters())
        stepped(model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        hooks = Hooks(Steps().before)
        hooks.attach([optimizer])
        found = owners(state, hooks, bracketed=False)
        assert {leaf.name: found.of(leaf) for leaf in flatten(state).leaves} == {
            leaf.name: 0 for leaf in flatten(state).leaves
        }


def test_an_optimizer_that_divides_its_state_announces_its_steps_and_owns_all_parameters() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(6, 8)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        steps = Steps()
        hooks = Hooks(steps.before)
        hooks.attach([optimizer])
        stepped(model, optimizer)
        assert steps.owners == [0], "announced once, before anything changes"
        state = {"model": model, "optimizer": optimizer}
        found = owners(state, hooks, bracketed=False)
        leaves = flatten(state).leaves
        assert {leaf.name for leaf in leaves if leaf.name.endswith("exp_avg")} == {
            "optimizer.weight.exp_avg",
            "optimizer.bias.exp_avg",
        }
        assert {found.of(leaf) for leaf in leaves} == {0}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bracketed", [True, False])
def test_the_mark_per_rank_changes_nothing_about_ownership(bracketed: bool) -> None:
    weights = torch.zeros(3, requires_grad=True)
    table = np.zeros(4)
    state = holdfast.per_rank({"w": weights, "table": table})
    holdfast.stable(holdfast.per_rank([table]))
    found = owners(state, Hooks(Steps().before), bracketed=bracketed)
    by_name = {leaf.name: found.of(leaf) for leaf in flatten(state).local_leaves}
    assert by_name == {"@0._.w": UPDATE if bracketed else None, "@0._.table": NOBODY}
