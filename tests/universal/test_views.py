"""A foreign file gives what its own library loads; arranged, what a training has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep import inspect, universal
from everystep.errors import StateMismatch, UnsupportedSource
from support.foreign.source_leaves import assert_same
from support.processes.command import command

DEEPSPEED = Path(__file__).parent / "fixtures/deepspeed/z1_fp32_2"


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([*model[1].parameters(), *model[0].parameters()])
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_states(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        for key, tensor in entries.items():
            assert_same(found["state"][number][key], tensor, f"{number}.{key}")


@pytest.mark.parametrize("arrange", [None, True, False])
@pytest.mark.parametrize("keys", [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")])
def test_a_target_gets_the_file_in_the_form_that_fits(
    tmp_path: Path, keys: tuple[str, str], arrange: bool | None
) -> None:
    model, optimizer = trained()
    torch.save({keys[0]: model.state_dict(), keys[1]: optimizer.state_dict(), "epoch": 3}, tmp_path / "f.pt")
    other, its = trained(1)
    into = {"model": other, "optimizer": its, "epoch": 0}
    if arrange is False and keys[0] != "model":
        with pytest.raises(StateMismatch, match="model_state_dict"):
            everystep.load(tmp_path / "f.pt", into=into, as_training=False)
        return
    restored = everystep.load(tmp_path / "f.pt", into=into, as_training=arrange)
    assert restored["epoch"] == 3
    for name, tensor in model.state_dict().items():
        assert_same(other.state_dict()[name], tensor, name)
    assert_states(its.state_dict(), optimizer.state_dict())


def test_a_bare_state_dict_fits_a_module_and_a_training(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "f.pt")
    for into in (lambda other: other, lambda other: {"model": other}):
        other, _ = trained(1)
        everystep.load(tmp_path / "f.pt", into=into(other))
        assert_same(other[1].weight.detach(), model[1].weight)
    arrays = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    everystep.load(tmp_path / "f.pt", into=arrays)
    assert_same(arrays["1.weight"], model[1].weight)


def test_several_optimizers_stay_several(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = {"gen": optimizer.state_dict(), "disc": optimizer.state_dict()}
    content = {"model": model.state_dict(), "optimizer": states}
    torch.save(content, tmp_path / "f.pt")
    for arrange in (False, True):
        found = everystep.load(tmp_path / "f.pt", as_training=arrange)["optimizer"]
        assert list(found) == ["gen", "disc"]
        for name in found:
            assert_states(found[name], states[name])
    torch.save({**content, "optimizer": list(states.values())}, tmp_path / "l.pt")
    found = everystep.load(tmp_path / "l.pt", as_training=True)["optimizer"]
    assert type(found) is list
    assert_states(found[1], states["disc"])


def test_lightning_keeps_its_entries_where_a_torch_file_is_made_of_its_file(tmp_path: Path) -> None:
    model, optimizer = trained()
    content = {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": torch.tensor(0.5)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"lr": 0.1, "sizes": (1, 2)},
    }
    torch.save(content, tmp_path / "l.ckpt")
    assert list(everystep.load(tmp_path / "l.ckpt"))[3] == "model"
    universal.convert(tmp_path / "l.ckpt", tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert list(again) == list(content)
    assert_states(again["optimizer_states"][0], optimizer.state_dict())
    assert again["loops"] == content["loops"]
    assert again["hyper_parameters"] == content["hyper_parameters"]
    universal.convert(tmp_path / "l.ckpt", tmp_path / "arranged.pt", as_training=True)
    assert {"model", "optimizer"} <= set(torch.load(tmp_path / "arranged.pt", weights_only=True))
    universal.convert(tmp_path / "l.ckpt", tmp_path / "own")
    for name, how in (("own", {}), ("l.ckpt", {"as_training": True}), ("l.ckpt", {"dtype": "bf16"})):
        with pytest.raises(UnsupportedSource, match="Lightning loads no"):
            universal.convert(tmp_path / name, tmp_path / "lost.ckpt", **how)
    universal.convert(tmp_path / "l.ckpt", tmp_path / "saved", as_training=False)
    universal.convert(tmp_path / "saved", tmp_path / "back.ckpt")
    assert list(torch.load(tmp_path / "back.ckpt", weights_only=True)) == list(content)


def test_entries_below_an_optimizer_stay_there(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {**optimizer.state_dict(), "loss_scale": torch.tensor(2.0), "extra": {"state": 5}}
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "f.pt")
    arrays = {
        "model.0.weight": np.ones((2, 2)),
        "optimizer.0.weight.exp_avg": np.zeros((2, 2)),
        "optimizer.loss_scale": np.float32(3),
        "optimizer.state": np.arange(2),
        "other": np.arange(3),
    }
    np.savez(
        tmp_path / "f.npz", **{name: array for name, array in arrays.items() if name != "optimizer.state"}
    )
    for arrange in (False, True):
        found = everystep.load(tmp_path / "f.pt", as_training=arrange)["optimizer"]
        assert found["loss_scale"] == 2.0
        assert found["extra"] == {"state": 5}
    found = everystep.load(tmp_path / "f.npz", as_training=True)
    assert found["optimizer"]["loss_scale"] == 3
    assert list(found["optimizer"]["state"]) == ["0.weight"]
    assert len(everystep.load(tmp_path / "f.npz")) == len(arrays) - 1
    np.savez(tmp_path / "s.npz", **arrays)
    assert sorted(everystep.load(tmp_path / "s.npz")) == sorted(arrays)
    with pytest.raises(UnsupportedSource, match="'state' twice"):
        everystep.load(tmp_path / "s.npz", as_training=True)


def test_what_is_always_arranged_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSource, match="always arranged"):
        everystep.load(DEEPSPEED, as_training=False)
    np.savez(tmp_path / "a.npz", w=np.arange(3))
    spec = universal.Spec([universal.rule("*", universal.unique())])
    with pytest.raises(ValueError, match="as_training=False does not go with it"):
        universal.convert(tmp_path / "a.npz", tmp_path / "out", spec=spec, as_training=False)
    native = everystep.save(tmp_path / "own", {"w": np.arange(3)})
    assert list(everystep.load(native.path, as_training=True)) == ["w"]


def test_show_says_which_view_it_shows(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "f.pt")
    own = command("show", tmp_path / "f.pt").out
    assert "as its own library loads it" in own
    assert "not stated" in own
    assert "1970" not in own
    assert own.count("format") == 0
    assert "arranged as a training state" in command("show", tmp_path / "f.pt", "--as-training").out
    assert (
        command("show", tmp_path / "f.pt", "--as-training", "--json").document["leaves"][0]["name"]
        == "model.w"
    )
    assert command("show", DEEPSPEED, "--as-saved").code == 1


def test_no_step_is_made_up_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, w=np.arange(3.0))
    (report,) = inspect.verify_all(path)
    side = inspect.compare(path, path).a
    converted = universal.convert(path, tmp_path / "b.safetensors")
    exported = inspect.export(path, tmp_path / "c.safetensors")
    assert [found.step for found in (report, side, converted, exported)] == [None] * 4
    for name in ("b", "c"):
        assert inspect.describe(tmp_path / f"{name}.safetensors").step is None
    assert "step 0" not in command("export", path, tmp_path / "d.safetensors").out
    assert "no step stated" in command("diff", path, path).out


def test_a_stated_step_of_zero_stays(tmp_path: Path) -> None:
    everystep.save(tmp_path / "a", {"w": np.arange(3.0)}, step=0)
    inspect.export(tmp_path / "a", tmp_path / "a.safetensors")
    assert inspect.describe(tmp_path / "a.safetensors").step == 0
