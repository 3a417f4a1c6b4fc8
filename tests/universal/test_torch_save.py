"""Training states in files of torch.save: who is who, and what belongs to which parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from holdfast.universal.sources import torch_save
from support.source_leaves import assert_same, by_name


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
    source = torch_save.describe(tmp_path / "m.pt")
    assert_model(by_name(source), model)
    assert (source.kind, source.step, dict(source.values)) == ("torch", 0, {})


@pytest.mark.parametrize("groups", ["one", "decay", "named"])
@pytest.mark.parametrize(
    ("model_key", "optimizer_key"), [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")]
)
def test_optimizer_state_gets_the_names_of_parameters(
    tmp_path: Path, groups: str, model_key: str, optimizer_key: str
) -> None:
    model, optimizer, scheduler = trained(groups)
    state = {
        model_key: model.state_dict(),
        optimizer_key: optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 17,
        "args": {"lr": 0.5, "layers": [1, 2]},
    }
    torch.save(state, tmp_path / "s.pt")
    source = torch_save.describe(tmp_path / "s.pt")
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


def test_without_the_models_names_the_numbers_stay(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    found = by_name(torch_save.describe(tmp_path / "o.pt"))
    assert_same(found["optimizer.0.exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    # Shapes that do not fit the order of the model: nothing is guessed.
    other = {f"x{i}": torch.zeros(7) for i in range(6)}
    torch.save({"model": other, "optimizer": optimizer.state_dict()}, tmp_path / "b.pt")
    assert "optimizer.0.exp_avg" in by_name(torch_save.describe(tmp_path / "b.pt"))


def test_tied_weights_are_aliases(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"a": weight, "b": weight, "c": weight[:2], "d": weight.clone()}, tmp_path / "t.pt")
    source = torch_save.describe(tmp_path / "t.pt")
    assert source.aliases == {"model.b": "model.a"}
    assert_same(by_name(source)["model.c"], weight[:2])


def test_lightning(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
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
    model, optimizer, scheduler = trained("decay")
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
    else:  # safetensors sorts the names, so the order of the parameters is lost
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


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    torch.save({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "x": 1, "y": 2, "z": 3}, tmp_path / "d.pt")
    with pytest.raises(UnsupportedSource, match=r"both named 'a\.b'"):
        torch_save.describe(tmp_path / "d.pt")


def test_other_things_are_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    assert torch_save.looks_like(tmp_path / "x") is None
    assert torch_save.looks_like(tmp_path) is None
    assert torch_save.looks_like(tmp_path / "none") is None
