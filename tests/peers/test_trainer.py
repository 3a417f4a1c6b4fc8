"""`integrations.transformers` with the real Trainer: what its users do, and resuming bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.processes import peers

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("transformers_training.py")
EXAMPLE = peers.PROJECT / "examples" / "transformers_training.py"
SECONDS = 390.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**peers.with_everystep(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = (1, 4, 5, 7, 10, 14)  # 4 is a checkpoint of Trainer's, 5 and 10 are the ends of epochs
    output = peers.run("transformers", SCRIPT, "exact", tmp_path, *map(str, kills), env=env, timeout=SECONDS)
    whole, *resumed = reports(output)
    assert whole["step"] == 15, output
    assert resumed == [whole] * len(kills), output


def train(env: dict[str, str], *arguments: Any, ranks: int = 2, dies: bool = False) -> list[dict[str, Any]]:
    said = peers.run("transformers", SCRIPT, *arguments, ranks=ranks, env=env, dies=dies, timeout=SECONDS)
    return sorted(reports(said), key=lambda report: report["rank"])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["", "fsdp2", "loaded"])
def test_a_lost_rank_changes_no_bit(tmp_path: Path, env: dict[str, str], layout: str) -> None:
    here = {**env, "LAYOUT": layout}
    whole = train(here, "train", tmp_path / "whole")
    assert [report["step"] for report in whole] == [15, 15]
    assert {report["sharded"] for report in whole} == {"DTensor" if layout else "Parameter"}
    assert whole[0]["random"] != whole[1]["random"]  # random numbers are each rank's own
    assert train(here, "train", tmp_path / "killed", "8", dies=True) == []
    assert train(here, "train", tmp_path / "killed") == whole
    if layout:
        found = [train(here, "restored", tmp_path / "whole", ranks=ranks) for ranks in (1, 2, 3)]
        assert [len(ranks) for ranks in found] == [1, 2, 3]
        assert len({(report["step"], report["whole"]) for ranks in found for report in ranks}) == 1


def test_trainers_own_checkpoints_of_a_sharded_model(tmp_path: Path, env: dict[str, str]) -> None:
    here = {**env, "LAYOUT": "fsdp2"}
    said = peers.run("transformers", SCRIPT, "sharded", tmp_path, ranks=2, env=here, timeout=SECONDS)
    assert said.count("sharded: ok") == 2, said


def test_trainers_own_checkpoints_go_through_everystep(tmp_path: Path, env: dict[str, str]) -> None:
    assert "own: ok" in peers.run("transformers", SCRIPT, "own", tmp_path / "own", env=env, timeout=SECONDS)


@pytest.mark.timeout(1200)
def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    command = ["-m", "everystep.cli", "drill", "--times", "2", "--workdir", tmp_path / "drill", "--"]
    python = peers.interpreter("transformers")
    output = peers.run("transformers", *command, python, EXAMPLE, env=env, cwd=tmp_path, timeout=900)
    assert "32 checkpoints seen in both, all equal" in output, output
