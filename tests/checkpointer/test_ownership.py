"""Promise: what an optimizer changes is known to be its own, also where it has only a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everystep
from everystep.checkpointer.announced_changes import AnnouncedChanges
from everystep.checkpointer.guard import Guard
from everystep.checkpointer.ownership import UNCHANGED, UPDATE, Owner, OwnerKind, owners
from everystep.state import flatten
from support.worlds.peerless_meshes import world

FIRST, SECOND, THIRD = (Owner(OwnerKind.OPTIMIZER, number) for number in range(3))


class Steps:
    """Counts the steps that are announced."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []

    def before(self, owner: Owner) -> None:
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
        changes = AnnouncedChanges(Steps().before)
        changes.attach([optimizer])
        found = owners(state, changes.hooked, updates=False)
        assert {leaf.name: found.of(leaf) for leaf in flatten(state).leaves} == {
            leaf.name: FIRST for leaf in flatten(state).leaves
        }


def test_an_optimizer_that_divides_its_state_announces_its_steps_and_owns_all_parameters() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(6, 8)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        steps = Steps()
        changes = AnnouncedChanges(steps.before)
        changes.attach([optimizer])
        stepped(model, optimizer)
        assert steps.owners == [FIRST], "announced once, before anything changes"
        state = {"model": model, "optimizer": optimizer}
        found = owners(state, changes.hooked, updates=False)
        leaves = flatten(state).leaves
        assert {leaf.name for leaf in leaves if leaf.name.endswith("exp_avg")} == {
            "optimizer.weight.exp_avg",
            "optimizer.bias.exp_avg",
        }
        assert {found.of(leaf) for leaf in leaves} == {FIRST}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bracketed", [True, False])
def test_the_mark_per_rank_changes_nothing_about_ownership(bracketed: bool) -> None:
    weights = torch.zeros(3, requires_grad=True)
    table = np.zeros(4)
    state = everystep.per_rank({"w": weights, "table": table})
    everystep.stable(everystep.per_rank([table]))
    found = owners(state, {}, updates=bracketed)
    by_name = {leaf.name: found.of(leaf) for leaf in flatten(state).local_leaves}
    assert by_name == {"@0._.w": UPDATE if bracketed else None, "@0._.table": UNCHANGED}


def test_leaves_that_several_optimizers_change_have_no_owner() -> None:
    """Each waits for its own leaves only, so these are copied."""
    shared, own = nn.Linear(4, 4), nn.Linear(4, 4)
    first = torch.optim.Adam(shared.parameters())
    second = torch.optim.Adam([*shared.parameters(), *own.parameters()])
    for optimizer in (first, second):
        stepped(shared, optimizer) if optimizer is first else stepped(nn.ModuleList([shared, own]), optimizer)
    state = {"shared": shared, "own": own, "first": first, "second": second}
    changes = AnnouncedChanges(Steps().before)
    changes.attach([first, second])
    found = owners(state, changes.hooked, updates=False)
    for leaf in flatten(state).leaves:
        top = leaf.name.split(".")[0]
        assert found.of(leaf) == {"shared": None, "own": SECOND, "first": FIRST, "second": SECOND}[top], (
            leaf.name
        )


def test_views_of_one_storage_are_distinguished_by_what_they_cover() -> None:
    storage = torch.zeros(100)
    left, middle, right = (
        nn.Parameter(storage[part]) for part in (slice(0, 40), slice(30, 60), slice(60, 100))
    )
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (left, middle, right)]
    everystep.stable(storage)
    changes = AnnouncedChanges(Steps().before)
    changes.attach(optimizers)
    state = {
        "left": left,
        "middle": middle,
        "right": right,
        "inner": storage[70:80],
        "across": storage[55:65],
    }
    found = owners(state, changes.hooked, updates=True)
    assert {leaf.name: found.of(leaf) for leaf in flatten(state).leaves} == {
        "left": None,
        "middle": None,
        "right": THIRD,
        "inner": THIRD,
        "across": None,
    }


def test_an_update_by_either_of_two_optimizers_is_not_stored(tmp_path: Path) -> None:
    """Fused steps do not count as changes to torch, and a single row is in no sample: only waiting helps."""
    embedding = nn.Embedding(20_000, 64)
    optimizers = [torch.optim.Adam(embedding.parameters(), lr=0.1, fused=True) for _ in range(2)]

    def step(optimizer: Any) -> None:
        gradient = torch.zeros_like(embedding.weight)
        gradient[77] = 1.0
        embedding.weight.grad = gradient
        optimizer.step()

    for optimizer in optimizers:
        step(optimizer)
    state = {"a": optimizers[0], "b": optimizers[1], "m": embedding}
    with everystep.Checkpointer(tmp_path, state) as checkpointer:
        for number in range(6):
            before = embedding.weight.detach().clone()
            checkpointer.save(number + 1)
            step(optimizers[number % 2])
            checkpointer.wait()
            assert torch.equal(everystep.load(tmp_path)["m"]["weight"], before)


@pytest.mark.parametrize("move", ["share", "free"])
def test_a_tensor_whose_storage_has_moved_is_reported_and_not_read(move: str) -> None:
    weights = torch.ones(1 << 20)
    leaves = list(flatten({"w": weights}).leaves)
    guard = Guard({UNCHANGED: leaves})
    if move == "share":
        weights.share_memory_()
    else:
        weights.untyped_storage().resize_(0)
    assert guard.take() == ["w"]
