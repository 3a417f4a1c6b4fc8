"""DeepSpeed's universal layout: what ``ds_to_universal`` wrote is read, and what we write has all it loads.

The fixtures are what its converter (0.19.8) made of the ZeRO fixtures of the same names. That DeepSpeed
itself loads what we write is in tests/peers.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from everystep import universal
from everystep.errors import (
    CheckpointExists,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    SpecError,
    UnsupportedSource,
    UnsupportedState,
)
from everystep.universal import fused, pad, replicated, rule, shard
from everystep.universal.deepspeed import source as deepspeed
from everystep.universal.deepspeed import universal_source as ds_universal
from everystep.universal.deepspeed import universal_target as target
from everystep.universal.deepspeed.names import CLASSES
from everystep.universal.torch_file.reading import read_torch_file
from support.foreign.killed_conversions import assert_survives_kills
from support.foreign.source_leaves import assert_same, by_name
from support.processes.command import command

FIXTURES = Path(__file__).parents[1] / "fixtures"
ZERO = FIXTURES / "deepspeed"
NAMES = ["z2_bf16_3", "z3_fp32_3"]


def unpack(name: str, into: Path) -> Path:
    with tarfile.open(FIXTURES / "ds_universal" / f"{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def assert_equal(one: Any, other: Any, *, weights: bool = True) -> None:
    """Two descriptions of one training, leaf by leaf and value by value."""
    left, right = by_name(one), by_name(other)
    for name, tensor in left.items():
        if weights or not name.startswith("model."):
            assert_same(right[name], tensor, name)
    assert set(left) == set(right)
    assert one.step == other.step
    assert dict(one.values) == dict(other.values)


@pytest.mark.parametrize("name", NAMES)
def test_what_ds_to_universal_wrote_equals_the_zero_checkpoint(tmp_path: Path, name: str) -> None:
    path = unpack(name, tmp_path / "u")
    source, zero = ds_universal.describe(path), deepspeed.describe(ZERO / name)
    assert_equal(zero, source)
    assert dict(source.aliases) == dict(zero.aliases)
    assert universal.recognise(path) == universal.recognise(path / "global_step3_universal") == "ds-universal"
    with everystep.open(path) as checkpoint:
        assert_same(
            checkpoint["optimizer.up.weight.exp_avg"][2:5], by_name(zero)["optimizer.up.weight.exp_avg"][2:5]
        )


@pytest.mark.parametrize("stage", [None, 1, 3])
@pytest.mark.parametrize("name", [*NAMES, "z1_fp32_2"])
def test_a_zero_checkpoint_comes_back_from_the_universal_layout(
    tmp_path: Path, name: str, stage: int | None
) -> None:
    done = universal.convert(ZERO / name, tmp_path / "out", to="ds-universal", zero_stage=stage, verify=True)
    assert (done.to, done.step) == ("ds-universal", 3)
    # ZeRO-3 has no other weights than those in FP32.
    assert_equal(deepspeed.describe(ZERO / name), ds_universal.describe(tmp_path / "out"), weights=stage != 3)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", NAMES)
def test_files_have_what_deepspeed_loads_into_all_stages(tmp_path: Path, name: str) -> None:
    """The keys that its loading code asks for."""
    universal.convert(ZERO / name, tmp_path / "out", to="ds-universal")
    out, real = tmp_path / "out", unpack(name, tmp_path / "u") / "global_step3_universal"
    assert (out / "latest_universal").read_text() == "."
    for folder in (real / "zero").iterdir():
        if not (folder / "exp_avg.pt").exists():
            continue  # its converter also writes buffers and frozen parameters, which nothing loads
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            ours, its = load(out / "zero" / folder.name / f"{state}.pt"), load(folder / f"{state}.pt")
            whole = its["param"] if isinstance(its, dict) else its
            assert_same(ours["param"].reshape(whole.shape), whole)
            assert ours["cat_dim"] == 0
        assert float(load(out / "zero" / folder.name / "step.pt")) == 3
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = load(out / file)
        assert (model["global_steps"], model["skipped_steps"], model["mp_world_size"]) == (3, 0, 1)
        assert model["dp_world_size"] == 1
        assert model["lr_scheduler"] == {"last_batch_iteration": 2}
        assert model["note"] == "hello"
        assert model["param_shapes"][0]["up.weight"] == torch.Size([11, 5])


def test_the_optimizer_state_has_both_forms_and_the_loss_scaler(tmp_path: Path) -> None:
    universal.convert(ZERO / "z1_fp32_2", tmp_path / "out", to="ds-universal")
    common = read_torch_file(tmp_path / "out" / "zero" / "optimizer_state.pt", CLASSES)
    assert common["loss_scaler"].name == "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert common["loss_scaler"].attributes["cur_scale"] == 1.0
    assert common["ds_version"]
    assert common["clip_grad"] == 1.0
    assert [group["weight_decay"] for group in common["param_groups"]] == [0.1, 0.0]
    assert common["optimizer_state_dict"]["param_groups"] == common["param_groups"]
    assert "step" in common["optimizer_state_dict"]["state"][0]


def test_by_way_of_a_everystep_checkpoint_the_files_are_the_same(tmp_path: Path) -> None:
    for name in NAMES:
        universal.convert(ZERO / name, tmp_path / name / "native")
        universal.convert(tmp_path / name / "native", tmp_path / name / "two", to="ds-universal")
        universal.convert(ZERO / name, tmp_path / name / "one", to="ds-universal")
        one, two = (tmp_path / name / word for word in ("one", "two"))
        files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
        assert_equal(ds_universal.describe(one), ds_universal.describe(two))


def train(path: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3, bias=False)).to(dtype)
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(2, dtype=dtype)))
    model.register_buffer("table", torch.arange(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    for _ in range(2):
        torch.nn.Sequential(*model)(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
    everystep.save(path, {"model": model, "optimizer": optimizer, "epoch": 3}, step=2)
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_that_everystep_saved_becomes_one_of_deepspeed(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = train(tmp_path / "run", dtype)
    universal.convert(tmp_path / "run", tmp_path / "out", to="ds-universal", verify=True)
    zero = tmp_path / "out" / "zero"
    for name, parameter in model.named_parameters():
        assert_same(load(zero / name / "fp32.pt")["param"], parameter.detach().float())
        state = optimizer.state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq"):
            wanted = state.get(key, torch.zeros(parameter.shape))
            assert_same(load(zero / name / f"{key}.pt")["param"], wanted)
        assert float(load(zero / name / "step.pt")) == 2
    states = load(tmp_path / "out" / "mp_rank_00_model_states.pt")
    assert_same(states["module"]["0.weight"], model[0].weight.detach())
    assert states["buffer_names"] == ["table"]
    assert (states["epoch"], states["global_steps"]) == (3, 2)
    source = ds_universal.describe(tmp_path / "out")
    assert source.values["optimizer.param_groups"][0]["betas"] == (0.8, 0.9)
    assert source.values["optimizer.param_groups"][0]["params"] == [
        name for name, _ in model.named_parameters()
    ]


def test_weights_alone_are_written_without_moments(tmp_path: Path) -> None:
    model, _ = train(tmp_path / "run")
    universal.convert(tmp_path / "run", tmp_path / "out", to="ds-universal", select="model.*", verify=True)
    assert sorted(os.listdir(tmp_path / "out" / "zero" / "0.weight")) == ["fp32.pt"]
    assert_same(everystep.load(tmp_path / "out")["model"]["0.weight"], model[0].weight.detach())


SPEC = universal.Spec(
    [
        rule("word", shard(0), pad(0, 7)),
        rule("qkv", fused(0, [4, 2, 2])),
        rule("gate_up", fused(0, 2)),
        rule("down", shard(1)),
        rule("norm", replicated()),
    ]
)


def save_layers(path: Path) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {"word": (7, 3), "qkv": (8, 4), "gate_up": (6, 2), "down": (3, 4), "norm": (5,)}
    weights = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    everystep.save(path, {"model": weights, "table": torch.arange(3)}, step=1)
    return weights


def test_tensor_parallel_ranks_get_their_shards_and_the_reader_joins_them(tmp_path: Path) -> None:
    weights = save_layers(tmp_path / "run")
    universal.convert(
        tmp_path / "run", tmp_path / "out", to="ds-universal", tp=2, pp=2, spec=SPEC, verify=True
    )
    out = tmp_path / "out"
    assert len(list(out.glob("mp_rank_*_model_states.pt"))) == 4
    ranks = [load(out / f"mp_rank_{rank:02d}_model_states.pt") for rank in range(4)]
    assert ranks[3]["checkpoint_parallel_dimensions"] == {"pp_degree": 2, "tp_degree": 2}
    assert ranks[3]["mp_world_size"] == 4
    modules = [rank["module"] for rank in ranks[:2]]
    assert_same(torch.cat([module["word"] for module in modules])[:7], weights["word"])
    assert not modules[1]["word"][3].any()  # padding
    query, key, value = weights["qkv"].split([4, 2, 2])
    assert_same(modules[1]["qkv"], torch.cat([query[2:], key[1:], value[1:]]))
    gate, up = weights["gate_up"].chunk(2)
    halves = [torch.cat([torch.cat([gate, up])[[0, 1, 3, 4]]]), torch.cat([gate, up])[[2, 5]]]
    assert_same(modules[0]["gate_up"], halves[0])
    assert_same(modules[1]["gate_up"], halves[1])
    assert_same(torch.cat([module["down"] for module in modules], 1), weights["down"])
    assert all(torch.equal(module["norm"], weights["norm"]) for module in modules)
    # ZeRO-3 would load a padded vocabulary wrongly, so it finds no model file.
    assert not list(out.glob("zero_pp_rank_*"))
    with pytest.raises(SpecError, match="padded"):
        universal.convert(tmp_path / "run", tmp_path / "no", to="ds-universal", zero_stage=3, spec=SPEC)
    # What DeepSpeed cuts the whole parameters by.
    assert load(out / "zero" / "word" / "fp32.pt")["vocab_tensor"] is True
    assert load(out / "zero" / "down" / "fp32.pt")["cat_dim"] == 1
    assert load(out / "zero" / "gate_up" / "fp32.pt")["param_n_sub_params"] == 2
    found = everystep.load(out)
    for name, weight in weights.items():
        assert_same(found["model"][name], weight, name)


def test_tensor_parallel_needs_rules(tmp_path: Path) -> None:
    save_layers(tmp_path / "run")
    with pytest.raises(SpecError, match="no rule says how 2 tensor-parallel ranks cut 'word'"):
        universal.convert(tmp_path / "run", tmp_path / "out", to="ds-universal", tp=2)
    bad = universal.Spec([rule("*", shard(0, pieces=1))])
    with pytest.raises(SpecError, match="cannot hold"):
        universal.convert(tmp_path / "run", tmp_path / "out", to="ds-universal", tp=2, spec=bad)
    assert os.listdir(tmp_path) == ["run"]


def test_what_has_no_place_in_the_layout_is_refused(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    everystep.save(tmp_path / "a", {"x": weight})
    with pytest.raises(UnsupportedState, match="needs the weights of a model"):
        universal.convert(tmp_path / "a", tmp_path / "out", to="ds-universal")
    everystep.save(tmp_path / "b", {"model": {"a/b": weight}})
    with pytest.raises(UnsupportedState, match="name of a file"):
        universal.convert(tmp_path / "b", tmp_path / "out", to="ds-universal")
    state = {"state": {"w": {"mu": torch.ones(1)}}, "param_groups": [{"params": ["w"]}]}
    everystep.save(tmp_path / "c", {"model": {"w": weight}, "optimizer": state})
    with pytest.raises(UnsupportedState, match=r"optimizer\.w\.mu"):
        universal.convert(tmp_path / "c", tmp_path / "out", to="ds-universal")
    assert not (tmp_path / "out").exists()


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def poison(path: Path) -> None:
    torch.save({"param": Hostile()}, path)


def reshape(path: Path) -> None:
    torch.save({"param": torch.ones(3)}, path)


@pytest.mark.parametrize(
    ("file", "change", "error", "names"),
    [
        ("zero/up.weight/fp32.pt", remove, IncompleteCheckpoint, "up.weight"),
        ("zero/up.weight/exp_avg.pt", truncate, CorruptCheckpoint, "exp_avg.pt"),
        ("zero/up.weight/exp_avg.pt", poison, UnsupportedSource, "system"),
        ("zero/up.weight/fp32.pt", reshape, CorruptCheckpoint, "up.weight"),
        ("zero/up.weight/exp_avg_sq.pt", reshape, CorruptCheckpoint, "up.weight"),
        ("zero/optimizer_state.pt", truncate, CorruptCheckpoint, "optimizer_state.pt"),
        ("mp_rank_00_model_states.pt", remove, IncompleteCheckpoint, "model_states"),
        ("mp_rank_00_model_states.pt", truncate, CorruptCheckpoint, "mp_rank_00"),
    ],
)
def test_damage_is_an_error_that_names_it_and_the_target_is_untouched(
    tmp_path: Path, file: str, change: Callable[[Path], None], error: type[Exception], names: str
) -> None:
    path = unpack("z2_bf16_3", tmp_path / "u") / "global_step3_universal"
    change(path / file)
    with pytest.raises(error, match=names):
        universal.convert(path, tmp_path / "out", kind="ds-universal")
    assert os.listdir(tmp_path) == ["u"]


def test_latest_universal_cannot_lead_elsewhere(tmp_path: Path) -> None:
    path = unpack("z2_bf16_3", tmp_path / "u")
    (path / "latest_universal").write_text("../elsewhere")
    with pytest.raises(CorruptCheckpoint, match="latest_universal"):
        ds_universal.describe(path)
    assert ds_universal.looks_like(path) is None


def test_model_files_of_two_steps_are_mixed(tmp_path: Path) -> None:
    save_layers(tmp_path / "run")
    universal.convert(tmp_path / "run", tmp_path / "out", to="ds-universal", tp=2, spec=SPEC)
    second = tmp_path / "out" / "mp_rank_01_model_states.pt"
    torch.save({**load(second), "global_steps": 9}, second)
    with pytest.raises(CorruptCheckpoint, match="several steps are mixed"):
        ds_universal.describe(tmp_path / "out")
    second.unlink()
    with pytest.raises(IncompleteCheckpoint, match="1 model files"):
        ds_universal.describe(tmp_path / "out")


def test_verify_notices_a_changed_byte_and_the_target_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run")
    check = target.check

    def change_and_check(job: Any, written: str) -> None:
        file = Path(written) / "zero" / "0.weight" / "exp_avg.pt"
        data = bytearray(file.read_bytes())
        found = data.find(load(file)["param"].numpy().tobytes())
        data[found + 5] ^= 1
        file.write_bytes(data)
        check(job, written)

    monkeypatch.setattr(target, "check", change_and_check)
    with pytest.raises(CorruptCheckpoint, match=r"optimizer\.0\.weight\.exp_avg"):
        universal.convert(tmp_path / "run", tmp_path / "out", to="ds-universal", verify=True)
    assert os.listdir(tmp_path) == ["run"]


def test_large_files_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystep.universal.torch_file.writing._STREAMED_NBYTES", 2000)
    universal.convert(ZERO / "z2_bf16_3", tmp_path / "out", to="ds-universal", verify=True)
    weights = save_layers(tmp_path / "run")
    universal.convert(tmp_path / "run", tmp_path / "cut", to="ds-universal", tp=2, spec=SPEC, verify=True)
    assert_same(load(tmp_path / "cut" / "zero" / "down" / "fp32.pt")["param"], weights["down"])
    assert_equal(deepspeed.describe(ZERO / "z2_bf16_3"), ds_universal.describe(tmp_path / "out"))


def test_the_command_writes_it_and_tells_the_files_before(tmp_path: Path) -> None:
    plan = command("convert", ZERO / "z3_fp32_3", tmp_path / "out", "--to", "ds-universal", "--dry-run")
    assert "zero/up.weight/fp32.pt" in plan.out
    assert not (tmp_path / "out").exists()
    done = universal.convert(ZERO / "z3_fp32_3", tmp_path / "out", to="ds-universal", dry_run=True)
    assert (
        command(
            "convert", ZERO / "z3_fp32_3", tmp_path / "out", "--to", "ds-universal", "--zero-stage", "4"
        ).code
        == 2
    )
    assert (
        command("convert", ZERO / "z3_fp32_3", tmp_path / "out", "--to", "ds-universal", "--verify").code == 0
    )
    sizes = {file.name: file.nbytes for file in done.files}
    found = {
        str(path.relative_to(tmp_path / "out")): path.stat().st_size
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert sizes == found
    with pytest.raises(CheckpointExists):
        universal.convert(ZERO / "z3_fp32_3", tmp_path / "out", to="ds-universal", overwrite=True)


@pytest.mark.timeout(300)
def test_killed_at_any_call_leaves_nothing_that_looks_complete_and_runs_again(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    everystep.save(tmp_path / "run", {"model": {"w": weight}})

    def convert(out: Path) -> None:
        universal.convert(tmp_path / "run", out, to="ds-universal")

    def assert_whole(out: Path) -> None:
        assert_same(everystep.load(out)["model"]["w"], weight)

    assert assert_survives_kills(tmp_path / "place", convert, assert_whole) > 10
