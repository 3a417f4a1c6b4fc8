"""Megatron directories: every rule of the preset, tensor x pipeline parallel, and what can be wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep import CorruptCheckpoint, universal
from everystep.errors import IncompleteCheckpoint, SpecError, UnsupportedSource
from everystep.universal import Spec, partial, rename, replicated, rule, shard
from everystep.universal.megatron import source as megatron

torch = pytest.importorskip("torch")

from support.foreign.megatron_writer import Model, write_megatron  # noqa: E402
from support.worlds.rank_tensors import read_leaf  # noqa: E402

EMBEDDING = "language_model.embedding.word_embeddings.weight"
QKV = "language_model.encoder.layers.0.self_attention.query_key_value.weight"


@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (4, 4, 1)])
def test_every_parameter_and_moment_is_whole_again(tmp_path: Path, tp: int, pp: int, chunks: int) -> None:
    model = Model()
    path = write_megatron(tmp_path, model, tp=tp, pp=pp, chunks=chunks)
    source = megatron.describe(str(path), None)
    leaves = {leaf.name: leaf for leaf in source.leaves}
    assert {name for name in leaves if name.startswith("model.")} == {f"model.{name}" for name in model.whole}
    for name, whole in model.whole.items():
        np.testing.assert_array_equal(read_leaf(leaves[f"model.{name}"]), whole.numpy(), err_msg=name)
        for kind in ("exp_avg", "exp_avg_sq", "fp32"):
            found = read_leaf(leaves[f"optimizer.{name}.{kind}"])
            expected = model.moment(name, kind).numpy()
            np.testing.assert_array_equal(found, expected, err_msg=f"{name} {kind}")
        assert source.values[f"optimizer.state.{name}.step"] == 7
    assert source.step == 100
    assert source.values["args.vocab_size"] == 21
    assert source.values["args.params_dtype"] == torch.float32
    assert source.facts["tensor parallel"] == str(tp)
    assert source.facts["pipeline parallel"] == str(pp)
    groups: Any = source.values["optimizer.param_groups"]
    assert sorted(name for group in groups for name in group["params"]) == sorted(model.whole)
    if pp > 1:
        assert source.aliases["model.word_embeddings_for_head.weight"] == f"model.{EMBEDDING}"
        assert len(leaves[f"model.{EMBEDDING}"].copies) == 1


def test_the_native_path_reads_it(tmp_path: Path) -> None:
    model = Model()
    path = write_megatron(tmp_path / "run", model)
    assert universal.recognise(path) == "megatron"
    with everystep.open(path) as checkpoint:
        assert checkpoint.step == 100
        np.testing.assert_array_equal(
            np.asarray(checkpoint[f"model.{QKV}"][3:9]), model.whole[QKV][3:9].numpy()
        )
        words = np.asarray(checkpoint[f"model.{EMBEDDING}"][:])
        np.testing.assert_array_equal(words, model.whole[EMBEDDING].numpy())
    inside = path / "iter_0000100"
    assert universal.recognise(inside) == "megatron"


def test_it_converts_and_differing_replicas_stop_it(tmp_path: Path) -> None:
    model = Model()
    universal.convert(write_megatron(tmp_path / "run", model), tmp_path / "out")
    with everystep.open(tmp_path / "out") as checkpoint:
        for name, whole in model.whole.items():
            np.testing.assert_array_equal(np.asarray(checkpoint[f"model.{name}"][...]), whole.numpy())

    def changed(content: dict[str, Any], rank: int, stage: int) -> None:
        if (rank, stage) == (1, 0):
            content["model"]["language_model"]["embedding"]["position_embeddings"]["weight"][0, 0] += 1

    path = write_megatron(tmp_path / "differs", model, change=changed)
    with pytest.raises(CorruptCheckpoint, match=r"position_embeddings\.weight"):
        universal.convert(path, tmp_path / "not")
    assert not (tmp_path / "not").exists()


def test_a_spec_of_the_user_takes_the_place_of_the_preset(tmp_path: Path) -> None:
    model = Model()
    path = str(write_megatron(tmp_path, model))
    own = Spec(
        [
            rule("language_model.encoder.final_layernorm.weight", partial("mean"), rename("norm.weight")),
            rule("language_model.embedding.word_embeddings.weight", shard(0)),
        ]
    )
    source = megatron.describe(path, own + Spec.preset("megatron-gpt", swiglu=True))
    leaves = {leaf.name: leaf for leaf in source.leaves}
    assert leaves["model.norm.weight"].reduce == "mean"
    np.testing.assert_array_equal(
        read_leaf(leaves["model.norm.weight"]),
        model.whole["language_model.encoder.final_layernorm.weight"].numpy(),
    )
    assert leaves[f"model.{EMBEDDING}"].shape == (24, 8), "without pad, the padding stays"
    with pytest.raises(SpecError, match="no rule matches") as caught:
        megatron.describe(path, own)
    assert len(caught.value.names) == len(model.whole) - 2 + 1
    with pytest.raises(SpecError, match=r"'language_model.embedding.word_embeddings.weight'.*does not fit"):
        megatron.describe(path, Spec([rule("*embedding*", shard(5)), rule("*", replicated())]))


def test_names_for_a_spec_are_those_of_the_whole_model(tmp_path: Path) -> None:
    model = Model()
    path = str(write_megatron(tmp_path, model, optimizer=False))
    assert set(megatron.parameters(path)) == {*model.whole, "word_embeddings_for_head.weight"}
    source = megatron.describe(path, None)
    assert source.facts["optimizer state"] == "none"
    assert not any(leaf.name.startswith("optimizer.") for leaf in source.leaves)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model())
    shutil.rmtree(path / "iter_0000100/mp_rank_00_001")
    with pytest.raises(IncompleteCheckpoint, match="mp_rank_00_001"):
        megatron.describe(str(path), None)


def test_the_last_rank_is_missed_too(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model(), tp=2, pp=1)
    shutil.rmtree(path / "iter_0000100/mp_rank_01")
    with pytest.raises(
        IncompleteCheckpoint, match="tensor_model_parallel_size is 2, but there are directories for 1"
    ):
        megatron.describe(str(path), None)


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model())
    (path / "iter_0000100/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"mp_rank_01_001/model_optim_rng\.pt"):
        megatron.describe(str(path), None)


def test_a_latest_iteration_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model())
    (path / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(IncompleteCheckpoint, match="iter_0000200"):
        megatron.describe(str(path), None)
    (path / "latest_checkpointed_iteration.txt").write_text("soon")
    with pytest.raises(CorruptCheckpoint, match="'soon', which is no iteration"):
        megatron.describe(str(path), None)
    assert megatron.looks_like(str(path)) is None


def test_files_of_two_steps_are_not_mixed(tmp_path: Path) -> None:
    def later(content: dict[str, Any], rank: int, stage: int) -> None:
        content["iteration"] += rank

    path = write_megatron(tmp_path, Model(), change=later)
    with pytest.raises(CorruptCheckpoint, match=r"mp_rank_01.*iteration 101, but other ranks are of 100"):
        megatron.describe(str(path), None)


def test_a_truncated_file_is_damage(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model())
    file = path / "iter_0000100/mp_rank_01_000/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CorruptCheckpoint, match="mp_rank_01_000"):
        megatron.describe(str(path), None)


def test_a_class_that_is_not_on_the_list_is_named(tmp_path: Path) -> None:
    def hostile(content: dict[str, Any], rank: int, stage: int) -> None:
        content["extra"] = _Bomb()

    path = write_megatron(tmp_path / "run", Model(), change=hostile)
    with pytest.raises(UnsupportedSource, match="system"):
        megatron.describe(str(path), None)
    assert not (tmp_path / "executed").exists()


class _Bomb:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch executed",)


@pytest.mark.parametrize("place", ["model", "args"])
def test_objects_that_contain_themselves_end_in_an_error(tmp_path: Path, place: str) -> None:
    def cyclic(content: dict[str, Any], rank: int, stage: int) -> None:
        inner = content["model"] if place == "model" else vars(content["args"])
        inner["again"] = {}
        inner["again"]["again"] = inner["again"]

    path = write_megatron(tmp_path, Model(), optimizer=False, change=cyclic)
    with pytest.raises(UnsupportedSource, match=r"mp_rank_00_000.*contain themselves"):
        megatron.describe(str(path), None)


def test_what_is_not_a_tensor_is_named_unless_it_is_extra_state(tmp_path: Path) -> None:
    def with_extra(content: dict[str, Any], rank: int, stage: int) -> None:
        content["model"]["layer._extra_state"] = b"fp8"

    def with_text(content: dict[str, Any], rank: int, stage: int) -> None:
        content["model"]["note"] = "hello"

    path = write_megatron(tmp_path / "extra", Model(), optimizer=False, change=with_extra)
    assert "layer._extra_state" not in megatron.parameters(str(path))
    path = write_megatron(tmp_path / "text", Model(), optimizer=False, change=with_text)
    with pytest.raises(UnsupportedSource, match="'note' is a str, not a tensor"):
        megatron.describe(str(path), None)


def test_a_parameter_that_one_rank_lacks_is_named(tmp_path: Path) -> None:
    def lacking(content: dict[str, Any], rank: int, stage: int) -> None:
        if (rank, stage) == (1, 0):
            del content["model"]["language_model"]["embedding"]["position_embeddings"]

    path = write_megatron(tmp_path, Model(), optimizer=False, change=lacking)
    with pytest.raises(CorruptCheckpoint, match=r"mp_rank_01_000.*position_embeddings\.weight"):
        megatron.describe(str(path), None)


def test_types_that_differ_between_ranks_are_damage(tmp_path: Path) -> None:
    def half(content: dict[str, Any], rank: int, stage: int) -> None:
        if (rank, stage) == (1, 0):
            place = content["model"]["language_model"]["embedding"]["position_embeddings"]
            place["weight"] = place["weight"].half()

    path = write_megatron(tmp_path, Model(), optimizer=False, change=half)
    with pytest.raises(CorruptCheckpoint, match="type differs between ranks"):
        megatron.describe(str(path), None)


def test_an_optimizer_whose_layout_is_not_known_is_refused(tmp_path: Path) -> None:
    def shuffled(content: dict[str, Any], rank: int, stage: int) -> None:
        content["optimizer"]["fp32_from_fp16_params"][0].reverse()

    path = write_megatron(tmp_path, Model(), change=shuffled)
    with pytest.raises(UnsupportedSource, match="optimizer's group 0"):
        megatron.describe(str(path), None)


def test_a_distributed_optimizer_is_said_not_to_be_read(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model(), optimizer=False)
    (path / "iter_0000100/mp_rank_00_000/distrib_optim.pt").write_bytes(b"")
    assert (
        megatron.describe(str(path), None).facts["optimizer state"]
        == "of a distributed optimizer (distrib_optim.pt), not read"
    )


def test_expert_parallel_ranks_are_refused_by_name(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, Model())
    inside = path / "iter_0000100"
    (inside / "mp_rank_00_000").rename(inside / "mp_rank_00_000_000")
    assert universal.recognise(path) == "megatron"
    with pytest.raises(UnsupportedSource, match="mp_rank_00_000_000: expert-parallel"):
        megatron.describe(str(path), None)


def test_expert_parallel_ranks_are_not_taken_for_stages(tmp_path: Path) -> None:
    def experts(content: dict[str, Any], rank: int, stage: int) -> None:
        content["args"].pipeline_model_parallel_size = 1
        content["args"].expert_model_parallel_size = 2

    path = write_megatron(tmp_path, Model(), change=experts)
    with pytest.raises(UnsupportedSource, match=r"expert_model_parallel_size is 2.*torch_dist"):
        megatron.describe(str(path), None)


def test_other_directories_are_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    assert megatron.looks_like(str(tmp_path)) is None
    assert megatron.looks_like(str(tmp_path / "nothing")) is None
