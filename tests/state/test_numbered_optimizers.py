"""Promise: a state dict that counts an optimizer's parameters is restored as by `load_state_dict`."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import StateMismatch
from support.states.memory_store import restore, save


class Shampooish(torch.optim.Optimizer):
    """State that is nested: lists, dicts with number keys, tuples, values, and one that is None."""

    def __init__(self, params: Any, lr: float = 0.1, *, slots: int = 2) -> None:
        super().__init__(params, {"lr": lr, "slots": slots})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["factors"] = [torch.eye(size) for size in parameter.shape]
                    state["by_dim"] = {0: {"al": torch.zeros(())}, 1: (torch.ones(2), 3)}
                    state["al"], state["0.al"], state["none"] = torch.full((3,), 5.0), torch.ones(1), None
                    state["step"] = 0
                for dim, factor in enumerate(state["factors"]):
                    factor.mul_(0.5).add_(parameter.sum() * (dim + 1))
                state["by_dim"][0]["al"] += 1
                state["step"] += 1
                parameter.sub_(parameter.grad * group["lr"])


def _optimizer(kind: str, groups: Any) -> torch.optim.Optimizer:
    if kind == "Shampooish":
        return Shampooish(groups)
    if kind == "LBFGS":
        return torch.optim.LBFGS(groups, history_size=3, max_iter=2)
    given: dict[str, Any] = {"lr": 0.01}
    if kind == "SGD":
        given["momentum"] = 0.9
    if kind == "RMSprop":
        given |= {"momentum": 0.5, "centered": True}
    if kind in ("Adam", "AdamW"):
        given["amsgrad"] = True
    return getattr(torch.optim, kind)(groups, **given)  # type: ignore[no-any-return]


KINDS = [
    name
    for name in sorted(dir(torch.optim))
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")
]


class Halves(nn.Module):
    """Two parts of the same shapes: moments that change places fit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enc = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        self.dec = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))


def _groups(model: Halves, rng: random.Random, kind: str, *, named: bool) -> Any:
    """The parameters in an order and in groups of their own, by the same numbers of `rng` the same."""
    pairs = list(model.named_parameters())
    rng.shuffle(pairs)
    items: list[Any] = [pair if named else pair[1] for pair in pairs]
    if kind == "LBFGS" or rng.random() < 0.3:
        return items
    cut = rng.randrange(1, len(items))
    groups = [{"params": items[:cut], "lr": 0.5}, {"params": items[cut:], "weight_decay": 0.25}]
    if kind in ("Rprop", "Shampooish", "LBFGS"):
        del groups[1]["weight_decay"]
    return groups


def _train(model: Halves, optimizer: torch.optim.Optimizer, steps: int, frozen: int | None = None) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model.dec(model.enc(torch.arange(6.0).reshape(2, 3))) - 1).square().mean()
        loss.backward()
        if frozen is not None and not isinstance(optimizer, Shampooish):
            list(model.parameters())[frozen].grad = None
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def same(one: Any, other: Any, place: str = "") -> None:
    """Fails unless two state dicts are equal: every key in its order, every type, every bit."""
    assert type(one) is type(other), f"{place}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert one.shape == other.shape, place
        assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), place
    elif isinstance(one, dict):
        assert list(one) == list(other), place
        for key in one:
            same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for index, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{place}.{index}")
    else:
        assert one == other, place


def _cases() -> Iterator[tuple[str, int]]:
    for kind in [*KINDS, "Shampooish"]:
        for seed in range(6):
            yield kind, seed


@pytest.mark.parametrize(("kind", "seed"), list(_cases()))
def test_numbers_are_restored_by_position_as_torch_does(kind: str, seed: int) -> None:
    named = seed % 3 == 2
    source = Halves(0)
    optimizer = _optimizer(kind, _groups(source, random.Random(seed), kind, named=named))
    _train(source, optimizer, steps=2, frozen=seed % 4 if seed % 2 else None)
    plain = copy.deepcopy(optimizer.state_dict())
    saved = save({"model": source, "optimizer": plain})
    outcomes = []
    for ours in (True, False):
        model = Halves(1)
        fresh = _optimizer(kind, _groups(model, random.Random(seed), kind, named=named and seed != 5))
        _train(model, fresh, steps=seed % 3)
        model.load_state_dict(source.state_dict())
        if ours:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                restore({"model": model, "optimizer": fresh}, saved)
        else:
            fresh.load_state_dict(copy.deepcopy(plain))
        restored = copy.deepcopy(fresh.state_dict())
        _train(model, fresh, steps=2)
        outcomes.append((restored, dict(model.state_dict())))
    same(outcomes[0], outcomes[1])


def test_the_optimizer_s_own_order_counts_and_not_the_model_s(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = Halves(seed)
        return {
            "model": model,
            "optimizer": torch.optim.AdamW([*model.dec.parameters(), *model.enc.parameters()]),
        }

    source, ours, theirs = make(0), make(1), make(1)
    _train(source["model"], source["optimizer"], 3)
    states = {"model": source["model"].state_dict(), "optimizer": source["optimizer"].state_dict()}
    everystep.save(tmp_path / "one", states)
    torch.save(states, tmp_path / "two.pt")
    everystep.load(tmp_path / "one", into=ours)
    loaded = torch.load(tmp_path / "two.pt", weights_only=True)
    theirs["model"].load_state_dict(loaded["model"])
    theirs["optimizer"].load_state_dict(loaded["optimizer"])
    same(ours["optimizer"].state_dict(), theirs["optimizer"].state_dict())
    for one, other in zip(ours["model"].parameters(), source["model"].parameters(), strict=True):
        moments = ours["optimizer"].state[one]["exp_avg"], source["optimizer"].state[other]["exp_avg"]
        assert torch.equal(*moments)


def test_groups_of_layer_wise_decay(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = Halves(seed)
        layers = [model.dec[1], model.dec[0], model.enc[1], model.enc[0]]
        groups = [
            {"params": list(one.parameters()), "lr": 0.1 * 0.5**depth} for depth, one in enumerate(layers)
        ]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    source, ours, theirs = make(0), make(1), make(1)
    _train(source["model"], source["optimizer"], 3)
    plain = source["optimizer"].state_dict()
    restore(
        {"optimizer": ours["optimizer"], "model": ours["model"]},
        save({"optimizer": plain, "model": source["model"]}),
    )
    theirs["optimizer"].load_state_dict(plain)
    same(ours["optimizer"].state_dict(), theirs["optimizer"].state_dict())


def _adam(*sizes: int) -> torch.optim.Adam:
    return torch.optim.Adam(
        [{"params": [nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
    )


@pytest.mark.parametrize(
    ("theirs", "own"),
    [((2,), (3,)), ((3,), (2,)), ((2, 2), (4,)), ((4,), (2, 2)), ((1, 3), (3, 1)), ((2, 0), (2,))],
)
def test_groups_of_other_sizes_are_an_error_as_in_torch(
    theirs: tuple[int, ...], own: tuple[int, ...]
) -> None:
    source, target = _adam(*theirs), _adam(*own)
    for group in source.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(2)
    source.step()
    plain = source.state_dict()
    with pytest.raises(ValueError, match="group"):
        _adam(*own).load_state_dict(copy.deepcopy(plain))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(StateMismatch):
        restore({"optimizer": target}, save({"optimizer": plain}))
    same(target.state_dict(), before)


@pytest.mark.parametrize("key", [7, "0.al", "model.0.exp_avg"])
def test_state_that_no_parameter_claims_is_an_error(key: Any) -> None:
    plain = {"state": {0: {"m": torch.ones(2)}, key: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    target = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(StateMismatch) as caught:
        restore({"optimizer": target}, save({"optimizer": plain}))
    assert caught.value.extra == (f"optimizer.state.{key}.m",)


def test_other_groups_are_named_where_numbers_cannot_be_matched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    decayed, rest = (
        [p for name, p in model.named_parameters() if name.endswith(end)] for end in ("weight", "bias")
    )
    there = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}])
    model(torch.ones(2, 3)).sum().backward()
    there.step()
    torch.save({"model": model.state_dict(), "optimizer": there.state_dict()}, tmp_path / "c.pt")
    here = torch.optim.AdamW(model.parameters())
    with pytest.raises(StateMismatch, match=r"groups of 2, 2 parameters without names, target groups of 4"):
        everystep.load(tmp_path / "c.pt", into={"model": model, "optimizer": here})
    assert not here.state
