"""`holdfast.lightning` with the real Lightning: what its users do, and resuming bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import peers

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("lightning_training.py")
EXAMPLE = peers.PROJECT / "examples" / "lightning_training.py"
SECONDS = 390.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_holdfast(tmp_path / "site")


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = (1, 4, 5, 7, 10, 14)  # 5 and 10 are the ends of epochs
    output = peers.run("transformers", SCRIPT, "exact", tmp_path, *map(str, kills), env=env, timeout=SECONDS)
    whole, *resumed = reports(output)
    assert (whole["step"], whole["epoch"]) == (15, 3), output
    assert resumed == [whole] * len(kills), output


@pytest.mark.timeout(1200)
def test_a_lost_rank_changes_no_bit(tmp_path: Path, env: dict[str, str]) -> None:
    def train(run: str, *rest: str, dies: bool = False) -> list[dict[str, Any]]:
        output = peers.run(
            "transformers",
            SCRIPT,
            "train",
            tmp_path / run,
            *rest,
            ranks=2,
            env=env,
            dies=dies,
            timeout=SECONDS,
        )
        return sorted(reports(output), key=lambda report: report["rank"])

    whole = train("whole")
    assert [report["step"] for report in whole] == [15, 15]
    assert whole[0]["digest"] != whole[1]["digest"]  # random numbers are each rank's own
    assert train("killed", "8", dies=True) == []
    assert train("killed") == whole


def test_lightnings_own_checkpoints_go_through_holdfast(tmp_path: Path, env: dict[str, str]) -> None:
    assert "io: ok" in peers.run("transformers", SCRIPT, "io", tmp_path / "io", env=env, timeout=SECONDS)


@pytest.mark.timeout(1200)
def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    command = ["-m", "holdfast.cli", "drill", "--times", "3", "--workdir", tmp_path / "drill", "--"]
    python = peers.interpreter("transformers")
    output = peers.run("transformers", *command, python, EXAMPLE, env=env, cwd=tmp_path, timeout=900)
    assert "32 checkpoints seen in both, all equal" in output, output
