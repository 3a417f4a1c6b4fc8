"""Checkpoints that Megatron-Core writes: what we read is bit for bit what Megatron-Core reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import everystep
from everystep import universal
from support.foreign.megatron_core_names import our_names
from support.processes import peers

PROGRAM = Path(__file__).parent / "megatron_core_training.py"


def train(out: Path, form: str, tp: int) -> dict[str, torch.Tensor]:
    """Every tensor, as Megatron-Core loads it."""
    peers.run("megatron-core", PROGRAM, out, form, str(tp), ranks=2, timeout=120)
    whole = torch.load(out / "whole.pt")
    return {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}


@pytest.mark.peers
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_and_moments_equal_those_that_megatron_loads(tmp_path: Path, tp: int) -> None:
    whole = train(tmp_path / "run", "fully_reshardable", tp)
    truth = {ours: part for name, tensor in whole.items() for ours, part in our_names(name, tensor).items()}
    done = universal.convert(tmp_path / "run", tmp_path / "out", verify=True)
    assert (done.kind, done.step, done.leaves) == ("megatron-core", 7, len(truth))
    state = everystep.load(tmp_path / "out")
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, kinds in state["optimizer"]["state"].items():
        found |= {f"optimizer.{name}.{kind}": value for kind, value in kinds.items()}
    assert set(found) == set(truth)
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
    if tp == 1:
        model = torch.load(tmp_path / "run" / "model.pt")
        named = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
        assert len(named) == len(state["model"]) == 20
        for name in (
            "decoder.layers.1.mlp.linear_fc1.weight",
            "decoder.layers.0.self_attention.linear_qkv.weight",
        ):
            assert torch.equal(state["model"][name], named[name])


@pytest.mark.peers
@pytest.mark.timeout(300)
def test_buckets_of_the_distributed_optimizer_are_left_out_and_reported(tmp_path: Path) -> None:
    train(tmp_path / "run", "dp_reshardable", 1)
    source = universal.describe(tmp_path / "run")
    assert "not read" in source.facts["optimizer state"]
    assert all(leaf.name.startswith("model.") for leaf in source.leaves)
