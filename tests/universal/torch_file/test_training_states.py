"""Training states in files of torch.save: who is who, and what belongs to which parameter."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import everystep
from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.universal.optimizer_names import parameter_names
from everystep.universal.torch_file import source as torch_save
from everystep.universal.torch_file.reading import StoredTensor
from support.foreign.source_leaves import assert_same, by_name


def trained(groups: str = "one") -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    parameters: Any = model.parameters()
    if groups == "decay":
        parameters = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    elif groups == "named":
        parameters = [(name, p) for name, p in reversed(list(model.named_parameters()))]
    optimizer = torch.optim.AdamW(parameters, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def assert_model(found: dict[str, torch.Tensor], model: torch.nn.Module, place: str = "model") -> None:
    for name, tensor in model.state_dict().items():
        assert_same(found[f"{place}.{name}"], tensor, name)


def assert_optimizer(
    found: dict[str, torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert_same(found[f"optimizer.{name}.{key}"], value, name)


def test_a_bare_state_dict_is_a_model(tmp_path: Path) -> None:
    model, _, _ = trained()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert torch_save.looks_like(tmp_path / "m.pt") == "a file of torch.save"
    source = torch_save.describe(tmp_path / "m.pt", as_training=True)
    assert_model(by_name(source), model)
    assert (source.kind, source.step, dict(source.values)) == ("torch", None, {})
    own = torch_save.describe(tmp_path / "m.pt")
    assert {leaf.name for leaf in own.leaves} == set(model.state_dict())
    assert not own.arranged


@pytest.mark.parametrize(
    ("model_key", "optimizer_key"), [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")]
)
def test_optimizer_state_gets_the_names_that_the_file_has(
    tmp_path: Path, model_key: str, optimizer_key: str
) -> None:
    model, optimizer, scheduler = trained("named")
    state = {
        model_key: model.state_dict(),
        optimizer_key: optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 17,
        "args": {"lr": 0.5, "layers": [1, 2]},
    }
    torch.save(state, tmp_path / "s.pt")
    source = torch_save.describe(tmp_path / "s.pt", as_training=True)
    found = by_name(source)
    assert_model(found, model)
    assert_optimizer(found, model, optimizer)
    assert source.step == 17
    assert source.values["args.lr"] == 0.5
    assert source.values["args.layers"] == [1, 2]
    assert source.values["scheduler.last_epoch"] == 1
    grouped: Any = source.values["optimizer.param_groups"]
    assert {name for group in grouped for name in group["params"]} == {
        name for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize("groups", ["one", "decay"])
def test_an_order_that_fits_proves_no_names(tmp_path: Path, groups: str) -> None:
    model, optimizer, _ = trained(groups)  # two of its biases have one shape
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    source = torch_save.describe(tmp_path / "o.pt", as_training=True)
    found = by_name(source)
    assert_same(found["optimizer.0.exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    parameters: Any = source.values["optimizer.param_groups"]
    assert parameters[0]["params"] == optimizer.state_dict()["param_groups"][0]["params"]


def test_shapes_that_admit_one_assignment_give_names(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.randn(n)) for n, name in enumerate("abcd", 1)}
    )
    optimizer = torch.optim.AdamW([model["c"], model["a"], model["d"], model["b"]])
    sum(parameter.sum() for parameter in model.values()).backward()
    model["d"].grad = None  # what has no state is the one that is left over
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    found = by_name(torch_save.describe(tmp_path / "o.pt", as_training=True))
    for name, parameter in model.items():
        for key, value in optimizer.state[parameter].items():
            assert_same(found[f"optimizer.{name}.{key}"], value, name)
    assert "optimizer.a.exp_avg" in found


@settings(max_examples=200)
@given(st.data())
def test_names_by_shape_are_given_only_if_there_is_one_way(data: st.DataObject) -> None:
    """Against all permutations."""
    count = data.draw(st.integers(1, 5))
    sizes = st.integers(1, 4)
    shapes = {f"p{n}": (data.draw(sizes),) for n in range(count)}
    state = {
        key: {f"s{n}": _stored((size,)) for n, size in enumerate(data.draw(st.lists(sizes, max_size=2)))}
        for key in range(count)
    }
    ways = [
        way
        for way in itertools.permutations(shapes)
        if all(
            not state[key] or any(entry.shape == shapes[name] for entry in state[key].values())
            for key, name in enumerate(way)
        )
    ]
    model = {name: _stored(shape, at) for at, (name, shape) in enumerate(shapes.items())}
    names = parameter_names(state, [{"params": list(range(count))}], model)
    assert names == (dict(enumerate(ways[0])) if len(ways) == 1 else {})


def _stored(shape: tuple[int, ...], at: int = 0) -> StoredTensor:
    return StoredTensor("/f", at * 1000, "F32", shape, (1,) * len(shape), 4000)


def test_without_a_model_the_numbers_stay(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    found = by_name(torch_save.describe(tmp_path / "o.pt", as_training=True))
    assert_same(found["optimizer.0.exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_tied_weights_are_aliases(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"a": weight, "b": weight, "c": weight[:2], "d": weight.clone()}, tmp_path / "t.pt")
    source = torch_save.describe(tmp_path / "t.pt")
    assert source.aliases == {"b": "a"}
    assert_same(by_name(source)["c"], weight[:2])


def test_lightning(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained("named")
    content = {
        "epoch": 2,
        "global_step": 40,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "callbacks": {"ModelCheckpoint{'monitor': 'x'}": {"best_model_score": torch.tensor(0.5)}},
        "loops": {"a": {"b": 1}},
    }
    torch.save(content, tmp_path / "l.ckpt")
    source = torch_save.describe(tmp_path / "l.ckpt")
    found = by_name(source)
    assert_model(found, model)
    assert_optimizer(found, model, optimizer)
    assert (source.step, source.values["epoch"], source.values["loops.a.b"]) == (40, 2, 1)
    assert source.facts["lightning"] == "2.5.0"
    schedulers: Any = source.values["lr_schedulers"]
    assert schedulers[0]["last_epoch"] == 1


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_trainer_directory(tmp_path: Path, kind: str) -> None:
    model, optimizer, scheduler = trained("named" if kind == "bin" else "decay")
    if kind == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"global_step": 9, "epoch": 0.5, "log_history": [{"loss": 1.0}]})
    )
    assert "Trainer" in str(torch_save.looks_like(tmp_path))
    source = torch_save.describe(tmp_path)
    found = by_name(source)
    assert_model(found, model)
    if kind == "bin":
        assert_optimizer(found, model, optimizer)
    else:
        assert_same(found["optimizer.0.exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert (source.step, source.values["epoch"], source.values["lr_scheduler.last_epoch"]) == (9, 0.5, 1)


def test_trainer_directory_with_damage(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(IncompleteCheckpoint, match=r"model\.safetensors"):
        torch_save.describe(tmp_path)
    save_file({"w": torch.zeros(50)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in (0, 5, 20, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpoint):
            torch_save.describe(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"w": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match="not a file beside the index"):
        torch_save.describe(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match="not JSON"):
        torch_save.describe(tmp_path)


def test_dots_in_keys_are_no_places(tmp_path: Path) -> None:
    content = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "x": 1, "y.": 2, "z": {"": 3}}
    torch.save(content, tmp_path / "d.pt")
    found = everystep.load(tmp_path / "d.pt")
    assert list(found) == list(content)
    assert_same(found["a.b"], content["a.b"])
    assert_same(found["a"]["b"], content["a"]["b"])
    assert (found["x"], found["y."], found["z"]) == (1, 2, {"": 3})
