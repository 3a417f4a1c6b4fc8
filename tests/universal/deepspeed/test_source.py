"""Checkpoints that DeepSpeed wrote (0.19.8, CPU, gloo): described by us, equal to what its own tools give.

The fixtures are small runs of one model with tied and frozen parameters, a buffer, a parameter that no step
used and two groups. ``truth.pt`` beside each holds what `zero_to_fp32` (``fp32``) and `ds_to_universal`
(``universal``) made of it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.deepspeed import source as deepspeed
from everystep.universal.torch_file.reading import read_torch_file
from support.foreign.source_leaves import assert_same, by_name

CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


def test_there_are_fixtures_of_all_stages() -> None:
    assert {name[:2] for name in NAMES} == {"z1", "z2", "z3"}
    assert {name.split("_")[2] for name in NAMES} >= {"2", "3"}


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_zero_to_fp32(name: str) -> None:
    truth = torch.load(FIXTURES / name / "truth.pt")["fp32"]
    found = by_name(deepspeed.describe(FIXTURES / name))
    stage, kind = int(name[1]), name.split("_")[1]
    tied = {"head.weight": "embed.weight"}
    for parameter, expected in truth.items():
        master = found.get(f"optimizer.{tied.get(parameter, parameter)}.fp32")
        if master is not None:
            assert_same(master, expected, parameter)
        else:  # buffers and frozen parameters have no state
            assert_same(found[f"model.{parameter}"].float(), expected.float(), parameter)
        if stage < 3 and kind != "fp32":
            half = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
            if master is not None:
                assert_same(found[f"model.{parameter}"], expected.to(half), parameter)
    assert {n.removeprefix("model.") for n in found if n.startswith("model.")} >= set(truth)


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_ds_to_universal(name: str) -> None:
    truth = torch.load(FIXTURES / name / "truth.pt")["universal"]
    source = deepspeed.describe(FIXTURES / name)
    found = by_name(source)
    assert bool(truth) != (name == "z1_fp32_3")  # elastic_checkpoint, which ds_to_universal cannot read
    for parameter, states in truth.items():
        for state, expected in states.items():
            ours = found[f"optimizer.{parameter}.{state}"]
            assert_same(ours.reshape(expected.shape), expected, f"{parameter}.{state}")
    states = {n.rsplit(".", 1)[1] for n in found if n.startswith("optimizer.")}
    assert states == {"fp32", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("name", NAMES)
def test_values_and_ties(name: str) -> None:
    source = deepspeed.describe(FIXTURES / name)
    assert deepspeed.looks_like(FIXTURES / name) == "a DeepSpeed ZeRO checkpoint (global_step3)"
    assert (source.kind, source.step) == ("deepspeed", 3)
    assert source.aliases["model.head.weight"] == "model.embed.weight"
    assert source.values["note"] == "hello"
    assert source.values["nested.a"] == 1.5
    assert source.values["lr_scheduler.last_batch_iteration"] == 2
    assert source.facts["zero stage"] == name[1]
    assert source.facts["data parallel"] == name.split("_")[2]
    groups: Any = source.values.get("optimizer.param_groups")
    if name != "z1_fp32_3":  # elastic_checkpoint, which keeps no options
        assert groups[0]["weight_decay"] == 0.1


def copied(tmp_path: Path, name: str) -> Path:
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    return tmp_path / "run"


def optimizer_file(run: Path, rank: int) -> Path:
    return next((run / "global_step3").glob(f"*zero_pp_rank_{rank}_*optim_states.pt"))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_rank_is_named(tmp_path: Path, name: str) -> None:
    run = copied(tmp_path, name)
    optimizer_file(run, 1).unlink()
    with pytest.raises(IncompleteCheckpoint, match="rank 1 is missing"):
        deepspeed.describe(run)


def test_a_missing_model_file_and_a_missing_tag(tmp_path: Path) -> None:
    run = copied(tmp_path, "z1_fp32_2")
    os.unlink(run / "global_step3" / "mp_rank_00_model_states.pt")
    with pytest.raises(IncompleteCheckpoint, match="model_states"):
        deepspeed.describe(run)
    (run / "latest").write_text("global_step9")
    with pytest.raises(IncompleteCheckpoint, match="global_step9"):
        deepspeed.describe(run)
    (run / "latest").write_text("../other")
    with pytest.raises(CorruptCheckpoint, match="beside it"):
        deepspeed.describe(run)


def test_files_of_two_checkpoints_are_distinguished(tmp_path: Path) -> None:
    run = copied(tmp_path, "z1_fp32_2")
    shutil.copy(optimizer_file(FIXTURES / "z3_fp32_2", 1), optimizer_file(run, 1))
    with pytest.raises(CorruptCheckpoint, match=r"ZeRO stages \[1, 3\]"):
        deepspeed.describe(run)


def test_another_step_in_one_file_is_found(tmp_path: Path) -> None:
    run = copied(tmp_path, "z1_fp32_2")
    path = optimizer_file(run, 1)
    data = path.read_bytes()
    content = read_torch_file(path, [*CLASSES])
    place = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].offset
    changed = data[:place] + torch.tensor(9.0).numpy().tobytes() + data[place + 4 :]
    assert data[place : place + 4] == torch.tensor(3.0).numpy().tobytes()
    path.write_bytes(changed)
    with pytest.raises(CorruptCheckpoint, match="two steps are mixed") as error:
        deepspeed.describe(run)
    assert error.value.leaf is not None


@pytest.mark.parametrize("name", ["z1_fp32_2", "z3_fp32_2"])
def test_truncated_files(tmp_path: Path, name: str) -> None:
    run = copied(tmp_path, name)
    for path in (run / "global_step3").iterdir():
        data = path.read_bytes()
        for length in (0, 3, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(CorruptCheckpoint) as error:
                deepspeed.describe(run)
            assert path.name in str(error.value)
        path.write_bytes(data)


def saved_again(path: Path, change: Any) -> None:
    """The file with a change, written by torch: the classes of DeepSpeed become plain entries."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def test_mixed_steps_of_model_files(tmp_path: Path) -> None:
    run = copied(tmp_path, "z3_fp32_2")
    path = run / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    saved_again(path, lambda content: content.update(global_steps=4))
    with pytest.raises(CorruptCheckpoint, match="steps 3, 4"):
        deepspeed.describe(run)


def test_shapes_that_do_not_fit_name_the_parameter(tmp_path: Path) -> None:
    run = copied(tmp_path, "z1_fp32_2")
    path = run / "global_step3" / "mp_rank_00_model_states.pt"
    saved_again(path, lambda content: content["param_shapes"][0].update({"up.weight": torch.Size([11, 6])}))
    with pytest.raises(CorruptCheckpoint, match="66") as error:
        deepspeed.describe(run)
    assert error.value.leaf == "up.weight"


def test_unknown_layouts_are_errors(tmp_path: Path) -> None:
    run = copied(tmp_path, "z1_fp32_2")
    torch.save({"optimizer_state_dict": {"surprise": 1}}, optimizer_file(run, 0))
    with pytest.raises(UnsupportedSource, match="FP32 weights are in a form that is not known"):
        deepspeed.describe(run)
    torch.save({"optimizer_state_dict": Surprise()}, optimizer_file(run, 0))
    with pytest.raises(UnsupportedSource, match="Surprise"):
        deepspeed.describe(run)


class Surprise:
    """A class that no list has."""


def test_other_directories_are_not_recognised(tmp_path: Path) -> None:
    assert deepspeed.looks_like(tmp_path) is None
    assert deepspeed.looks_like(tmp_path / "none") is None
