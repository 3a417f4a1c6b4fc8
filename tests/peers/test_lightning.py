"""`everystep.integrations.lightning` with the real Lightning: what its users do, and resuming bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.processes import peers

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("lightning_training.py")
EXAMPLE = peers.PROJECT / "examples" / "lightning_training.py"
SECONDS = 390.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_everystep(tmp_path / "site")


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = (1, 4, 5, 7, 10, 14)  # 5 and 10 are the ends of epochs
    output = peers.run("transformers", SCRIPT, "exact", tmp_path, *map(str, kills), env=env, timeout=SECONDS)
    whole, *resumed = reports(output)
    assert (whole["step"], whole["epoch"]) == (15, 3), output
    assert resumed == [whole] * len(kills), output


def train(env: dict[str, str], *arguments: Any, ranks: int = 2, dies: bool = False) -> list[dict[str, Any]]:
    said = peers.run("transformers", SCRIPT, *arguments, ranks=ranks, env=env, dies=dies, timeout=SECONDS)
    return sorted(reports(said), key=lambda report: report["rank"])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("", "DDPStrategy"), ("fsdp2", "ModelParallelStrategy"), ("fsdp1", "OnCPU")],
)
def test_a_lost_rank_changes_no_bit(tmp_path: Path, env: dict[str, str], layout: str, strategy: str) -> None:
    here = {**env, "LAYOUT": layout}
    whole = train(here, "train", tmp_path / "whole")
    assert [(report["step"], report["strategy"]) for report in whole] == [(15, strategy)] * 2
    assert whole[0]["digest"] != whole[1]["digest"]  # random numbers are each rank's own
    assert train(here, "train", tmp_path / "killed", "8", dies=True) == []
    assert train(here, "train", tmp_path / "killed") == whole
    if layout == "fsdp2":
        found = [train(here, "restored", tmp_path / "whole", ranks=ranks) for ranks in (1, 2, 3)]
        assert [len(ranks) for ranks in found] == [1, 2, 3]
        assert len({(report["step"], report["whole"]) for ranks in found for report in ranks}) == 1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["", "fsdp2"])
def test_fabric_resumes_exactly(tmp_path: Path, env: dict[str, str], layout: str) -> None:
    here = {**env, "LAYOUT": layout}
    whole = train(here, "fabric", tmp_path / "whole")
    assert [report["step"] for report in whole] == [15, 15]
    assert train(here, "fabric", tmp_path / "killed", "8", dies=True) == []
    assert train(here, "fabric", tmp_path / "killed") == whole


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_a_sharded_strategy_saves_through_everystep(tmp_path: Path, env: dict[str, str], layout: str) -> None:
    here = {**env, "LAYOUT": layout}
    said = peers.run("transformers", SCRIPT, "sharded", tmp_path, ranks=2, env=here, timeout=SECONDS)
    assert said.count("sharded: ok") == 2, said


def test_a_kill_inside_of_a_save_leaves_the_older_one(tmp_path: Path, env: dict[str, str]) -> None:
    said = peers.run("transformers", SCRIPT, "killed", tmp_path, env=env, timeout=SECONDS)
    assert "killed: ok" in said, said


def test_lightnings_own_checkpoints_go_through_everystep(tmp_path: Path, env: dict[str, str]) -> None:
    assert "io: ok" in peers.run("transformers", SCRIPT, "io", tmp_path / "io", env=env, timeout=SECONDS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("script", "steps"), [([EXAMPLE], 32), ([SCRIPT, "fabric", "run"], 15)])
def test_the_example_and_a_loop_with_fabric_pass_the_drill(
    tmp_path: Path, env: dict[str, str], script: list[Any], steps: int
) -> None:
    command = ["-m", "everystep.cli", "drill", "--times", "3", "--workdir", tmp_path / "drill", "--"]
    python = peers.interpreter("transformers")
    output = peers.run("transformers", *command, python, *script, env=env, cwd=tmp_path, timeout=900)
    assert f"{steps} checkpoints seen in both, all equal" in output, output
