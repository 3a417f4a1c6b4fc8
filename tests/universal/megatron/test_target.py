"""Megatron directories that we write: every rank's file as Megatron lays it out, and the same bits again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import everystep
from everystep import StateMismatch, UnsupportedState, universal
from everystep.errors import SpecError
from everystep.universal import Spec, fused, pad, part, partial, rename, replicated, rule, shard, tied, unique
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.foreign_names import foreign_name
from support.foreign.killed_conversions import assert_survives_kills
from support.foreign.megatron_writer import WORDS, Model, write_megatron
from support.processes.command import command

EMBEDDING = "language_model.embedding.word_embeddings.weight"


def flattened(tree: dict[str, Any], place: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        name = f"{place}.{key}" if place else key
        found.update(flattened(value, name) if isinstance(value, dict) else {name: value})
    return found


def rank_file(path: Path, rank: int, stage: int, pp: int, step: int = 100) -> dict[str, Any]:
    name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
    file = path / f"iter_{step:07d}" / name / "model_optim_rng.pt"
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 2), (2, 4), (1, 3)])
def test_a_rank_has_what_megatron_would_give_it(tmp_path: Path, tp: int, pp: int) -> None:
    """Against a writer that cuts by hand (the test's own), with vocabularies that are padded alike."""
    model = Model()

    def padded(content: dict[str, Any], rank: int, stage: int) -> None:
        content["args"].make_vocab_size_divisible_by = 24 // tp

    source = write_megatron(tmp_path / "source", model, tp=2, pp=2, change=padded)
    expected = write_megatron(tmp_path / "expected", model, tp=tp, pp=pp)
    universal.convert(source, tmp_path / "run")
    for number, before in enumerate((source, tmp_path / "run") if tp == 4 else (tmp_path / "run",)):
        path = tmp_path / f"out{number}"
        done = universal.convert(before, path, to="megatron", tp=tp, pp=pp, verify=True)
        assert (done.to, done.left_out) == ("megatron", 0)
        assert (path / "latest_checkpointed_iteration.txt").read_text() == "100\n"
        for rank in range(tp):
            for stage in range(pp):
                found = rank_file(path, rank, stage, pp)
                assert found["args"].tensor_model_parallel_size == tp
                assert found["args"].padded_vocab_size == 24
                assert found["iteration"] == 100
                if pp == 3:
                    continue  # four layers: the other writer would cut them otherwise
                truth = rank_file(expected, rank, stage, pp)
                mine, its = flattened(found["model"]), flattened(truth["model"])
                assert list(mine) == list(its)
                for name, tensor in its.items():
                    _without_padding(mine[name], tensor, name, rank, tp)
                _same_optimizer(found["optimizer"], truth["optimizer"], rank, tp)


def _without_padding(mine: torch.Tensor, its: torch.Tensor, name: str, rank: int, tp: int) -> None:
    """The test's writer pads with -1, we pad with zeros."""
    assert mine.shape == its.shape, name
    if "word_embeddings" in name:
        rows = max(0, min(its.shape[0], WORDS - rank * its.shape[0]))
        mine, its = mine[:rows], its[:rows]
    assert torch.equal(mine, its), name


def _same_optimizer(mine: dict[str, Any], its: dict[str, Any], rank: int, tp: int) -> None:
    groups, expected = mine["optimizer"]["param_groups"], its["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [group["params"] for group in expected]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for index, state in its["optimizer"]["state"].items():
        found = mine["optimizer"]["state"][index]
        assert found["step"] == 7
        name = next(g["parameter_names"][g["params"].index(index)] for g in groups if index in g["params"])
        for kind in ("exp_avg", "exp_avg_sq"):
            _without_padding(found[kind], state[kind], name, rank, tp)
    for group, masters, truth in zip(
        groups, mine["fp32_from_fp16_params"], its["fp32_from_fp16_params"], strict=True
    ):
        for name, one, other in zip(group["parameter_names"], masters, truth, strict=True):
            _without_padding(one, other, name, rank, tp)


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (3, 4), (5, 1)])
def test_it_comes_back_the_same_with_everything(tmp_path: Path, tp: int, pp: int) -> None:
    universal.convert(write_megatron(tmp_path / "source", Model()), tmp_path / "run")
    universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", tp=tp, pp=pp)
    universal.convert(tmp_path / "out", tmp_path / "again")
    with everystep.open(tmp_path / "run") as one, everystep.open(tmp_path / "again") as other:
        assert other.step == 100
        names = [name for name in one if one.leaves[name].alias_of is None]
        assert {name for name in other if other.leaves[name].alias_of is None} == set(names)
        for name in names:
            assert torch.equal(one[name][...], other[name][...]), name
        mine, its = one.values["optimizer.param_groups"], other.values["optimizer.param_groups"]
        assert [sorted(g["params"]) for g in mine] == [sorted(g["params"]) for g in its]  # type: ignore[attr-defined]


def test_megatron_core_keeps_flat_names_and_ties_its_output_layer(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(2)
    weights = {"embedding.word_embeddings.weight": torch.randn(9, 4, generator=made)}
    for layer in range(2):
        weights[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = torch.randn(
            12, 4, generator=made
        )
        weights[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = torch.randn(4, 8, generator=made)
    weights["decoder.final_layernorm.weight"] = torch.randn(4, generator=made)
    everystep.save(tmp_path / "run", {"model": weights}, step=5)
    universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", tp=2, pp=2, verify=True)
    first, last = (rank_file(tmp_path / "out", 0, stage, 2, 5)["model"] for stage in range(2))
    assert set(first) == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    }
    assert set(last) - set(first) == {"decoder.final_layernorm.weight", "output_layer.weight"}
    assert last["output_layer.weight"].shape == (128, 4)
    assert torch.equal(last["output_layer.weight"][:9], weights["embedding.word_embeddings.weight"])
    second = weights["decoder.layers.1.mlp.linear_fc2.weight"][:, :4]
    assert torch.equal(last["decoder.layers.0.mlp.linear_fc2.weight"], second)
    weights["output_layer.weight"] = torch.randn(9, 4)
    everystep.save(tmp_path / "untied", {"model": weights}, step=5)
    universal.convert(tmp_path / "untied", tmp_path / "own", to="megatron", tp=2, pp=2, verify=True)
    own = rank_file(tmp_path / "own", 0, 1, 2, 5)["model"]["output_layer.weight"]
    assert torch.equal(own[:9], weights["output_layer.weight"])


RULES = st.sampled_from(
    [
        replicated(),
        partial("mean"),
        partial("sum"),
        shard(0),
        shard(1),
        fused(0, 2),
        fused(0, shares=[2, 1, 1]),
        fused(1, shares=[part(3), part(1, pieces=1)]),
    ]
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), tp=st.integers(1, 5), pp=st.integers(1, 3))
def test_random_shapes_and_degrees_come_back_bit_for_bit(
    tmp_path: Path, data: st.DataObject, tp: int, pp: int
) -> None:
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    words = data.draw(st.integers(1, 9))
    layers = data.draw(st.integers(pp, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    kinds = [data.draw(RULES) for _ in range(3)]
    shapes = [(4 * data.draw(st.integers(0, 4)), 4 * data.draw(st.integers(1, 3))) for _ in kinds]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))

    def make(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 100).to(dtype)

    weights = {"embed.weight": make(words, 3), "norm.weight": make(7)}
    for layer in range(layers):
        weights |= {f"layers.{layer}.w{n}": make(*shape) for n, shape in enumerate(shapes)}
    if dtype is torch.int64:  # means and sums are of floating-point numbers
        kinds = [kind if "partial" not in str(kind) else replicated() for kind in kinds]
    spec = Spec(
        [
            rule("old.tokens", shard(0), pad(0, words), rename("embed.weight")),
            *(
                rule(rf"re:stack\.layers\.(\d+)\.(w{n})", kind, rename(r"layers.\1.\2"))
                for n, kind in enumerate(kinds)
            ),
            rule("head", tied("embed.weight")),
            rule("*", replicated()),
        ]
    )
    optimizer = {
        "state": {
            name: {"exp_avg": make(*tensor.shape), "step": torch.tensor(3.0), "count": 4}
            for name, tensor in weights.items()
        },
        "param_groups": [{"lr": 0.5, "betas": (0.5, 0.9), "params": list(weights)[::-1]}],
    }
    state = {"model": weights, "optimizer": optimizer}
    everystep.save(tmp_path / "run", state, step=9, overwrite=True)
    universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", spec=spec, tp=tp, pp=pp, verify=True)
    found = rank_file(tmp_path / "out", tp - 1, pp - 1, pp, 9)["model"]
    assert any(name.startswith("stack.layers.0.") for name in flattened(found))
    source = universal.describe(tmp_path / "out", "megatron", spec)
    with ForeignCheckpoint(source) as checkpoint:
        for name, tensor in weights.items():
            assert torch.equal(checkpoint[f"model.{name}"][...], tensor), name
            moment = optimizer["state"][name]["exp_avg"]  # type: ignore[index, call-overload]
            assert torch.equal(checkpoint[f"optimizer.{name}.exp_avg"][...], moment), name
            assert float(checkpoint[f"optimizer.{name}.step"][...]) == 3.0
            assert source.values[f"optimizer.state.{name}.count"] == 4
        groups: Any = source.values["optimizer.param_groups"]
        assert sorted(groups[0]["params"]) == sorted(weights)
        assert (groups[0]["lr"], tuple(groups[0]["betas"])) == (0.5, (0.5, 0.9))


def test_a_whole_source_takes_the_spec_for_the_target(tmp_path: Path) -> None:
    """Of a Hugging Face model: the spec is not asked how the source is cut."""
    weights = {
        "model.embed_tokens.weight": torch.randn(10, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(4, 4),
        "model.norm.weight": torch.randn(4),
        "lm_head.weight": torch.randn(10, 4),
    }
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "llama.toml").write_text(
        'preset = { name = "llama", vocab_size = 10 }\n[[rule]]\nmatch = "decoder.norm"\n'
        'replicated = true\nrename = "model.norm.weight"\n'
    )
    done = command(
        "convert",
        tmp_path / "hf",
        tmp_path / "out",
        "--to",
        "megatron",
        "--tp",
        2,
        "--spec",
        tmp_path / "llama.toml",
        "--verify",
    )
    assert done.code == 0, done.err
    file = rank_file(tmp_path / "out", 1, 0, 1, 0)["model"]
    projection = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(file[projection], weights[projection][:, 2:])
    assert "decoder.norm" in file
    assert file["lm_head.weight"].shape == (128, 4)


def test_renames_are_reversed_or_named() -> None:
    spec = Spec(
        [
            rule("a.*.b.*", replicated(), rename("x.*.y.*")),
            rule(r"re:h\.(?P<n>\d+)\.(w|v)", shard(0), rename(r"layers.\g<n>.\2")),
            rule(r"re:q(\d+)", shard(0), rename(r"q.\1.\1")),
            rule(r"re:(?:module\.)?(k.*)", replicated(), rename(r"\1")),
            rule(r"re:lost\d+", unique(), rename("found")),
        ]
    )
    for name, before in {
        "x.1.y.2.3": "a.1.b.2.3",
        "layers.12.w": "h.12.w",
        "q.7.7": "q7",
        "key": "key",
    }.items():
        assert foreign_name(spec, name)[0] == before
    for name in ("layers.12.u", "q.7.8", "other"):
        with pytest.raises(SpecError, match=r"no rule of the spec matches"):
            foreign_name(spec, name)
    with pytest.raises(SpecError, match=r"the rename of 're:lost\\\\d\+' cannot be reversed"):
        foreign_name(spec, "found")


def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    weights = {"layers.0.w": torch.zeros(4, 4), "layers.1.w": torch.zeros(4, 4)}
    everystep.save(tmp_path / "run", {"model": weights, "other": torch.zeros(2)}, step=1)

    def convert(*rules: Any, **how: Any) -> None:
        universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", spec=Spec(rules), **how)

    with pytest.raises(SpecError, match=r"'layers\.0\.w'.*does not fit"):
        convert(rule("*", shard(2)), tp=2)
    with pytest.raises(SpecError, match="no rule of the spec"):
        convert(rule("layers.0.*", shard(0)), tp=2)
    with pytest.raises(SpecError, match="use replicated"):
        convert(rule("*", unique()), tp=2)
    with pytest.raises(SpecError, match="cannot be cut into 3 stages"):
        convert(rule("*", shard(0)), pp=3)
    with pytest.raises(SpecError, match="the source has both"):
        convert(rule("layers.1.w", tied("layers.0.w")), rule("*", shard(0)))
    with pytest.raises(SpecError, match="no rule of the spec"):
        universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", tp=2)
    with pytest.raises(StateMismatch, match=r"no leaf is named model\.\*"):
        universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", select="other")
    state = {
        "model": {"w": torch.zeros(8)},
        "optimizer": {"state": {"w": {"m": torch.zeros(4)}}, "param_groups": []},
    }
    everystep.save(tmp_path / "odd", state)
    with pytest.raises(UnsupportedState, match="would take it for a piece"):
        universal.convert(
            tmp_path / "odd", tmp_path / "out", to="megatron", tp=2, spec=Spec([rule("*", shard(0))])
        )
    assert not (tmp_path / "out").exists()
    assert command("convert", tmp_path / "run", tmp_path / "out", "--to", "torch", "--tp", 2).code == 2


def test_a_cast_and_a_plan_are_those_of_the_files(tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "source", Model())
    plan = universal.convert(source, tmp_path / "out", to="megatron", tp=2, dtype="bf16", dry_run=True)
    assert not (tmp_path / "out").exists()
    universal.convert(source, tmp_path / "out", to="megatron", tp=2, dtype="bf16", verify=True)
    assert {file.name: file.nbytes for file in plan.files} == {
        str(file.relative_to(tmp_path / "out")): file.stat().st_size
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    found = rank_file(tmp_path / "out", 0, 0, 1)
    assert all(tensor.dtype == torch.bfloat16 for tensor in flattened(found["model"]).values())
    assert found["optimizer"]["fp32_from_fp16_params"][0][0].dtype == torch.float32


def test_large_parameters_pass_in_slabs(tmp_path: Path) -> None:
    big = torch.arange(9_000_002, dtype=torch.float32).reshape(-1, 2)
    everystep.save(tmp_path / "run", {"model": {"layers.0.w": big, "layers.0.v": big.T.contiguous()}}, step=1)
    spec = Spec([rule("*.w", shard(0)), rule("*.v", shard(1))])
    universal.convert(tmp_path / "run", tmp_path / "out", to="megatron", spec=spec, tp=3)
    pieces = [rank_file(tmp_path / "out", rank, 0, 1, 1)["model"] for rank in range(3)]
    assert torch.equal(torch.cat([piece["layers.0.w"] for piece in pieces]), big)
    assert torch.equal(torch.cat([piece["layers.0.v"] for piece in pieces], 1), big.T)


@pytest.mark.timeout(600)
def test_killed_at_any_call_leaves_nothing_that_looks_complete_and_runs_again(tmp_path: Path) -> None:
    everystep.save(tmp_path / "run", {"model": {"layers.0.w": torch.arange(12.0).reshape(4, 3)}}, step=3)
    spec = Spec([rule("*", shard(0))])

    def convert(out: Path) -> None:
        universal.convert(tmp_path / "run", out, to="megatron", spec=spec, tp=2)

    def assert_whole(out: Path) -> None:
        pieces = [rank_file(out, rank, 0, 1, 3)["model"]["layers.0.w"] for rank in range(2)]
        assert torch.cat(pieces).flatten().tolist() == list(np.arange(12.0))

    assert assert_survives_kills(tmp_path / "place", convert, assert_whole) > 4
