"""Hugging Face and Lightning for real: what they wrote is read, and `from_pretrained` opens what we write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep import universal
from everystep.universal.hf.names import family_of
from support.foreign.source_leaves import assert_same, by_name
from support.processes import peers

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("transformers_models.py")
MODELS = ["gpt2", "gpt2-untied", "llama", "llama-tied"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    peers.run("transformers", SCRIPT, "write", folder, timeout=900)
    return folder


def load(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


def everystep_run(place: Path, path: Path) -> Path:
    """A training of the model, saved by Everystep; tied parameters are tied in the state, too."""
    state = torch.load(place / "state.pt", weights_only=True)
    everystep.save(path, {"model": state, "optimizer": {"lr": 0.1}, "step": 3}, step=3)
    return path


def test_from_pretrained_opens_what_came_from_anywhere(written: Path, tmp_path: Path) -> None:
    checks: list[dict[str, str]] = []

    def convert(source: Path, truth: Path, **how: Any) -> universal.Converted:
        target = tmp_path / str(len(checks))
        done = universal.convert(source, target, to="hf", verify=True, **how)
        checks.append({"path": str(target), "truth": str(truth)})
        if "dtype" in how:
            checks[-1]["dtype"] = how["dtype"]
        return done

    for name in MODELS:
        place = written / name
        truth, config = place / "truth.pt", place / "hf"
        for source in ("hf", "sharded", "variant", "bin"):
            done = convert(place / source, truth)
            assert done.kind == "hf"
            assert not done.notes
        assert len(convert(place / "hf", truth, max_shard_nbytes=10_000).files) > 3
        convert(place / "hf", truth, dtype="bfloat16", max_shard_nbytes=10_000)
        convert(place / "state.pt", truth, carry=config)
        done = convert(place / "wrapped.pt", truth, carry=config / "config.json")
        assert done.notes == ("names lost module., _orig_mod.",)
        convert(everystep_run(place, tmp_path / f"run-{name}"), truth, carry=config)
        (trainer,) = (place / "trainer").glob("checkpoint-*")
        convert(trainer, place / "trainer-truth.pt")
        done = convert(place / "lightning.ckpt", place / "lightning-truth.pt", carry=config)
        assert done.notes == ("names lost model.",)
        assert done.tied == (name in ("gpt2", "llama-tied"))
    listed = tmp_path / "checks.json"
    listed.write_text(json.dumps(checks))
    output = peers.run("transformers", SCRIPT, "check", listed, timeout=900)
    assert output.count("opened ") == len(checks) == 11 * len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_trainers_checkpoint_has_its_optimizer_as_torch_loads_it(written: Path, name: str) -> None:
    place = written / name
    (path,) = (place / "trainer").glob("checkpoint-*")
    source = universal.describe(path)
    found = by_name(source)
    assert source.step == 2
    truth = load(path / "optimizer.pt")
    groups: Any = source.values["optimizer.param_groups"]
    assert groups == truth["param_groups"]
    for number, entries in truth["state"].items():
        for key, tensor in entries.items():
            assert_same(found[f"optimizer.{number}.{key}"], tensor, f"{number}.{key}")
    assert any(key.startswith("lr_scheduler.") for key in source.values)
    state = everystep.load(path)["rng_state"]
    theirs = torch.load(path / "rng_state.pth", weights_only=False)
    assert state["python"] == theirs["python"]
    assert torch.equal(state["cpu"], theirs["cpu"])
    assert [type(one) for one in state["numpy"]] == [type(one) for one in theirs["numpy"]]
    assert np.array_equal(state["numpy"][1], theirs["numpy"][1])


@pytest.mark.parametrize("name", MODELS)
def test_a_lightning_checkpoint_has_its_optimizer_as_torch_loads_it(written: Path, name: str) -> None:
    place = written / name
    source = universal.describe(place / "lightning.ckpt")
    found = by_name(source)
    assert source.step == 2
    for key, tensor in load(place / "lightning-truth.pt").items():
        if f"model.model.{key}" not in source.aliases:
            assert_same(found[f"model.model.{key}"], tensor, key)
    (truth,) = torch.load(place / "lightning.ckpt", weights_only=False)["optimizer_states"]
    for number, entries in truth["state"].items():
        for key, tensor in entries.items():
            assert_same(found[f"optimizer.{number}.{key}"], tensor, f"{number}.{key}")
    assert any(key.startswith("loops.") for key in source.values)
    schedulers: Any = source.values["lr_schedulers"]
    assert schedulers[0]["last_epoch"] == 1


def test_lightning_goes_on_from_a_converted_file_as_from_its_own(written: Path, tmp_path: Path) -> None:
    own = written / "gpt2" / "lightning.ckpt"
    universal.convert(own, tmp_path / "again.ckpt")
    output = peers.run(
        "transformers", SCRIPT, "resume", "gpt2", tmp_path, own, tmp_path / "again.ckpt", timeout=900
    )
    assert "resumed 2" in output


def test_a_wrong_prefix_is_an_error_and_not_random_weights(written: Path, tmp_path: Path) -> None:
    place = written / "gpt2"
    state = load(place / "state.pt")
    torch.save(
        {f"decoder.{key.replace('wte', 'words')}": value for key, value in state.items()}, tmp_path / "x.pt"
    )
    with pytest.raises(everystep.StateMismatch, match=r"no name is like 'transformer\.wte'"):
        universal.convert(tmp_path / "x.pt", tmp_path / "out", to="hf", carry=place / "hf")
    assert not (tmp_path / "out").exists()
    shutil.copytree(place / "hf", tmp_path / "hf")
    done = universal.convert(place / "state.pt", tmp_path / "none", to="hf")
    assert "config.json" in done.notes[0]


def test_the_table_of_families_agrees_with_transformers() -> None:
    found = json.loads(peers.run("transformers", SCRIPT, "families").splitlines()[-1])
    assert len(found) > 15
    for kind, model in found.items():
        family = family_of(kind)
        assert family is not None
        assert family.base == model["base"], kind
