"""Tensor, pipeline and expert parallel checkpoints that DeepSpeed wrote (0.19.8, CPU), and other variants.

``truth.pt`` beside each holds what DeepSpeed's tools make of it, and for experts, which they do not read,
what the ranks had in memory (`tests/peers/deepspeed_fixtures.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from everystep import universal
from everystep.errors import (
    CorruptCheckpoint,
    EverystepError,
    IncompleteCheckpoint,
    SpecError,
    UnsupportedSource,
)
from everystep.universal import Spec
from everystep.universal.deepspeed import source as deepspeed
from everystep.universal.deepspeed.names import CLASSES
from everystep.universal.rules import replicated, rule, shard, unique
from everystep.universal.source import Source
from support.foreign.source_leaves import assembled, assert_same, by_name

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed_variants"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
FACTS = {
    "bf16_optimizer": {"zero stage": "1", "data parallel": "2"},
    "z1_fp16": {"zero stage": "1", "data parallel": "2"},
    "z2_round_robin": {"zero stage": "2", "data parallel": "3"},
    "tp_dp_bf16": {"zero stage": "1", "data parallel": "2", "tensor parallel": "2"},
    "pp_tp": {"zero stage": "1", "data parallel": "1", "tensor parallel": "2", "pipeline parallel": "2"},
    "moe_z2": {"zero stage": "2", "data parallel": "4", "expert parallel": "2"},
}
HALF = {"bf16_optimizer": torch.bfloat16, "tp_dp_bf16": torch.bfloat16, "z1_fp16": torch.float16}


def read(source: Source) -> dict[str, torch.Tensor]:
    """Every leaf by name; the mean of those that are means."""
    found = by_name(source)
    for leaf in source.leaves:
        if leaf.terms:
            total = sum((assembled(leaf, term) for term in leaf.terms), found[leaf.name])
            found[leaf.name] = total / (1 + len(leaf.terms))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_what_deepspeed_says(name: str) -> None:
    source = deepspeed.describe(FIXTURES / name)
    found = read(source)
    compared = 0
    for parameter, states in torch.load(FIXTURES / name / "truth.pt").items():
        for state, expected in states.items():
            ours = found.get(f"optimizer.{parameter}.{state}")
            if ours is None:  # buffers, frozen and tied parameters
                if (name, parameter) == ("tp_dp_bf16", "frozen"):
                    continue  # of which DeepSpeed's tool takes the first rank's half for the whole
                ours = found[f"model.{parameter}"].float()
            assert_same(ours.reshape(expected.shape), expected.float(), f"{parameter}.{state}")
            compared += 1
    assert compared >= 13
    for leaf, master in found.items():
        if leaf.endswith(".fp32") and name != "tp_dp_bf16":
            weight = found[f"model.{leaf[10:-5]}"]
            assert weight.dtype == HALF.get(name, torch.float32)
            assert_same(weight, master.to(weight.dtype), leaf)


@pytest.mark.parametrize("name", NAMES)
def test_facts_names_and_values(name: str) -> None:
    source = deepspeed.describe(FIXTURES / name)
    assert source.facts == {**FACTS[name], "deepspeed": "0.19.8"}
    assert source.step == 3
    assert source.values["note"] == "hello"
    groups: Any = source.values["optimizer.param_groups"]
    leaves = {leaf.name for leaf in source.leaves}
    listed = [parameter for group in groups for parameter in group["params"]]
    assert len(set(listed)) == len(listed)
    for parameter in listed:
        assert {f"model.{parameter}", f"optimizer.{parameter}.exp_avg"} <= leaves


def test_layers_and_experts_have_the_names_of_the_whole_model() -> None:
    pipe = {leaf.name for leaf in deepspeed.describe(FIXTURES / "pp_tp").leaves}
    assert {"model.tied_modules.words.weight", "model.1.up", "model.3.seen", "model.4.weight"} <= pipe
    assert "model.0.weight" not in pipe
    moe = {leaf.name for leaf in deepspeed.describe(FIXTURES / "moe_z2").leaves}
    expert = "moe.deepspeed_moe.experts.deepspeed_experts.{}.2.weight"
    assert {f"optimizer.{expert.format(number)}.exp_avg" for number in range(4)} <= moe
    assert {f"model.{expert.format(number)}" for number in range(4)} <= moe


def test_pipeline_stages_that_share_a_layer_hold_copies() -> None:
    leaves = {leaf.name: leaf for leaf in deepspeed.describe(FIXTURES / "pp_tp").leaves}
    tied = leaves["optimizer.tied_modules.words.weight.exp_avg"]
    assert len(tied.copies) == 3  # of two tensor-parallel ranks on two stages
    for copy in tied.copies:
        assert_same(assembled(tied, copy), assembled(tied))


@pytest.mark.parametrize("name", ["tp_dp_bf16", "pp_tp", "moe_z2"])
def test_converted_it_has_every_leaf_bit_for_bit(tmp_path: Path, name: str) -> None:
    universal.convert(FIXTURES / name, tmp_path / "out", verify=True)
    expected = read(deepspeed.describe(FIXTURES / name))
    assert expected
    with everystep.open(tmp_path / "out") as converted:
        assert {*converted, *converted.aliases} == set(expected)
        for leaf, tensor in expected.items():
            assert_same(converted[leaf][...], tensor, leaf)


# --- specs


def without_info(content: dict[str, Any]) -> None:
    del content["universal_checkpoint_info"]


def copied(tmp_path: Path, name: str) -> Path:
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    return tmp_path / "run"


def change(path: Path, how: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=True)
    how(content)
    torch.save(content, path)


def test_without_info_an_error_says_what_to_do_and_a_spec_is_enough(tmp_path: Path) -> None:
    run = copied(tmp_path, "pp_tp")
    for path in (run / "global_step3").glob("mp_rank_*"):
        change(path, without_info)
    with pytest.raises(SpecError, match=r"2 tensor-parallel ranks.*--spec FILE") as error:
        deepspeed.describe(run)
    assert "1.up" in error.value.names
    spec = Spec(
        [rule("re:.*(norm|words|seen).*|4\\..*", replicated()), rule("*.down", shard(1)), rule("*", shard(0))]
    )
    found, same = by_name(deepspeed.describe(run, spec)), by_name(deepspeed.describe(FIXTURES / "pp_tp"))
    assert found.keys() == same.keys()
    for name, expected in same.items():
        assert_same(found[name], expected, name)


def test_a_spec_overrides_the_info_of_the_files() -> None:
    spec = Spec([rule("*.down", shard(0)), rule("re:(.*)", replicated())])
    with pytest.raises(SpecError, match="does not fit"):  # `1.up` is cut, and 8 x 4 is not 4 x 8
        deepspeed.describe(FIXTURES / "tp_dp_bf16", Spec([rule("*", unique())]))
    found = by_name(deepspeed.describe(FIXTURES / "pp_tp", spec))
    assert found["model.1.down"].shape == (8, 4)
    assert found["optimizer.1.down.exp_avg"].shape == (8, 4)
    assert set(deepspeed.parameters(FIXTURES / "pp_tp")) >= {"1.down", "tied_modules.words.weight"}


# --- faults


def broken(tmp_path: Path, name: str, pattern: str, how: Callable[[Path], None]) -> EverystepError:
    run = copied(tmp_path, name)
    (path,) = (run / "global_step3").glob(pattern)
    how(path)
    with pytest.raises(EverystepError) as error:
        deepspeed.describe(run)
    return error.value


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("pp_tp", "mp_rank_02_model_states.pt", "model file of model-parallel rank 2 is missing"),
        ("pp_tp", "layer_03-model_01-model_states.pt", "layer 3 of tensor-parallel rank 1 is missing"),
        ("pp_tp", "zero_pp_rank_0_mp_rank_03_optim_states.pt", "rank 0 is missing of model-parallel rank 3"),
        ("tp_dp_bf16", "*zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank 1 is missing"),
        ("moe_z2", "layer_0_expert_2_mp_rank_00_model_states.pt", "expert 2 of MoE layer 0 is missing"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, file: str, message: str) -> None:
    error = broken(tmp_path, name, file, Path.unlink)
    assert isinstance(error, IncompleteCheckpoint)
    assert message in str(error)


def test_a_missing_layer_on_all_ranks_is_found(tmp_path: Path) -> None:
    run = copied(tmp_path, "pp_tp")
    for path in (run / "global_step3").glob("layer_03-*"):
        path.unlink()
    with pytest.raises(CorruptCheckpoint, match="missing in the model file") as error:
        deepspeed.describe(run)
    assert error.value.leaf == "3.up"


@pytest.mark.parametrize("pattern", ["layer_04-model_01*", "mp_rank_03*", "zero_pp_rank_0_mp_rank_02*"])
def test_a_truncated_file_is_named(tmp_path: Path, pattern: str) -> None:
    error = broken(tmp_path, "pp_tp", pattern, lambda path: path.write_bytes(path.read_bytes()[:900]))
    assert isinstance(error, CorruptCheckpoint)
    assert pattern[:-1] in str(error)


def test_a_model_file_of_another_step_is_found(tmp_path: Path) -> None:
    error = broken(
        tmp_path,
        "pp_tp",
        "mp_rank_02*",
        lambda path: change(path, lambda content: content.update(global_steps=9)),
    )
    assert isinstance(error, CorruptCheckpoint)
    assert "steps 3, 9" in str(error)


def test_an_optimizer_file_of_another_step_is_found(tmp_path: Path) -> None:
    run = copied(tmp_path, "pp_tp")
    path = run / "global_step3" / "zero_pp_rank_0_mp_rank_03_optim_states.pt"
    place = deepspeed_step(path)
    data = path.read_bytes()
    path.write_bytes(data[:place] + torch.tensor(9.0).numpy().tobytes() + data[place + 4 :])
    with pytest.raises(CorruptCheckpoint, match="two steps are mixed") as error:
        deepspeed.describe(run)
    assert error.value.leaf == "tied_modules.words.weight"


def deepspeed_step(path: Path) -> int:
    content = universal_content(path)
    place: int = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].offset
    return place


def universal_content(path: Path) -> Any:
    from everystep.universal.torch_file.reading import read_torch_file

    return read_torch_file(path, CLASSES)


def test_replicas_that_differ_fail_the_conversion(tmp_path: Path) -> None:
    run = copied(tmp_path, "pp_tp")
    change(
        run / "global_step3" / "layer_04-model_01-model_states.pt",
        lambda content: content["weight"].add_(1),
    )
    with pytest.raises(CorruptCheckpoint, match=r"4\.weight"):
        universal.convert(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_class_in_a_layer_file_is_refused(tmp_path: Path) -> None:
    error = broken(tmp_path, "pp_tp", "layer_01-model_00*", lambda path: torch.save({"up": Surprise()}, path))
    assert isinstance(error, UnsupportedSource)
    assert "Surprise" in str(error)
    assert "layer_01-model_00" in str(error)


class Surprise:
    """A class that no list has."""


def test_a_group_that_is_cut_in_an_unknown_way_is_an_error(tmp_path: Path) -> None:
    """The dense group of a fixture is said to be cut over two of four ranks, which only experts are."""
    run = copied(tmp_path, "moe_z2")
    path = run / "global_step3" / "mp_rank_00_model_states.pt"

    def renamed(content: dict[str, Any]) -> None:
        dense, experts = content["param_shapes"]
        content["param_shapes"] = [
            dense,
            {name.replace("deepspeed_experts", "mine"): s for name, s in experts.items()},
        ]

    change(path, renamed)
    with pytest.raises(UnsupportedSource, match="known only of experts"):
        deepspeed.describe(run)


def test_two_tied_modules_of_one_shape_are_not_guessed(tmp_path: Path) -> None:
    run = copied(tmp_path, "pp_tp")
    for path in (run / "global_step3").glob("mp_rank_*"):
        change(path, lambda content: content["buffer_names"].append("tied_modules.other.weight"))
    with pytest.raises(UnsupportedSource, match=r"layer 0 is tied.*tied_modules\.other"):
        deepspeed.describe(run)


def test_older_versions_that_do_not_say_their_degrees(tmp_path: Path) -> None:
    run = copied(tmp_path, "pp_tp")
    for path in (run / "global_step3").glob("mp_rank_*"):
        change(path, lambda content: content.pop("checkpoint_parallel_dimensions"))
    assert deepspeed.describe(run).facts == {**FACTS["pp_tp"], "deepspeed": "0.19.8"}
