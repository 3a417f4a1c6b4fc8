"""`integrations.chainer` with the real Chainer: its extension, its serializer, and resuming bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.processes import peers

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("chainer_training.py")
EXAMPLE = peers.PROJECT / "examples" / "chainer_training.py"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return peers.with_everystep(tmp_path / "site")


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = (1, 4, 5, 7, 10, 14)  # 5 and 10 are the ends of epochs
    output = peers.run("chainer", SCRIPT, "exact", tmp_path, *map(str, kills), env=env)
    whole, *resumed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert (whole["iteration"], whole["epoch"], len(whole["losses"])) == (15, 3, 5), output
    assert resumed == [whole] * len(kills), output


def test_the_serializer_takes_any_object_and_names_what_does_not_fit(
    tmp_path: Path, env: dict[str, str]
) -> None:
    assert "objects: ok" in peers.run("chainer", SCRIPT, "objects", tmp_path, env=env)


@pytest.mark.timeout(1200)
def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    output = peers.drill("chainer", EXAMPLE, tmp_path, env)
    assert "32 checkpoints seen in both, all equal" in output, output
