"""What `convert --to dcp` writes: plain torch loads it into models and optimizers, under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import everystep
from everystep import universal
from everystep.errors import UnsupportedState
from everystep.integrations.dcp import Writer
from everystep.universal.dcp import target
from support.foreign.dcp_directories import load_all

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (seed + 1))
    for _ in range(seed + 1):
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "step": 0}


def assert_loads(path: Path, truth: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    """torch's own calls restore another model and optimizer."""
    model, optimizer = make(3)
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["step"] == 12
    for mine, other in zip(model.parameters(), truth[0].parameters(), strict=True):
        assert torch.equal(mine, other)
        for key, value in truth[1].state[other].items():
            assert torch.equal(optimizer.state[mine][key], value)
    for group, other_group in zip(optimizer.param_groups, truth[1].param_groups, strict=True):
        assert (group["lr"], group["weight_decay"]) == (other_group["lr"], other_group["weight_decay"])


def test_a_training_of_everystep_loads_with_get_state_dict(tmp_path: Path) -> None:
    model, optimizer = make(0)
    everystep.save(tmp_path / "run", {"model": model, "optimizer": optimizer, "step": 12}, step=12)
    universal.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", verify=True)
    assert_loads(tmp_path / "dcp", (model, optimizer))


@pytest.mark.parametrize("flat", [False, True])
def test_dcp_to_everystep_and_back(tmp_path: Path, flat: bool) -> None:
    model, optimizer = make(0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    extra = {"note": "hi", "rows": [{"a": 1}, {"a": (2, None)}]}
    state = {"model": weights, "optimizer": states, "step": 12, "extra": extra}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    universal.convert(tmp_path / "theirs", tmp_path / "ours", verify=True, as_training=True)
    with everystep.open(tmp_path / "ours") as checkpoint:
        assert checkpoint.step == 12
    loaded = everystep.load(tmp_path / "ours")
    assert loaded["extra"] == extra
    groups = loaded["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    mine = make(2)
    into = {"model": mine[0], "optimizer": mine[1], "step": 0, "extra": {"note": "", "rows": []}}
    everystep.load(tmp_path / "theirs", into=into)
    assert (into["step"], into["extra"]) == (12, extra)
    assert mine[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    universal.convert(tmp_path / "ours", tmp_path / "again", to="dcp", verify=True)
    assert_loads(tmp_path / "again", (model, optimizer))


def test_large_leaves_are_cut_tied_ones_stored_once_and_files_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "_PIECE_NBYTES", 4000)
    weight = torch.randn(50, 3, 17)
    state = {"a": weight, "b": weight, "c": torch.randn(1, 5000).bfloat16(), "d": torch.zeros(0, 3)}
    everystep.save(tmp_path / "run", {**state, "e": torch.tensor(3.5)})
    universal.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", verify=True, max_shard_nbytes=10_000)
    found = load_all(tmp_path / "dcp")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert found["e"] == 3.5
    files = sorted((tmp_path / "dcp").glob("__0_*.distcp"))
    assert len(files) > 2
    assert all(file.stat().st_size < 12_000 for file in files)
    assert sum(file.stat().st_size for file in files) < 1.9 * weight.nbytes + 30_000
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    assert all(chunk.sizes.numel() * 4 <= 4000 for chunk in metadata.state_dict_metadata["a"].chunks)
    with everystep.open(tmp_path / "dcp") as checkpoint:
        assert checkpoint.leaves["b"].alias_of == "a"
    # A reader takes the items whole that it wants parts of: a part needs few of them.
    assert len(metadata.state_dict_metadata["a"].chunks) == 3


class Odd:
    """An object that only pickle can store."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_objects_that_dcp_pickled_are_carried_along_untouched(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "odd": Odd(5), "n": {"x": 1}}
    dcp.save(state, storage_writer=Writer(tmp_path / "run"), no_dist=True)
    universal.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", verify=True)
    found = load_all(tmp_path / "dcp")
    assert found["odd"].number == 5
    assert found["n"] == {"x": 1}
    universal.convert(tmp_path / "run", tmp_path / "part", to="dcp", select="w", verify=True)
    assert set(load_all(tmp_path / "part")) == {"w"}


@pytest.mark.parametrize("state", [{"a": [{}, 1]}, {"a": [1, {}]}, {"a": ({"b": {}},)}, [1], 5], ids=str)
def test_what_dcp_could_not_give_back_is_refused(tmp_path: Path, state: object) -> None:
    everystep.save(tmp_path / "a", state)
    with pytest.raises(UnsupportedState, match="DCP saves"):
        universal.convert(tmp_path / "a", tmp_path / "b", to="dcp", verify=False)
    assert not (tmp_path / "b").exists()


def test_empty_dicts_that_dcp_leaves_out_are_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "a": {"b": {}, "c": 1}, "d": {"e": {}}, "f": [[], ()]}
    everystep.save(tmp_path / "a", state)
    done = universal.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert done.notes == ("DCP saves nothing of empty dicts: a.b, d",)
    found = everystep.load(tmp_path / "b")
    assert found.pop("w").equal(state["w"])
    assert found == {"a": {"c": 1}, "f": [[], ()]}
