"""Checkpoints that real DeepSpeed writes now: read by us, equal bit for bit to its own tools and memory.

`zero_to_fp32` and `ds_to_universal` are run on each of them. Where they do not read a checkpoint (experts,
other optimizers than Adam, ...), the comparison is with the weights and states that the ranks had in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep.errors import SpecError
from everystep.universal.deepspeed import source as deepspeed
from everystep.universal.rules import fused, pad, partial, replicated, rule, shard
from everystep.universal.source import Source
from everystep.universal.spec import Spec
from support.foreign.source_leaves import assembled, assert_same, by_name
from support.processes import peers

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
ADAM = {"fp32", "exp_avg", "exp_avg_sq", "step"}


@dataclass(frozen=True)
class Case:
    """A training. `fp32` and `universal`: which of DeepSpeed's tools read the checkpoint."""

    ranks: int
    what: dict[str, Any] = field(default_factory=dict)
    fp32: bool = True
    universal: bool = True
    states: frozenset[str] = frozenset(ADAM)


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


def torch_optimizer(name: str, **options: Any) -> dict[str, Any]:
    return {"type": f"torch.{name}", "params": {"lr": 0.01, **options}}


CASES = {
    **{
        f"z{stage}_{kind}_{ranks}": Case(ranks, {"stage": stage, "dtype": kind})
        for stage in (1, 2, 3)
        for kind in ("fp32", "bf16")
        for ranks in (2, 3)
    },
    "z1_fp16": Case(2, {"dtype": "fp16", "config": {"fp16": {"initial_scale_power": 3}}}),
    "z2_fp16_static": Case(2, {"stage": 2, "dtype": "fp16", "config": {"fp16": {"loss_scale": 8}}}),
    "z3_fp16": Case(3, {"stage": 3, "dtype": "fp16", "config": {"fp16": {"initial_scale_power": 3}}}),
    # Every step overflowed: the optimizer has no state yet.
    "z3_fp16_never_stepped": Case(
        2, {"stage": 3, "dtype": "fp16"}, universal=False, states=frozenset({"fp32"})
    ),
    "z2_offload": Case(3, {"stage": 2, "config": zero(offload_optimizer={"device": "cpu"})}),
    "z3_offload": Case(
        2, {"stage": 3, "config": zero(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})}
    ),
    "z3_small_groups": Case(3, {"stage": 3, "config": zero(sub_group_size=60)}),
    "z2_round_robin": Case(3, {"stage": 2, "config": zero(round_robin_gradients=True)}),
    "z2_no_frozen": Case(3, {"stage": 2, "exclude_frozen": True}),
    "elastic": Case(3, {"config": zero(elastic_checkpoint=True)}, universal=False),
    "bf16_optimizer": Case(
        2, {"dtype": "bf16", "config": {"data_types": {"grad_accum_dtype": "fp32"}}}, fp32=False
    ),
    "sgd": Case(
        3,
        {"optimizer": torch_optimizer("SGD", momentum=0.9)},
        universal=False,
        states=frozenset({"fp32", "momentum_buffer"}),
    ),
    "z3_sgd": Case(
        3,
        {"stage": 3, "optimizer": torch_optimizer("SGD", momentum=0.9)},
        universal=False,
        states=frozenset({"fp32", "momentum_buffer"}),
    ),
    "z3_amsgrad": Case(
        3,
        {"stage": 3, "optimizer": torch_optimizer("Adam", amsgrad=True)},
        states=frozenset({*ADAM, "max_exp_avg_sq"}),
    ),
    "z2_adagrad": Case(
        3,
        {"stage": 2, "one_group": True, "optimizer": torch_optimizer("Adagrad")},
        universal=False,
        states=frozenset({"fp32", "sum", "step"}),
    ),
    "z2_rmsprop": Case(
        3,
        {"stage": 2, "optimizer": torch_optimizer("RMSprop", centered=True)},
        universal=False,
        states=frozenset({"fp32", "square_avg", "grad_avg", "step"}),
    ),
    "no_zero": Case(
        2, {"stage": 0, "train_all": True}, fp32=False, universal=False, states=frozenset(ADAM - {"fp32"})
    ),
    "no_zero_bf16": Case(2, {"stage": 0, "dtype": "bf16", "train_all": True}, fp32=False, universal=False),
    "tp": Case(2, {"model": "cut", "tp": 2}, fp32=False),
    "tp_dp_bf16": Case(4, {"model": "cut", "tp": 2, "dtype": "bf16"}, fp32=False),
    "tp_dp_z3": Case(4, {"model": "cut", "tp": 2, "stage": 3}, fp32=False),
    "tp_no_info": Case(2, {"model": "cut", "tp": 2, "info": False}, fp32=False, universal=False),
    "pp_dp": Case(4, {"model": "pipe", "pp": 2}, fp32=False),
    "pp_dp_bf16": Case(4, {"model": "pipe", "pp": 2, "dtype": "bf16"}, fp32=False),
    "pp_tp": Case(4, {"model": "pipe", "pp": 2, "tp": 2}, fp32=False),
    "moe_z2": Case(4, {"model": "moe", "experts": 4, "ep": 2, "stage": 2}, fp32=False, universal=False),
    "moe_z1_bf16": Case(
        4, {"model": "moe", "experts": 4, "ep": 4, "dtype": "bf16"}, fp32=False, universal=False
    ),
    "moe_data_first": Case(
        4,
        {
            "model": "moe",
            "experts": 4,
            "ep": 2,
            "config": {"use_data_before_expert_parallelism": True},
        },
        fp32=False,
        universal=False,
    ),
    "moe_no_zero": Case(
        4,
        {"model": "moe", "experts": 4, "ep": 2, "stage": 0},
        fp32=False,
        universal=False,
        states=frozenset(ADAM - {"fp32"}),
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints, and what DeepSpeed's tools make of them."""
    out = tmp_path_factory.mktemp("deepspeed")
    launches: dict[tuple[int, str], list[dict[str, Any]]] = {}
    possible = {name: case for name, case in CASES.items() if can_train(case)}
    for name, case in possible.items():
        # DeepSpeed keeps the groups of experts, and those of tensor parallelism, for the life of a process.
        model = case.what.get("model", "plain") + ("_first" if name == "moe_data_first" else "")
        launches.setdefault((case.ranks, model), []).append({"name": name, **case.what})
    for (ranks, _), cases in launches.items():
        script = HERE / "deepspeed_training.py"
        peers.run("deepspeed", script, out, json.dumps(cases), ranks=ranks, timeout=900)
    peers.run("deepspeed", HERE / "deepspeed_truth.py", *(out / name for name in possible), timeout=900)
    return out


def can_train(case: Case) -> bool:
    return case.what.get("dtype") != "fp16" or peers.deepspeed_has_fp16()


@pytest.fixture(autouse=True)
def only_possible(request: pytest.FixtureRequest) -> None:
    """The fixtures of `tests/universal` have a checkpoint in fp16, from a processor that can do it."""
    named = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if named is not None and not can_train(CASES[named]):
        pytest.skip("DeepSpeed does not train in fp16 on this processor")


def truth_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "truth.pt", weights_only=False)
    return found


def with_means(source: Source) -> dict[str, torch.Tensor]:
    """Every leaf, those that are means of several copies included."""
    found = by_name(source)
    for leaf in source.leaves:
        if leaf.terms:
            copies = [found[leaf.name], *(assembled(leaf, term) for term in leaf.terms)]
            found[leaf.name] = sum(copies[1:], copies[0]) / len(copies)
    for name, of in source.aliases.items():
        found[name] = found[of]
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name != "tp_no_info"])
def test_equal_to_the_tools_of_deepspeed(runs: Path, name: str) -> None:
    case, truth = CASES[name], truth_of(runs / name)
    assert {tool: tool not in truth["refused"] for tool in ("fp32", "universal")} == {
        "fp32": case.fp32,
        "universal": case.universal,
    }, truth["refused"]
    found = with_means(deepspeed.describe(runs / name))
    compared = 0
    for parameter, expected in truth["fp32"].items():
        tied = {"head.weight": "embed.weight"}.get(parameter, parameter)
        ours = found.get(f"optimizer.{tied}.fp32")
        if ours is None:
            ours = found[f"model.{parameter}"].float()
        assert_same(ours, expected.float(), parameter)
        compared += 1
    # DeepSpeed's own mappings are wrong with `round_robin_gradients`: its tools disagree with each other.
    wrong = name == "z2_round_robin"
    for parameter, states in () if wrong else truth["universal"].items():
        for state, expected in states.items():
            ours = found.get(f"optimizer.{parameter}.{state}")
            if ours is None:  # the tool copies frozen parameters and buffers, too
                assert state == "fp32"
                if parameter == "frozen" and case.what.get("tp"):
                    continue  # it takes the first rank's part for the whole
                ours = found[f"model.{parameter}"].float()
            assert_same(ours.reshape(expected.shape), expected, f"{parameter}.{state}")
            compared += 1
    assert compared > 10 or not (case.fp32 or case.universal)
    states = {leaf.rsplit(".", 1)[1] for leaf in found if leaf.startswith("optimizer.")}
    assert states == set(case.states)


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].what.get("tp")])
def test_equal_to_what_the_ranks_had_in_memory(runs: Path, name: str) -> None:
    what = CASES[name].what
    source = deepspeed.describe(runs / name)
    found = by_name(source)
    compared = 0
    for rank in range(CASES[name].ranks):
        live = torch.load(runs / name / f"live_{rank}.pt")
        for parameter, pieces in live["pieces"].items():
            if name == "z2_round_robin":
                break  # they follow the wrong mappings
            for state, (start, expected) in pieces.items():
                ours = found[f"optimizer.{known(parameter, rank, what)}.{state}"].flatten()
                assert_same(
                    ours[start : start + expected.numel()], expected.flatten(), f"{parameter}.{state}"
                )
                compared += 1
        for parameter, expected in live["weights"].items():
            if not (what.get("exclude_frozen") and parameter.startswith("frozen")):
                assert_same(found[f"model.{known(parameter, rank, what)}"], expected, parameter)
                compared += 1
    assert compared > 10
    for leaf, master in found.items():
        if leaf.endswith(".fp32"):  # the weight is the rounded master weight, whatever lies where
            weight = found[f"model.{leaf.removeprefix('optimizer.').removesuffix('.fp32')}"]
            assert_same(weight, master.to(weight.dtype), leaf)
    for leaf in source.leaves:
        for copy in leaf.copies:
            assert_same(assembled(leaf, copy), found[leaf.name], leaf.name)


def known(parameter: str, rank: int, what: Mapping[str, Any]) -> str:
    """What we call a parameter of this rank: experts are numbered through all ranks."""
    parts = parameter.split(".")
    if "deepspeed_experts" not in parts:
        return parameter
    ep, world = what["ep"], 4
    first = bool(what.get("config"))
    place = parts.index("deepspeed_experts") + 1
    expert_rank = rank // (world // ep) if first else rank % ep
    parts[place] = str(int(parts[place]) + expert_rank * (what["experts"] // ep))
    return ".".join(parts)


@pytest.mark.parametrize("name", list(CASES))
def test_degrees_and_values(runs: Path, name: str) -> None:
    case = CASES[name]
    source = deepspeed.describe(runs / name, spec_of_cut() if name == "tp_no_info" else None)
    tp, pp = case.what.get("tp", 1), case.what.get("pp", 1)
    assert source.step == 3
    assert source.facts["zero stage"] == str(case.what.get("stage", 1))
    assert source.facts["data parallel"] == str(case.ranks // tp // pp)
    assert source.facts.get("tensor parallel", "1") == str(tp)
    assert source.facts.get("pipeline parallel", "1") == str(pp)
    assert source.facts.get("expert parallel", "1") == str(case.what.get("ep", 1))
    assert source.values["note"] == "hello"
    assert source.values["nested.a"] == 1.5
    assert isinstance(source.values["lr_scheduler.last_batch_iteration"], int)
    groups: Any = source.values.get("optimizer.param_groups")
    if name != "elastic":  # it stores none
        assert groups[0]["lr"] >= 0
    if name != "elastic" and case.what.get("stage") != 3:
        named = {parameter for group in groups for parameter in group["params"]}
        assert {f"model.{parameter}" for parameter in named} <= {leaf.name for leaf in source.leaves}


def spec_of_cut() -> Spec:
    """What `universal_checkpoint_info` says of the model, by hand."""
    return Spec(
        [
            rule("embed.weight", shard(0), pad(0, 7)),
            rule("attention.qkv.weight", fused(0, [6, 2, 2])),
            rule("mlp.gate_up.weight", fused(0, 2)),
            rule("mlp.down.weight", shard(1)),
            rule("router.weight", partial("mean")),
            rule("re:norm.weight|mlp.down.bias|table", replicated()),
            rule("*", shard(0)),
        ]
    )


def test_without_info_tensor_parallel_needs_a_spec(runs: Path) -> None:
    with pytest.raises(SpecError, match="--spec"):
        deepspeed.describe(runs / "tp_no_info")
    found = with_means(deepspeed.describe(runs / "tp_no_info", spec_of_cut()))
    same = with_means(deepspeed.describe(runs / "tp"))
    assert found.keys() == same.keys()
    for name, expected in same.items():
        assert_same(found[name], expected, name)


def test_a_spec_overrides_the_info_of_the_files(runs: Path) -> None:
    spec = Spec([rule("norm.weight", shard(0))]) + spec_of_cut()
    found = by_name(deepspeed.describe(runs / "tp", spec))
    assert found["model.norm.weight"].shape == (10,)
