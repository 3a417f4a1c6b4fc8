"""Promise: without strict, a changed model never leaves state that the next step cannot use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import StateMismatch
from support.states.memory_store import restore, save

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def network(width: int, seed: int, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, width)).to(dtype)


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3, dtype=model[0].weight.dtype)).square().sum().backward()
    optimizer.step()


def make(kind: str, width: int, seed: int, order: str = "mo", steps: int = 0) -> dict[str, Any]:
    model = network(width, seed)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    parts = {"m": ("model", model), "o": ("optimizer", optimizer)}
    return dict(parts[letter] for letter in order)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("order", "steps"), [*itertools.product(["mo", "om"], [0, 2])])
def test_the_next_step_works(kind: str, order: str, steps: int, tmp_path: Path) -> None:
    source = make(kind, 5, 0, order, steps=3)
    target = make(kind, 6, 1, order, steps=steps)
    everystep.save(tmp_path / "one", source)
    own = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in target["optimizer"].state.get(target["model"][1].weight, {}).items()
    }
    with pytest.raises(StateMismatch, match=r"model\.1\.weight"):
        everystep.load(tmp_path / "one", into=target)
    with pytest.warns(RuntimeWarning) as seen:
        everystep.load(tmp_path / "one", into=target, strict=False)
    (said,) = [str(warning.message) for warning in seen]
    for name in ("model.1.weight", "model.1.bias", "optimizer.1.weight", "optimizer.1.bias"):
        assert name in said, said
    now = target["optimizer"].state.get(target["model"][1].weight, {})
    assert now.keys() == own.keys()
    assert all(not isinstance(own[key], torch.Tensor) or torch.equal(own[key], now[key]) for key in own)
    kept = source["optimizer"].state[source["model"][0].weight]
    back = target["optimizer"].state[target["model"][0].weight]
    assert kept.keys() == back.keys()
    assert all(not isinstance(kept[key], torch.Tensor) or torch.equal(kept[key], back[key]) for key in kept)
    step(target["model"], target["optimizer"])


def test_a_parameter_of_another_type_keeps_its_own_moments() -> None:
    source, target = (
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        for model in (network(5, 0), network(5, 1))
    )
    step(**source)
    target["model"][1] = nn.Linear(4, 5, dtype=torch.float64)
    target["optimizer"] = torch.optim.AdamW(target["model"].parameters())
    restore(target, save(source), strict=False)
    assert target["model"][1].weight not in target["optimizer"].state
    assert target["model"][0].weight in target["optimizer"].state


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad", "rprop", "asgd"])
def test_an_optimizer_by_itself_knows_moments_of_another_shape(kind: str) -> None:
    source, target = make(kind, 5, 0, steps=2), make(kind, 6, 1)
    saved = save({"optimizer": source["optimizer"].state_dict()})
    with pytest.raises(StateMismatch, match=r"F32\[5,4\], target F32\[6,4\]"):
        restore({"optimizer": target["optimizer"]}, saved)
    restore({"optimizer": target["optimizer"]}, saved, strict=False)
    step(target["model"], target["optimizer"])


def make_lbfgs(model: nn.Module, steps: int) -> tuple[dict[str, Any], Callable[[], object]]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = model(torch.ones(2, 3)).square().sum()
        found.backward()
        return found

    for _ in range(steps):
        optimizer.step(loss)
    return {"model": model, "optimizer": optimizer}, lambda: optimizer.step(loss)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "another width": lambda: network(6, 1),
    "one layer more": lambda: network(5, 1).append(nn.Linear(5, 2)),
    "one layer less": lambda: network(5, 1)[:1],
    "as many numbers in all": lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)),
}


@pytest.mark.parametrize("changed", OTHERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_history_of_all_parameters_is_dropped_as_a_whole(changed: str, steps: int) -> None:
    source, _ = make_lbfgs(network(5, 0), 2)
    target, again = make_lbfgs(OTHERS[changed](), steps)
    own = str(target["optimizer"].state_dict())
    with pytest.raises(StateMismatch):
        restore(target, save(source))
    restore(target, save(source), strict=False)
    assert str(target["optimizer"].state_dict()) == own
    again()


def test_a_history_of_all_parameters_comes_back_to_these() -> None:
    source, _ = make_lbfgs(network(5, 0), 2)
    target, again = make_lbfgs(network(5, 1), 1)
    restore(target, save(source))
    assert str(target["optimizer"].state_dict()) == str(source["optimizer"].state_dict())
    again()


def test_an_optimizer_by_itself_knows_a_history_of_others() -> None:
    source, target = (make_lbfgs(network(width, 0), 2)[0] for width in (5, 6))
    saved = save({"optimizer": source["optimizer"]})
    with pytest.raises(StateMismatch, match="the history of other parameters"):
        restore({"optimizer": target["optimizer"]}, saved)
