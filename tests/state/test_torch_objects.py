"""Promise: modules and optimizers come back bit for bit, in place, and keyed by parameter name."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

from everystep.errors import StateMismatch
from everystep.state import Restore, flatten, values
from support.states.memory_store import Saved, load, restore, round_trip, save


class Net(nn.Module):
    """A bit of everything: a tied weight, buffers of several kinds, extra state."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "trace": torch.arange(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert state["trace"].tolist() == list(range(self.calls))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(self.embed(index))) * self.scale


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), betas=(0.8, 0.9)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(list(p), lr=0.1, max_iter=3, history_size=4),
}


def train(model: nn.Module, optimizer: Any, steps: int, scheduler: Any = None, dtype: Any = None) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        index = torch.randint(0, 5, (8,), generator=generator)

        def closure(index: torch.Tensor = index) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(index).float(), index)
            loss.backward()
            return loss

        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()


def everything(state: Any) -> Any:
    """A state in a comparable form: exact bytes and exact values."""
    saved = save(state)
    return saved.data, saved.aliases, repr(values(saved.tree)), {k: str(v) for k, v in saved.leaves.items()}


def new(kind: str, steps: int = 0, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


class TestModules:
    def test_names_are_the_modules_own(self) -> None:
        state = {"model": Net()}
        names = [leaf.name for leaf in flatten(state).leaves]
        assert "model.body.0.weight" in names
        assert "model.body.1.running_mean" in names
        assert "model.scratch" not in names
        assert flatten(state).aliases == (("model.head.weight", "model.embed.weight"),)

    def test_a_module_at_the_top_has_bare_names(self) -> None:
        assert [leaf.name for leaf in flatten(nn.Linear(2, 2)).leaves] == ["weight", "bias"]

    def test_loading_gives_a_state_dict_that_the_module_takes(self) -> None:
        model = Net()
        model.calls = 3
        back = round_trip({"model": model})["model"]
        assert type(back) is OrderedDict
        assert back._metadata == model.state_dict()._metadata
        assert back["head.weight"] is back["embed.weight"]
        other = Net()
        other.load_state_dict(back)
        assert other.calls == 3
        assert everything(other) == everything(model)

    def test_a_state_dict_given_by_hand_is_the_same(self) -> None:
        model = Net()
        assert save({"model": model.state_dict()}) == save({"model": model})

    def test_parameters_and_buffers_are_filled_where_they_are(self) -> None:
        source, target = new("sgd", 2)["model"], Net()
        kept = dict(target.named_parameters()) | dict(target.named_buffers())
        addresses = {name: tensor.data_ptr() for name, tensor in kept.items()}
        saved = save({"model": source})
        plan = Restore({"model": target}, saved.tree, saved.leaves, saved.aliases)
        assert not plan.mismatch
        assert set(plan.fresh) == {"model._extra_state.trace"}
        assert plan.destinations["model.embed.weight"].address == target.embed.weight.data_ptr()
        restore({"model": target}, saved)
        assert everything(target) == everything(source)
        assert target.calls == source.calls == 2
        assert target.head.weight is target.embed.weight
        for name, tensor in (dict(target.named_parameters()) | dict(target.named_buffers())).items():
            assert tensor is kept[name]
            assert tensor.data_ptr() == addresses[name]

    def test_mismatches_are_listed_by_leaf(self) -> None:
        saved = save({"m": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))})
        into = {"m": nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 3, bias=False), nn.PReLU())}
        mismatch = Restore(into, saved.tree, saved.leaves, saved.aliases).mismatch
        assert mismatch.missing == ("m.2.weight",)
        assert mismatch.extra == ("m.1.bias",)
        assert mismatch.wrong == (
            "m.0.weight: checkpoint F32[3,2], target F32[4,2]",
            "m.0.bias: checkpoint F32[3], target F32[4]",
        )
        before = into["m"][0].weight.clone()
        restore(into, saved, strict=False)
        assert torch.equal(into["m"][0].weight, before)
        assert save(into).data["m.1.weight"] == saved.data["m.1.weight"]

    def test_untied_target_of_a_tied_checkpoint_gets_both(self) -> None:
        saved = save({"m": Net()})
        target = Net()
        target.head.weight = nn.Parameter(torch.zeros(5, 4))
        restore({"m": target}, saved)
        assert torch.equal(target.head.weight, target.embed.weight)

    def test_tied_target_of_an_untied_checkpoint_is_reported(self) -> None:
        source = Net()
        source.head.weight = nn.Parameter(torch.zeros(5, 4))
        with pytest.raises(StateMismatch, match="stored apart from"):
            restore({"m": Net()}, save({"m": source}))

    def test_not_a_module_in_the_checkpoint_is_wrong(self) -> None:
        saved = save({"m": [1]})
        assert Restore({"m": Net()}, saved.tree, {}, {}).mismatch.wrong == (
            "m: checkpoint holds a list or tuple, target the module Net",
        )

    def test_load_hooks_and_overrides_still_take_part(self) -> None:
        class Custom(nn.Linear):
            seen: tuple[str, ...] = ()

            def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
                self.seen = tuple(state)
                super()._load_from_state_dict(state, prefix, *rest)

        source, target = nn.Sequential(Custom(2, 2)), nn.Sequential(Custom(2, 2))
        hooked = []
        target.register_load_state_dict_post_hook(lambda module, keys: hooked.append(keys.missing_keys))
        restore(target, save(source))
        assert target[0].seen == ("0.weight", "0.bias")
        assert hooked == [[]]
        assert everything(target) == everything(source)

    def test_tensors_made_up_by_a_hook_go_through_the_module(self) -> None:
        class Doubled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))
                self._register_state_dict_hook(self.double)
                self.register_load_state_dict_pre_hook(self.halve)

            @staticmethod
            def double(module: Any, state: Any, prefix: str, _: Any) -> None:
                state[prefix + "weight"] = state[prefix + "weight"] * 2

            @staticmethod
            def halve(module: Any, state: Any, prefix: str, *_: Any) -> None:
                state[prefix + "weight"] = state[prefix + "weight"] / 2

        source, target = Doubled(), Doubled()
        with torch.no_grad():
            source.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        restore({"m": target}, save({"m": source}))
        assert target.weight.tolist() == [1, 2, 3]

    def test_copies_made_by_a_hook_are_not_mistaken_for_the_module(self) -> None:
        def made() -> nn.Module:
            model = nn.Linear(2, 2)
            model._register_state_dict_hook(
                lambda module, state, *_: state.update({key: item.clone() for key, item in state.items()})
            )
            return model

        source, target = made(), made()
        restore({"m": target}, save({"m": source}))
        assert torch.equal(target.weight, source.weight)

    def test_a_module_gets_the_version_that_was_saved(self) -> None:
        class Versioned(nn.Linear):
            _version = 3
            told = None

            def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
                self.told = metadata.get("version")
                super()._load_from_state_dict(state, prefix, metadata, *rest)

        source, target = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
        saved = save(source)
        target[0]._version = 4
        restore(target, saved)
        assert target[0].told == 3

    def test_lazy_modules_are_materialised(self) -> None:
        source, target = nn.LazyLinear(3), nn.LazyLinear(3)
        source(torch.zeros(1, 2))
        restore({"m": target}, save({"m": source}))
        assert torch.equal(target.weight, source.weight)

    @pytest.mark.filterwarnings("ignore:Complex modules")
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
    def test_modules_of_other_dtypes(self, dtype: torch.dtype) -> None:
        source, target = nn.Linear(3, 2).to(dtype), nn.Linear(3, 2).to(dtype)
        restore(target, save(source))
        assert everything(target) == everything(source)

    def test_channels_last_parameters_are_filled_in_place(self) -> None:
        source, target = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        restore(target, save(source))
        assert torch.equal(target.weight, source.weight)
        assert target.weight.is_contiguous(memory_format=torch.channels_last)


KINDS = ["Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "Adadelta", "Rprop", "ASGD"]


def of_kind(kind: str) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"m": model, "o": getattr(torch.optim, kind)(model.parameters(), lr=0.1)}


class TestOptimizers:
    def test_state_is_named_after_the_parameter(self) -> None:
        saved = save(new("adam", 1))
        for name in ("embed.weight", "body.0.weight", "body.0.bias", "body.1.weight"):
            for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                assert f"optimizer.{name}.{key}" in saved.leaves
        assert values(saved.tree)["optimizer.param_groups"][0]["params"][0] == "embed.weight"

    def test_names_of_its_own_are_used_when_no_module_is_near(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.named_parameters())
        train_once(model, optimizer)
        assert "o.bias.exp_avg" in save({"o": optimizer}).leaves

    def test_position_is_the_last_resort(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        train_once(model, optimizer)
        assert "o.param.1.exp_avg" in save({"o": optimizer}).leaves

    def test_two_modules_with_the_same_names_are_distinguished(self) -> None:
        a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        both = torch.optim.SGD([*a.parameters(), *b.parameters()], momentum=0.9)
        only = torch.optim.SGD(c.parameters(), momentum=0.9)
        for module, optimizer in ((a, both), (b, both), (c, only)):
            train_once(module, optimizer)
        state = {"gen": a, "nets": [b, c], "both": both, "only": only}
        names = [name for name in save(state).leaves if "momentum" in name]
        assert names == [
            "both.gen.weight.momentum_buffer",
            "both.gen.bias.momentum_buffer",
            "both.nets.0.weight.momentum_buffer",
            "both.nets.0.bias.momentum_buffer",
            "only.weight.momentum_buffer",
            "only.bias.momentum_buffer",
        ]

    def test_an_average_of_the_model_beside_it_does_not_change_names(self) -> None:
        state = new("momentum", 1)
        assert set(save(state).leaves) <= set(save({**state, "ema": copy.deepcopy(state["model"])}).leaves)

    def test_loading_gives_a_state_dict_that_torch_takes(self) -> None:
        state = new("adam", 3)
        back = round_trip(state)["optimizer"]
        other = new("adam")
        other["model"].load_state_dict(round_trip(state)["model"])
        other["optimizer"].load_state_dict(back)
        assert everything(other) == everything(state)

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "stepped"])
    def test_a_resumed_run_equals_an_uninterrupted_one(self, kind: str, steps_before: int) -> None:
        straight = new(kind, 3)
        saved = save(straight)
        resumed = new(kind, steps_before, seed=2)
        restore(resumed, saved)
        assert everything(resumed) == everything(straight)
        for state in (straight, resumed):
            train(state["model"], state["optimizer"], 3)
        assert everything(resumed) == everything(straight)

    def test_state_that_exists_is_read_in_place_and_keeps_its_identity(self) -> None:
        saved, target = save(new("adam", 3)), new("adam", 1, seed=2)
        optimizer = target["optimizer"]
        weight = target["model"].body[0].weight
        kept = optimizer.state[weight]["exp_avg"]
        plan = Restore(target, saved.tree, saved.leaves, saved.aliases)
        assert plan.destinations["optimizer.body.0.weight.exp_avg"].address == kept.data_ptr()
        assert not [name for name in plan.fresh if name.startswith("optimizer")]
        restore(target, saved)
        assert optimizer.state[weight]["exp_avg"] is kept

    def test_state_of_an_optimizer_that_never_stepped_is_fresh(self) -> None:
        saved, target = save(new("adam", 1)), new("adam")
        plan = Restore(target, saved.tree, saved.leaves, saved.aliases)
        assert not plan.mismatch
        assert "optimizer.body.0.weight.exp_avg" in plan.fresh

    def test_a_stepped_optimizer_goes_back_to_before_its_first_step(self) -> None:
        saved, target = save(new("adam")), new("adam", 2)
        restore(target, saved)
        assert not target["optimizer"].state_dict()["state"]

    @pytest.mark.parametrize("steps_before", [0, 1], ids=["fresh", "stepped"])
    def test_float32_state_of_bfloat16_parameters_keeps_every_bit(self, steps_before: int) -> None:
        def made(steps: int) -> dict[str, Any]:
            model = nn.Linear(4, 4).bfloat16()
            optimizer = torch.optim.Adam(model.parameters())
            for parameter in model.parameters():
                if steps:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(float(steps)),
                        "exp_avg": torch.randn(parameter.shape),
                        "exp_avg_sq": torch.rand(parameter.shape),
                        "tag": "fp32",
                        "history": [torch.randn(2), (torch.rand(1), 5)],
                    }
            return {"model": model, "optimizer": optimizer}

        source, target = made(2), made(steps_before)
        saved = save(source)
        restore(target, saved)
        assert saved.leaves["optimizer.weight.exp_avg"].dtype == "F32"
        assert everything(target) == everything(source)
        entry = target["optimizer"].state[target["model"].weight]
        assert entry["exp_avg"].dtype == torch.float32
        assert entry["tag"] == "fp32"

    def test_reordered_parameters_find_their_state_by_name(self) -> None:
        def made(order: list[str], steps: int) -> dict[str, Any]:
            torch.manual_seed(steps)
            model = nn.Linear(3, 3)
            parameters = dict(model.named_parameters())
            optimizer = torch.optim.SGD([parameters[name] for name in order], lr=0.1, momentum=0.9)
            for _ in range(steps):
                train_once(model, optimizer)
            return {"model": model, "optimizer": optimizer}

        source = made(["weight", "bias"], 2)
        target = made(["bias", "weight"], 0)
        restore(target, save(source))
        for name in ("weight", "bias"):
            ours = target["optimizer"].state[getattr(target["model"], name)]["momentum_buffer"]
            theirs = source["optimizer"].state[getattr(source["model"], name)]["momentum_buffer"]
            assert torch.equal(ours, theirs)

    def test_a_reordered_optimizer_keeps_its_own_order_of_names(self) -> None:
        source, target = nn.Linear(2, 2), nn.Linear(2, 2)
        saved = save({"m": source, "o": torch.optim.SGD(list(source.named_parameters()))})
        optimizer = torch.optim.SGD(list(target.named_parameters())[::-1])
        restore({"m": target, "o": optimizer}, saved)
        assert optimizer.param_groups[0]["param_names"] == ["bias", "weight"]

    @pytest.mark.parametrize("wrapped", [True, False], ids=["was wrapped", "gets wrapped"])
    def test_activation_checkpointing_does_not_change_names(self, wrapped: bool) -> None:
        def made(wrap: bool, steps: int) -> dict[str, Any]:
            state = new("adam")
            if wrap:
                state["model"].body = checkpoint_wrapper(state["model"].body)
            train(state["model"], state["optimizer"], steps)
            return state

        source, target = made(wrapped, 2), made(not wrapped, 0)
        restore(target, save(source))
        assert everything(target) == everything(source)
        assert "optimizer.body.0.weight.exp_avg" in save(source).leaves

    def test_groups_take_the_settings_their_parameters_had(self) -> None:
        def made(names: list[list[str]], rates: list[float]) -> dict[str, Any]:
            model = nn.Linear(2, 2)
            parameters = dict(model.named_parameters())
            groups = [
                {"params": [parameters[name] for name in group], "lr": rate}
                for group, rate in zip(names, rates, strict=True)
            ]
            return {"model": model, "optimizer": torch.optim.SGD(groups)}

        target = made([["bias"], ["weight"]], [0.0, 0.0])
        restore(target, save(made([["weight"], ["bias"]], [0.1, 0.2])))
        assert [group["lr"] for group in target["optimizer"].param_groups] == [0.2, 0.1]
        saved = save(made([["weight"], ["bias"]], [0.1, 0.2]))
        with pytest.raises(StateMismatch, match=r"optimizer\.param_groups\.0.*2 groups"):
            restore(made([["weight", "bias"]], [0.0]), saved)

    def test_parameters_that_only_one_side_has_are_listed(self) -> None:
        source, target = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(source.parameters(), momentum=0.9)
        train_once(source, optimizer)
        saved = save({"m": source, "o": optimizer})
        plan = Restore(
            {"m": target, "o": torch.optim.SGD(target.parameters())}, saved.tree, saved.leaves, saved.aliases
        )
        assert plan.mismatch.extra == ("m.bias", "o.bias.momentum_buffer")
        saved = save({"m": target, "o": torch.optim.SGD(target.parameters())})
        plan = Restore({"m": source, "o": optimizer}, saved.tree, saved.leaves, saved.aliases)
        assert plan.mismatch.missing == ("m.bias", "o.bias")

    def test_a_grown_parameter_is_wrong_in_the_optimizer_too(self) -> None:
        small, large = nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)
        states = []
        for model in (small, large):
            optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
            train_once(model, optimizer)
            states.append({"m": model, "o": optimizer})
        saved = save(states[0])
        assert Restore(states[1], saved.tree, saved.leaves, saved.aliases).mismatch.wrong == (
            "m.weight: checkpoint F32[2,2], target F32[3,2]",
            "o.weight.momentum_buffer: checkpoint F32[2,2], target F32[3,2]",
        )

    def test_a_state_dict_saved_by_index_restores_by_position(self) -> None:
        source = new("adam", 2)
        by_hand = {"model": source["model"].state_dict(), "optimizer": source["optimizer"].state_dict()}
        target = new("adam", seed=2)
        restore(target, save(by_hand))
        assert everything(target) == everything(source)

    def test_an_optimizer_without_names_takes_a_named_checkpoint_by_position(self) -> None:
        source, target = new("adam", 2), new("adam", seed=2)
        saved = save(source)
        tree = {"optimizer": saved.tree["optimizer"]}
        only = {name: meta for name, meta in saved.leaves.items() if name.startswith("optimizer.")}
        restore({"optimizer": target["optimizer"]}, Saved(tree, only, {}, saved.data))
        target["model"].load_state_dict(load(saved)["model"])
        assert everything(target) == everything(source)

    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("here", KINDS)
    @pytest.mark.parametrize("there", KINDS)
    def test_what_is_accepted_can_be_stepped(self, there: str, here: str, warm: bool) -> None:
        source, target = of_kind(there), of_kind(here)
        train_once(source["m"], source["o"])
        if warm:
            train_once(target["m"], target["o"])
        try:
            restore(target, save(source))
        except StateMismatch as refused:
            assert there != here
            (wrong,) = refused.wrong
            assert wrong.startswith("o: checkpoint is of another kind of optimizer: it has ")
            assert f"target is a torch.optim.{here.lower()}.{here}" in wrong
        else:
            train_once(target["m"], target["o"])

    def test_another_kind_is_refused_by_its_fields(self) -> None:
        source = of_kind("Adam")
        with pytest.raises(StateMismatch, match=r"it has amsgrad, betas, eps, and lacks dampening, momentum"):
            restore(of_kind("SGD"), save(source))

    def test_fields_that_other_versions_and_schedules_bring_are_no_other_kind(self) -> None:
        source, target = of_kind("Adam"), of_kind("Adam")
        (group,) = source["o"].param_groups
        for field in ("foreach", "fused", "decoupled_weight_decay", "amsgrad"):
            del group[field]  # as an older torch has it
        group.update(initial_lr=0.1, param_names=["weight", "bias"], lr=0.25)
        (own,) = target["o"].param_groups
        own.update(amsgrad=True, tag="mine", initial_lr=0.5)
        restore(target, save(source))
        (loaded,) = target["o"].param_groups
        assert (loaded["lr"], loaded["initial_lr"]) == (0.25, 0.1)
        assert (loaded["amsgrad"], loaded["tag"], loaded["fused"]) == (True, "mine", None)
        train_once(target["m"], target["o"])

    def test_an_optimizer_whose_hook_translates_takes_what_it_translates(self) -> None:
        source, target = of_kind("Adam"), of_kind("SGD")

        def forget(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "state": {}}

        target["o"].register_load_state_dict_pre_hook(forget)
        train_once(source["m"], source["o"])
        restore(target, save(source))
        assert torch.equal(target["m"].weight, source["m"].weight)
        assert "betas" in target["o"].param_groups[0]
        assert not target["o"].state
        train_once(target["m"], target["o"])

    def test_state_of_a_parameter_that_the_checkpoint_lacks_is_kept_without_strict(self) -> None:
        source = {"m": nn.ModuleDict({"a": nn.Linear(2, 2)})}
        target = {"m": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})}
        for state in (source, target):
            state["o"] = torch.optim.Adam(state["m"].parameters())  # type: ignore[assignment]
            for module in state["m"].values():
                module(torch.ones(1, 2)).sum().backward()
            state["o"].step()
        kept = target["o"].state[target["m"]["b"].weight]["exp_avg"].clone()
        target["o"].state[target["m"]["a"].weight]["exp_avg"].zero_()
        restore(target, save(source), strict=False)
        assert torch.equal(target["o"].state[target["m"]["b"].weight]["exp_avg"], kept)
        assert torch.equal(
            target["o"].state[target["m"]["a"].weight]["exp_avg"],
            source["o"].state[source["m"]["a"].weight]["exp_avg"],
        )

    def test_something_else_in_its_place_is_wrong(self) -> None:
        saved = save({"optimizer": {"state": 1}})
        target = {"optimizer": new("sgd")["optimizer"]}
        assert "an optimizer" in Restore(target, saved.tree, {}, {}).mismatch.wrong[0]

    def test_an_optimizer_that_overrides_loading_is_left_its_will(self) -> None:
        class Halving(torch.optim.SGD):
            def load_state_dict(self, state: Any) -> None:
                super().load_state_dict(state)
                for entry in self.state.values():
                    entry["momentum_buffer"] = entry["momentum_buffer"].double()

        model = nn.Linear(2, 2)
        source, target = (
            torch.optim.SGD(model.parameters(), momentum=0.9),
            Halving(model.parameters(), momentum=0.9),
        )
        train_once(model, source)
        restore({"m": model, "o": target}, save({"m": model, "o": source}))
        assert target.state[model.weight]["momentum_buffer"].dtype == torch.float64

    def test_state_that_belongs_to_no_parameter_comes_back(self) -> None:
        source, target = new("momentum", 1), new("momentum")
        source["optimizer"].state["global"] = {"norm": torch.tensor(3.0), "n": 4}
        restore(target, save(source))
        assert target["optimizer"].state["global"]["n"] == 4
        assert everything(target) == everything(source)


def train_once(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, next(model.parameters()).shape[1])).pow(2).sum().backward()
    optimizer.step()


SCHEDULERS = {
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str) -> None:
    def made() -> dict[str, Any]:
        state = new("momentum")
        return {**state, "scheduler": SCHEDULERS[kind](state["optimizer"])}

    def run(state: dict[str, Any], steps: int) -> None:
        train(state["model"], state["optimizer"], steps, state["scheduler"])

    straight, resumed = made(), made()
    run(straight, 3)
    restore(resumed, save(straight))
    run(straight, 3)
    run(resumed, 3)
    assert resumed["scheduler"].get_last_lr() == straight["scheduler"].get_last_lr()
    assert everything(resumed) == everything(straight)


def test_plateau_scheduler_and_scaler_keep_their_values() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    assert plateau.best == float("inf")
    state = {"p": plateau, "s": torch.amp.GradScaler("cpu")}
    back = round_trip(state)
    assert back["p"] == plateau.state_dict()
    assert back["s"] == state["s"].state_dict()


def test_everything_at_once_restores_into_a_nested_target() -> None:
    def made(seed: int, steps: int) -> dict[str, Any]:
        state = new("adam", steps, seed)
        return {
            "train": [state["model"], (state["optimizer"], {"epoch": steps})],
            "rng": torch.get_rng_state(),
            "numpy": np.random.default_rng(seed).random(3),
            "step": steps,
        }

    source, target = made(1, 3), made(2, 0)
    model, optimizer = target["train"][0], target["train"][1][0]
    restored = restore(target, save(source))
    assert everything(restored) == everything(source)
    assert restored["train"][0] is model
    assert restored["train"][1][0] is optimizer
