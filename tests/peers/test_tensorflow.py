"""`integrations.tensorflow` with the real TensorFlow: a training loop, object trees, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.processes import peers

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("tensorflow_training.py")
EXAMPLE = peers.PROJECT / "examples" / "tensorflow_training.py"
SECONDS = 900.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_everystep(tmp_path / "site")


def test_a_resumed_loop_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = ("1", "5", "7", "11")
    output = peers.run("tensorflow", SCRIPT, "exact", tmp_path, *kills, env=env, timeout=SECONDS)
    whole, *resumed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert whole["step"] == 12, output
    assert resumed == [whole] * len(kills), output


def test_object_trees_come_back_as_they_were(tmp_path: Path, env: dict[str, str]) -> None:
    output = peers.run("tensorflow", SCRIPT, "objects", tmp_path, env=env, timeout=SECONDS)
    assert "objects: ok" in output


def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    output = peers.drill("tensorflow", EXAMPLE, tmp_path, env)
    assert "32 checkpoints seen in both, all equal" in output, output
