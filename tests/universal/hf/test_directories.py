"""Hugging Face directories: files of torch.save, variants, and names that `from_pretrained` looks for.

The real transformers opens what is written in `tests/peers/test_transformers.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import everystep
from everystep import CorruptCheckpoint, StateMismatch, universal
from everystep.errors import IncompleteCheckpoint, UnsupportedSource
from everystep.universal.hf.names import published
from support.foreign.foreign_checkpoints import make_model
from support.foreign.source_leaves import assert_same, by_name
from support.processes.command import command


def gpt2_weights() -> dict[str, torch.Tensor]:
    """As GPT-2's state dict has them, in the model's order; the output layer is tied."""
    made = torch.Generator().manual_seed(5)
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    for layer in range(11):
        names += [f"transformer.h.{layer}.{part}" for part in ("ln_1.weight", "ln_1.bias", "mlp.c_fc.weight")]
    names += ["transformer.ln_f.weight"]
    shapes: dict[str, tuple[int, ...]] = {"wte": (7, 4), "wpe": (5, 4), "ln": (4,), "c_fc": (4, 4)}
    found = {
        name: torch.randn(next(shape for part, shape in shapes.items() if part in name), generator=made)
        for name in names
    }
    return {**found, "lm_head.weight": found["transformer.wte.weight"]}


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "dtype": "float32", **config}))
    return folder


def write_bin(folder: Path, weights: dict[str, torch.Tensor], shards: int, variant: str = "") -> Path:
    dot = f".{variant}" if variant else ""
    write_config(folder)
    if shards == 1:
        torch.save(weights, folder / f"pytorch_model{dot}.bin")
        return folder
    placed = {}
    names = list(weights)
    each = -(-len(names) // shards)
    for number in range(shards):
        file = f"pytorch_model{dot}-{number + 1:05d}-of-{shards:05d}.bin"
        mine = names[number * each : (number + 1) * each]
        torch.save({name: weights[name] for name in mine}, folder / file)
        placed.update(dict.fromkeys(mine, file))
    index = {"metadata": {}, "weight_map": dict(sorted(placed.items()))}
    (folder / f"pytorch_model.bin.index{dot}.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("variant", ["", "fp16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_in_files_of_torch_save_are_read(tmp_path: Path, shards: int, variant: str) -> None:
    weights = gpt2_weights()
    path = write_bin(tmp_path / "hf", weights, shards, variant)
    assert universal.recognise(path) == "hf"
    source = universal.describe(path)
    found = by_name(source)
    if shards == 1:
        assert source.aliases == {"model.lm_head.weight": "model.transformer.wte.weight"}
    for name, tensor in weights.items():
        assert_same(found[source.aliases.get(f"model.{name}", f"model.{name}")], tensor, name)
    assert source.facts["model type"] == "gpt2"
    assert source.facts.get("variant", "") == variant
    with everystep.open(path) as checkpoint:
        assert torch.equal(
            checkpoint["model.transformer.wte.weight"][2:4], weights["transformer.wte.weight"][2:4]
        )


def test_a_variant_is_read_if_there_is_nothing_else(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.fp16.safetensors")
    assert universal.recognise(tmp_path) == "hf"
    assert [leaf.name for leaf in universal.describe(tmp_path).leaves] == ["model.w"]
    save_file({"v": torch.ones(2)}, tmp_path / "model.ema.safetensors")
    with pytest.raises(UnsupportedSource, match=r"several variants \(ema, fp16\)"):
        universal.describe(tmp_path)
    save_file({"u": torch.ones(2)}, tmp_path / "model.safetensors")
    assert [leaf.name for leaf in universal.describe(tmp_path).leaves] == ["model.u"]


def test_damage_of_torch_shards_names_the_file(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "hf", gpt2_weights(), 3)
    shard = path / "pytorch_model-00002-of-00003.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-40])
    with pytest.raises(CorruptCheckpoint, match="pytorch_model-00002"):
        universal.describe(path)
    shard.unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"pytorch_model-00002.*leaf"):
        universal.describe(path)
    torch.save({"other": torch.ones(1)}, shard)
    with pytest.raises(CorruptCheckpoint, match="the index says that it is in this file"):
        universal.describe(path)
    torch.save({"nested": {"w": torch.ones(1)}}, shard)
    with pytest.raises(UnsupportedSource, match="'nested' is a dict, not a tensor"):
        universal.describe(path)
    index = {"weight_map": {"w": "../pytorch_model.bin"}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match="not a file beside the index"):
        universal.describe(path)


class _Bomb:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch executed",)


def test_code_in_weights_is_named_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "hf")
    torch.save({"w": _Bomb()}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(UnsupportedSource, match="system"):
        universal.describe(tmp_path / "hf")
    assert not (tmp_path / "executed").exists()


# --- names


def test_wrappers_before_a_model_are_found_by_what_the_config_says() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
    for before in ("", "model.", "module.", "net.model.", "backbone.decoder."):
        for more in ([], ["lm_head.weight"]):
            given = [before + name for name in names + more]
            assert list(published(given, "llama").names.values()) == names + more
    compiled = ["module.model.embed_tokens.weight", "module.model.layers.0._orig_mod.mlp.up_proj.weight"]
    found = published(compiled, "llama")
    assert list(found.names.values()) == names
    assert found.stripped == ("module.", "_orig_mod.")
    bare = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight"]
    assert list(published([f"net.{name}" for name in bare], "llama").names.values()) == bare
    assert published(["shared.weight"], "t5").stripped == ()
    assert published(["model.shared.weight"], "t5").stripped == ("model.",)
    assert published(["model.shared.weight"], "bart").stripped == ()


def test_names_of_an_unknown_kind_lose_only_what_is_surely_a_wrapper() -> None:
    assert published(["module.net.a.b", "module.net.c"], None).stripped == ("module.net.",)
    assert published(["model.a.b", "model.c"], "my-own").stripped == ()
    assert published(["module.a", "b"], None).stripped == ()


def test_names_of_another_model_are_an_error() -> None:
    with pytest.raises(StateMismatch, match=r"'transformer\.wte'"):
        published(["model.embed_tokens.weight"], "gpt2")
    with pytest.raises(StateMismatch, match=r"'criterion\.weight'"):
        published(["model.transformer.wte.weight", "criterion.weight"], "gpt2")
    with pytest.raises(StateMismatch, match="one name"):
        published(["wte.weight", "_orig_mod.wte.weight"], "gpt2")


# --- the target


@pytest.mark.parametrize("tie", [True, False, None])
def test_tied_weights_are_written_once_only_if_the_config_ties_them(tmp_path: Path, tie: bool | None) -> None:
    weights = gpt2_weights()
    # A name that sorts before the embedding: it must not be the one that is kept.
    everystep.save(tmp_path / "run", {"model": dict(reversed(weights.items()))})
    config = write_config(tmp_path / "config", **({} if tie is None else {"tie_word_embeddings": tie}))
    done = universal.convert(tmp_path / "run", tmp_path / "out", to="hf", copy_from=config, verify=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(weights) - ({"lm_head.weight"} if tie else set())
    assert done.tied == (1 if tie else 0)
    assert done.left_out == 0
    for name, tensor in found.items():
        assert torch.equal(tensor, weights[name])
    with everystep.open(tmp_path / "out") as checkpoint:
        assert torch.equal(checkpoint["model.lm_head.weight"][...], weights["lm_head.weight"])


def test_the_prefix_of_a_wrapper_is_removed_and_reported(tmp_path: Path) -> None:
    weights = gpt2_weights()
    config = write_config(tmp_path / "config")
    (config / "tokenizer.json").write_text("{}")
    content = {
        "state_dict": {f"net.{name}": tensor for name, tensor in weights.items()},
        "optimizer_states": [],
        "pytorch-lightning_version": "2.6.0",
        "global_step": 4,
    }
    torch.save(content, tmp_path / "l.ckpt")
    result = command("convert", tmp_path / "l.ckpt", tmp_path / "out", "--to", "hf", "--copy-from", config)
    assert result.code == 0
    assert "names lost net." in result.out
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(weights)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    result = command("convert", tmp_path / "l.ckpt", tmp_path / "bare", "--to", "hf")
    assert "there is no config.json" in result.out
    assert (
        command("convert", tmp_path / "l.ckpt", tmp_path / "no", "--copy-from", tmp_path / "nothing").code
        == 2
    )
    torch.save(
        {f"decoder.{name}": tensor for name, tensor in make_model().state_dict().items()}, tmp_path / "x.pt"
    )
    result = command("convert", tmp_path / "x.pt", tmp_path / "wrong", "--to", "hf", "--copy-from", config)
    assert result.code == 1
    assert "random weights" in result.err
    assert not (tmp_path / "wrong").exists()


def test_a_cast_is_said_in_the_config(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "hf", gpt2_weights(), 1)
    plan = universal.convert(path, tmp_path / "out", to="hf", dtype="bf16", dry_run=True)
    universal.convert(path, tmp_path / "out", to="hf", dtype="bf16", verify=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "gpt2",
        "dtype": "bfloat16",
    }
    assert {file.name: file.nbytes for file in plan.files} == {
        entry.name: entry.stat().st_size for entry in (tmp_path / "out").iterdir()
    }


def test_a_missing_output_layer_is_reported(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config", tie_word_embeddings=False, architectures=["GPT2LMHeadModel"])
    weights = {name: tensor for name, tensor in gpt2_weights().items() if name != "lm_head.weight"}
    save_file(weights, tmp_path / "w.safetensors")
    done = universal.convert(tmp_path / "w.safetensors", tmp_path / "out", to="hf", copy_from=config)
    assert "lm_head.weight" in done.notes[0]


# --- the Trainer


@pytest.mark.parametrize("shards", [1, 3])
def test_a_trainers_optimizer_keeps_its_numbers(tmp_path: Path, shards: int) -> None:
    weights = {name: tensor for name, tensor in gpt2_weights().items() if name != "lm_head.weight"}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    path = write_bin(tmp_path / "t", weights, shards)
    for file in path.glob("pytorch_model*"):
        file.unlink()
    if shards == 1:
        save_file(weights, path / "model.safetensors")
    else:
        universal.convert(
            write_bin(tmp_path / "b", weights, 1), tmp_path / "s", to="hf", max_shard_nbytes=300
        )
        for file in (tmp_path / "s").glob("model*"):
            file.rename(path / file.name)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save({"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}, path / "rng_state_0.pth")
    torch.save(_Bomb(), path / "rng_state_1.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 1.0}))
    source = universal.describe(path)
    found = by_name(source)
    for number, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            assert_same(found[f"optimizer.{number}.{key}"], value, f"{number}.{key}")
    assert source.facts["optimizer state"].startswith("by number")
    assert source.step == 5
    assert source.values["rng_state.0.python"] == (3, (1, 2), None)
    assert "not read" in source.facts["rng_state_1.pth"]
    assert not any("trainer_state" in file for file in source.carried)
