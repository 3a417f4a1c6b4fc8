"""Promise: ranks that hold different layers save one model, and resume with the layers divided otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from everystep.state import Restore
from everystep.state.merging import merge_trees
from support.states.memory_store import Saved, fresh, save, write


class Stage(nn.Module):
    """Some of the layers of a model, under the names that they have in the whole."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(3, 3) for index in layers})


def training(layers: range, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    stage = Stage(layers)
    return {"model": stage, "optimizer": torch.optim.AdamW(stage.parameters(), lr=0.1), "step": 5}


def stepped(state: dict[str, Any]) -> dict[str, Any]:
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    state["optimizer"].step()
    return state


def together(*saved: Saved) -> Saved:
    """The checkpoint of several ranks."""
    return Saved(
        merge_trees([one.tree for one in saved]),
        {name: meta for one in saved for name, meta in one.leaves.items()},
        {},
        {name: data for one in saved for name, data in one.data.items()},
    )


def test_a_pipeline_is_cut_at_another_layer() -> None:
    whole = together(save(stepped(training(range(0, 3), 1))), save(stepped(training(range(3, 4), 2))))
    seen: set[str] = set()
    for layers in (range(0, 1), range(1, 4)):
        state = training(layers, seed=9)
        made = Restore(state, whole.tree, whole.leaves, whole.aliases, shared=True)
        assert not made.mismatch
        for name, where in made.destinations.items():
            write(where, whole.data[name])
        made.finish(fresh(whole, made.fresh))
        again = save(state)
        assert again.data == {name: whole.data[name] for name in again.data}
        wanted = {f"{index}." for index in layers}
        assert all(any(f"layers.{w}" in name for w in wanted) for name in again.data)
        assert set(made.elsewhere) == set(whole.data) - set(again.data)
        seen |= set(again.data)
    assert seen == set(whole.data)


def test_a_layer_that_no_rank_saved_is_missing() -> None:
    whole = together(save(stepped(training(range(0, 1), 1))), save(stepped(training(range(1, 2), 2))))
    made = Restore(training(range(1, 3), 3), whole.tree, whole.leaves, whole.aliases, shared=True)
    assert set(made.mismatch.missing) == {
        "model.layers.2.weight",
        "model.layers.2.bias",
        "optimizer.layers.2.weight",
        "optimizer.layers.2.bias",
    }
    assert np.all(["layers.0." in name for name in made.elsewhere])
