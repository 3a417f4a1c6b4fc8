"""Conversions: other libraries open what is written, it equals the source, and it is all or nothing."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import everystep
from everystep import universal
from everystep.engine import faults
from everystep.errors import CheckpointExists, CorruptCheckpoint, SaveFailed, StateMismatch, UnsupportedState
from everystep.format.geometry import whole
from everystep.store.stream.element_casts import cast
from everystep.universal import conversion
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.source import SourceFragment, SourceLeaf
from everystep.universal.writers import WRITERS
from support.foreign.dcp_directories import load_all
from support.foreign.foreign_checkpoints import make_model, same_weights, write_hf
from support.foreign.killed_conversions import assert_survives_kills
from support.foreign.source_leaves import source_of_leaves
from support.processes.command import command

KINDS = [writer.kind for writer in WRITERS if not writer.cuts_parameters]


def weights_in(path: Path, to: str) -> dict[str, torch.Tensor]:
    """By the library that the target is for."""
    if to == "everystep":
        found = everystep.load(path)
        return found.get("model", found)
    if to == "safetensors":
        return load_file(path)
    if to == "torch":
        return torch.load(path, weights_only=True)
    if to == "dcp":
        found = load_all(path)
        return found.get("model", found)
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return load_file(path / "model.safetensors")
    placed = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(path / file) for file in set(placed.values())}
    return {name: files[file][name] for name, file in placed.items()}


@pytest.mark.parametrize("to", KINDS)
def test_the_weights_of_a_model_go_to_every_target_under_their_names(tmp_path: Path, to: str) -> None:
    model = make_model()
    path = write_hf(tmp_path / "hf", model, shards=2)
    done = universal.convert(path, tmp_path / "out", to=to, verify=True, max_shard_nbytes=5000)
    assert (done.kind, done.to, done.leaves, done.left_out, done.verified) == ("hf", to, 4, 0, True)
    other = make_model(1)
    other.load_state_dict(weights_in(tmp_path / "out", to))
    assert same_weights(model, other)
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    if to == "hf":
        assert len([name for name in os.listdir(tmp_path / "out") if name.startswith("model-")]) > 1
        assert (tmp_path / "out" / "config.json").read_text() == (path / "config.json").read_text()
        assert (tmp_path / "out" / "tokenizer.json").exists()
        assert not (tmp_path / "out" / "code.py").exists()


def training(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 48)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "tied": model[0].weight,
        "optimizer": optimizer,
        "epoch": 3,
        "big": b"x" * 100_000,
        "mine": everystep.per_rank(np.arange(4)),
    }
    everystep.save(tmp_path / "run", state, step=7)
    return tmp_path / "run", model


def test_a_training_goes_to_a_torch_file_and_back_with_everything(tmp_path: Path) -> None:
    path, model = training(tmp_path)
    universal.convert(path, tmp_path / "all.pt", verify=True)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(found) == {"model", "tied", "optimizer", "epoch", "big", "mine"}
    assert found["epoch"] == 3
    assert found["big"] == b"x" * 100_000
    assert torch.equal(found["tied"], model[0].weight)
    assert (
        found["tied"].untyped_storage().data_ptr() == found["model"]["0.weight"].untyped_storage().data_ptr()
    )
    assert found["optimizer"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    mapped = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    assert mapped["model"]["0.weight"].data_ptr() % 64 == 0


def test_everystep_to_everystep_is_equal_and_so_is_what_passed_through_safetensors(tmp_path: Path) -> None:
    path, model = training(tmp_path)
    universal.convert(path, tmp_path / "again")
    assert everystep.inspect.compare(path, tmp_path / "again").equal
    with everystep.open(tmp_path / "again") as checkpoint:
        assert checkpoint.step == 7
    done = universal.convert(path, tmp_path / "weights.safetensors")
    assert done.left_out > 0
    universal.convert(tmp_path / "weights.safetensors", tmp_path / "back")
    other = make_model(1)
    everystep.load(tmp_path / "back", into={"model": other})
    assert same_weights(model, other)


def test_export_strips_a_prefix_and_the_reader_puts_it_back(tmp_path: Path) -> None:
    path, model = training(tmp_path)
    output = tmp_path / "out.safetensors"
    assert command("export", path, output, "--select", "model.*", "--strip", "model.").code == 0
    assert set(load_file(output)) == set(model.state_dict())
    with everystep.open(output) as checkpoint:
        assert set(checkpoint) == {f"model.{name}" for name in model.state_dict()}
    with pytest.raises(StateMismatch, match="stripped"):
        everystep.inspect.export(path, tmp_path / "no.safetensors", strip="model.")


@pytest.mark.parametrize("to", KINDS)
def test_dtype_casts_as_torch_does_and_leaves_the_optimizer_alone(tmp_path: Path, to: str) -> None:
    path, model = training(tmp_path)
    done = universal.convert(path, tmp_path / "out", to=to, select=["model.*"], dtype="bf16", verify=True)
    assert done.casts == 4
    found = weights_in(tmp_path / "out", to)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16())
    universal.convert(path, tmp_path / "all", dtype="bfloat16")
    with everystep.open(tmp_path / "all") as checkpoint:
        types = {name: info.dtype for name, info in checkpoint.leaves.items()}
    assert types["optimizer.0.weight.exp_avg"] == "F32"
    assert types["model.0.weight"] == "BF16"
    with pytest.raises(ValueError, match="dtype must be"):
        universal.convert(path, tmp_path / "no", dtype="int4")


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@given(
    st.lists(st.floats(width=64), min_size=1, max_size=30),
    st.sampled_from(sorted(_FLOATS)),
    st.sampled_from(sorted(_FLOATS)),
)
def test_casts_round_to_the_nearest_value_once(numbers: list[float], dtype: str, to: str) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(_FLOATS[dtype])
    got = torch.from_numpy(cast(tensor.view(torch.uint8).numpy().copy(), dtype, to).copy()).view(_FLOATS[to])
    wide, exact = got.double(), tensor.double()
    assert torch.equal(wide.isnan(), exact.isnan())
    # No value of the type is nearer than the one that was chosen.
    infinity = torch.tensor(float("inf"), dtype=_FLOATS[to])
    finite = wide.isfinite() & exact.isfinite()
    for other in (torch.nextafter(got, infinity), torch.nextafter(got, -infinity)):
        nearer = (other.double() - exact).abs() < (wide - exact).abs()
        assert not bool((nearer & finite & other.double().isfinite()).any())
    assert torch.equal(wide.isinf() & exact.isinf(), exact.isinf())


def test_a_leaf_of_many_windows_streams_through_every_target(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {
        "big": torch.randn(5_000_001, generator=generator),
        "small": torch.arange(5),
        "none": torch.zeros(0, 4),
    }
    weights |= {f"n{index}": torch.randn(index + 1, generator=generator) for index in range(50)}
    save_file(weights, tmp_path / "a.safetensors")
    for to in KINDS:
        universal.convert(tmp_path / "a.safetensors", tmp_path / to, to=to, verify=True)
        found = weights_in(tmp_path / to, to)
        assert set(found) == set(weights)
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("to", KINDS)
def test_a_target_of_whole_parameters_refuses_parallel_degrees(tmp_path: Path, to: str) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    for degrees in ({"tp": 2}, {"pp": 2}):
        with pytest.raises(ValueError, match=f"{to} holds whole parameters"):
            universal.convert(path, tmp_path / "out", to=to, **degrees)
    with pytest.raises(ValueError, match="tp must be at least 1"):
        universal.convert(path, tmp_path / "out", to=to, tp=0)
    with pytest.raises(ValueError, match="zero_stage is for targets that DeepSpeed loads"):
        universal.convert(path, tmp_path / "out", to=to, zero_stage=3)
    done = command("convert", path, tmp_path / "out", "--to", to, "--tp", "2")
    assert done.code == 2
    assert os.listdir(tmp_path) == ["hf"]


def test_dry_run_tells_the_files_and_writes_nothing(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    for to in KINDS:
        plan = universal.convert(path, tmp_path / "out", to=to, dry_run=True, max_shard_nbytes=5000)
        assert plan.dry_run
        assert sum(file.nbytes for file in plan.files) >= plan.nbytes > 0
        assert os.listdir(tmp_path) == ["hf"]
    planned = {
        file.name: file.nbytes
        for file in universal.convert(path, tmp_path / "x", to="hf", dry_run=True).files
    }
    universal.convert(path, tmp_path / "x", to="hf")
    assert planned == {entry.name: entry.stat().st_size for entry in (tmp_path / "x").iterdir()}


@pytest.mark.parametrize("to", KINDS)
def test_what_exists_is_not_replaced_unless_asked_and_directories_never(tmp_path: Path, to: str) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    universal.convert(path, tmp_path / "out", to=to)
    with pytest.raises(CheckpointExists):
        universal.convert(path, tmp_path / "out", to=to)
    if to in ("hf", "dcp"):
        with pytest.raises(CheckpointExists):
            universal.convert(path, tmp_path / "out", to=to, overwrite=True)
    else:
        universal.convert(path, tmp_path / "out", to=to, overwrite=True, verify=True)
    for inside in (path, path / "out", tmp_path):
        with pytest.raises(CheckpointExists):
            universal.convert(path, inside, to=to, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]


def test_replicas_that_differ_are_an_error_and_the_target_is_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(np.arange(6, dtype=np.float32).tobytes() * 2)
    copy = (SourceFragment(str(file), 24, whole((6,))),)
    leaf = SourceLeaf("model.w", "F32", (6,), (SourceFragment(str(file), 0, whole((6,))),), copies=(copy,))
    source = source_of_leaves(str(file), [leaf])
    monkeypatch.setattr(conversion, "open_newest", lambda *_: ForeignCheckpoint(source))
    universal.convert(file, tmp_path / "equal")
    with file.open("r+b") as opened:
        opened.seek(30)
        opened.write(b"\xff")
    with pytest.raises(CorruptCheckpoint, match=r"model\.w.*replicas of it differ"):
        universal.convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", KINDS)
def test_verify_notices_a_changed_byte_and_the_target_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    path = write_hf(tmp_path / "source", make_model())
    module = sys.modules[conversion._writer(to, "").write.__module__]
    check = module.check

    def change_and_check(job: object, written: str) -> None:
        assert not (tmp_path / "out").exists()
        place = Path(written)
        pattern = "*.distcp" if to == "dcp" else "*.safetensors"
        file = next(place.glob(pattern)) if place.is_dir() else place
        data = bytearray(file.read_bytes())
        found = data.find(make_model()[0].weight.detach().numpy().tobytes())
        assert found > 0
        data[found + 5] ^= 1
        file.write_bytes(data)
        check(job, written)

    monkeypatch.setattr(module, "check", change_and_check)
    with pytest.raises(CorruptCheckpoint):
        universal.convert(path, tmp_path / "out", to=to, verify=True)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", KINDS)
def test_killed_at_any_call_leaves_nothing_that_looks_complete_and_runs_again(
    tmp_path: Path, to: str
) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    truth = make_model().state_dict()

    def convert(out: Path) -> None:
        universal.convert(path, out, to=to, max_shard_nbytes=5000)

    def assert_whole(out: Path) -> None:
        found = weights_in(out, to)
        assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())

    assert assert_survives_kills(tmp_path / "place", convert, assert_whole) > 4


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
@pytest.mark.parametrize("to", KINDS)
def test_a_call_that_fails_is_an_error_and_no_target_appears(tmp_path: Path, to: str, call: str) -> None:
    model = make_model()
    source = write_hf(tmp_path / "hf", model, shards=1)
    before = set(os.listdir(tmp_path))

    def converts(fault: str) -> bool:
        with faults.injected(fault):
            try:
                universal.convert(source, tmp_path / "out", to=to)
            except SaveFailed:
                return False
        return True

    failed = 0
    while not converts(f"{call}:{failed + 1}:EIO"):
        failed += 1
        assert set(os.listdir(tmp_path)) == before
    assert failed
    found = weights_in(tmp_path / "out", to)
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())


def test_the_command_converts_and_tells(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    done = command("convert", path, tmp_path / "out", "--verify")
    assert done.code == 0
    assert "4 leaves" in done.out
    assert "from hf" in done.out
    assert "verified" in done.out
    document = command("convert", tmp_path / "out", tmp_path / "x.pt", "--dtype", "bf16", "--json").document
    assert (document["to"], document["casts"]) == ("torch", 4)
    plan = command("convert", path, tmp_path / "y", "--to", "hf", "--dry-run", "--max-shard-size", "5KB")
    assert "model.safetensors.index.json" in plan.out
    assert not (tmp_path / "y").exists()
    assert command("convert", path, tmp_path / "z", "--to", "word").code == 2
    assert command("convert", path, tmp_path / "z", "--max-shard-size", "many").code == 2
    assert command("convert", tmp_path / "nothing", tmp_path / "z").code == 1
    assert command("convert", path, tmp_path / "z", "--kind", "npz").code == 1
    own = command("convert", path, tmp_path / "z", "--kind", "everystep")
    assert own.code == 1
    assert "of kind 'hf', not of Everystep" in own.err
    assert not (tmp_path / "z").exists()
    assert len(command("convert", path, tmp_path / "z", "--dry-run").lines) == 1


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"", "empty bytes"),
        ({b"": 1}, "empty bytes"),
        (2**2039, "an integer"),
        ([-(2**5000)], "an integer"),
        (frozenset({1}), "frozenset"),
    ],
)
def test_what_torch_would_not_read_is_refused_before_it_is_written(
    tmp_path: Path, value: object, what: str, verify: bool
) -> None:
    everystep.save(tmp_path / "a", {"w": torch.ones(2), "x": value})
    with pytest.raises(UnsupportedState, match=rf"x.*weights_only=True\) refuses {what}"):
        universal.convert(tmp_path / "a", tmp_path / "a.pt", verify=verify)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_largest_integers_that_torch_reads_are_written(tmp_path: Path) -> None:
    values = [2**2039 - 1, -(2**2039)]
    everystep.save(tmp_path / "a", {"w": torch.ones(2), "x": values})
    universal.convert(tmp_path / "a", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["x"] == values


def test_a_file_that_torch_cannot_read_back_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everystep.save(tmp_path / "a", {"w": torch.ones(2)})

    def refuse(*_: object, **__: object) -> None:
        raise pickle.UnpicklingError("no")

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(SaveFailed, match="torch cannot read what was written"):
        universal.convert(tmp_path / "a", tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()
