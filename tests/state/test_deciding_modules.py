"""Promise: a module that sizes or renames its entries while it loads decides about them, as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import StateMismatch
from support.states.memory_store import restore, save


class Sizing(nn.Module):
    """Takes its history at whatever length it comes, by overriding `_load_from_state_dict`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("history", torch.arange(float(length)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.history = torch.empty_like(state_dict[f"{prefix}history"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Whole(nn.Module):
    """The same, by overriding `load_state_dict`, and without `strict`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("history", torch.arange(float(length)))

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        self.history = torch.empty_like(state_dict["history"])
        return super().load_state_dict(state_dict)


def hooked(length: int) -> nn.Module:
    module = nn.Module()
    module.register_buffer("history", torch.arange(float(length)))

    def size(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        module.history = torch.empty_like(state_dict[f"{prefix}history"])

    module.register_load_state_dict_pre_hook(size)
    return module


def per_channel(channels: int) -> nn.Module:
    from torch.ao.quantization import PerChannelMinMaxObserver

    observer = PerChannelMinMaxObserver(ch_axis=0)
    if channels:
        observer(torch.randn(channels, 4))
    return observer


def fake_quantize(channels: int) -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

    made = FakeQuantize(
        MovingAveragePerChannelMinMaxObserver,
        -128,
        127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    )
    if channels:
        made(torch.randn(channels, 4))
    return made


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "overridden part": Sizing,
    "overridden whole": Whole,
    "pre-hook": hooked,
    "observer": per_channel,
    "fake quantize": fake_quantize,
}


def state_of(module: nn.Module) -> dict[str, Any]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    left, right = state_of(one), state_of(other)
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype
        assert torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
def test_a_new_process_restores_what_torch_loads(name: str, nested: bool) -> None:
    if nested and name == "overridden whole":
        pytest.skip("torch asks only the outermost module for its load_state_dict")

    def make(size: int) -> nn.Module:
        torch.manual_seed(size)
        part = MAKERS[name](size)
        return nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"part": part})) if nested else part

    source, target, oracle = make(5), make(0), make(0)
    oracle.load_state_dict(copy.deepcopy(source.state_dict()))
    restore({"model": target}, save({"model": source}))
    assert_same(target, oracle)
    assert_same(target, source)


def test_other_parts_are_still_compared_before_anything_changes() -> None:
    source = nn.ModuleDict({"sized": Sizing(5), "plain": nn.Linear(2, 3)})
    target = nn.ModuleDict({"sized": Sizing(0), "plain": nn.Linear(2, 4)})
    before = state_of(target)
    with pytest.raises(StateMismatch, match="Nothing has been changed") as caught:
        restore({"model": target}, save({"model": source}))
    assert [line.partition(":")[0] for line in caught.value.wrong] == [
        "model.plain.weight",
        "model.plain.bias",
    ]
    now = state_of(target)
    assert now.keys() == before.keys()
    assert all(torch.equal(now[key], before[key]) for key in now)


class Renaming(nn.Module):
    """Knows its weight under an old name, and drops what it had once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(1))
        self.register_load_state_dict_pre_hook(self._upgrade)

    @staticmethod
    def _upgrade(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}w" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}w")
        state_dict.setdefault(f"{prefix}scale", torch.full((1,), 7.0))
        state_dict.pop(f"{prefix}position_ids", None)


def test_entries_of_an_old_version_are_taken_by_the_module_s_own_hook() -> None:
    target = nn.ModuleDict({"a": Renaming(), "b": nn.Linear(1, 1)})
    saved = {
        "a.w": torch.arange(3.0),
        "a.position_ids": torch.arange(9),
        **nn.ModuleDict({"b": target["b"]}).state_dict(),
    }
    restore({"model": target}, save({"model": saved}))
    assert target["a"].weight.tolist() == [0, 1, 2]
    assert target["a"].scale.tolist() == [7]


def test_what_the_hook_does_not_take_is_an_error() -> None:
    target = Renaming()
    with pytest.raises(StateMismatch, match="surprise"):
        restore({"model": target}, save({"model": {"w": torch.ones(3), "surprise": torch.ones(1)}}))
    with pytest.raises(StateMismatch, match="weight"):
        restore({"model": target}, save({"model": {"scale": torch.ones(1)}}))


def test_without_strict_what_fits_is_restored_and_the_rest_is_named() -> None:
    target = nn.ModuleDict({"a": Renaming(), "b": nn.Linear(2, 2)})
    target.register_load_state_dict_pre_hook(lambda *rest: None)
    source = nn.ModuleDict({"a": Renaming(), "b": nn.Linear(2, 3)})
    nn.init.ones_(source["a"].weight)
    before = state_of(target)
    saved = save({"model": source})
    with pytest.raises(StateMismatch, match="size mismatch"):
        restore({"model": target}, saved)
    made = restore({"model": target}, saved, strict=False)
    assert made["model"]["a"].weight.tolist() == [1, 1, 1]
    assert torch.equal(target["b"].weight, before["b.weight"])


def test_a_report_without_strict_names_what_was_refused(tmp_path: Any) -> None:
    class Stubborn(Renaming):
        pass

    everystep.save(
        tmp_path / "one", {"model": {"weight": torch.ones(4), "other": torch.ones(1)}, "n": torch.ones(1)}
    )
    target = {"model": Stubborn(), "n": torch.zeros(1)}
    with pytest.warns(RuntimeWarning) as seen:
        everystep.load(tmp_path / "one", into=target, strict=False)
    (said,) = [str(warning.message) for warning in seen]
    assert "model.weight: checkpoint F32[4], target F32[3]" in said
    assert "model.other" in said
    assert target["n"].tolist() == [1]
    assert target["model"].weight.tolist() == [0, 0, 0]


def test_a_batch_norm_of_an_old_file_gets_its_counter_as_in_torch() -> None:
    source = nn.BatchNorm1d(3)
    nn.init.uniform_(source.weight)
    old = {key: value for key, value in source.state_dict().items() if key != "num_batches_tracked"}
    target, oracle = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    oracle.load_state_dict(old)
    restore({"model": target}, save({"model": old}))
    assert_same(target, oracle)


def test_a_batch_norm_of_this_version_without_its_counter_is_refused_before_anything_changes() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    with pytest.raises(StateMismatch, match="Nothing has been changed"):
        restore({"model": nn.BatchNorm1d(3)}, save({"model": state}))


def test_moments_of_a_parameter_that_is_resized_while_loading_come_back() -> None:
    class Growing(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(size))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.weight.data = torch.empty_like(state_dict[f"{prefix}weight"])
            super()._load_from_state_dict(state_dict, prefix, *rest)

    def make(size: int) -> dict[str, Any]:
        model = Growing(size)
        return {"optimizer": torch.optim.Adam(model.parameters()), "model": model}

    source, target = make(5), make(0)
    source["model"].weight.grad = torch.ones(5)
    source["optimizer"].step()
    restore(target, save(source))
    for one in (source, target):
        one["model"].weight.grad = torch.full((5,), 0.5)
        one["optimizer"].step()
    assert torch.equal(source["model"].weight, target["model"].weight)


def test_a_cast_while_loading_is_refused() -> None:
    class Casting(Sizing):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.history = torch.empty(state_dict[f"{prefix}history"].shape, dtype=torch.float16)
            nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)

    with pytest.raises(StateMismatch, match="cast"):
        restore({"model": Casting(0)}, save({"model": Sizing(5)}))
