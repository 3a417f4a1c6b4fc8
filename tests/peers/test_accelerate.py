"""`integrations.accelerate` with the real accelerate: what its users do, and resuming bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.processes import peers

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("accelerate_training.py")
EXAMPLE = peers.PROJECT / "examples" / "accelerate_training.py"
SECONDS = 390.0


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**peers.with_everystep(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, env: dict[str, str]) -> None:
    kills = (2, 4, 5, 10, 14)  # batches: 5 and 10 are the ends of epochs, and 5 is in the middle of a step
    output = peers.run("transformers", SCRIPT, "exact", tmp_path, *map(str, kills), env=env, timeout=SECONDS)
    whole, *resumed = reports(output)
    assert whole["batches"] == 15, output
    assert resumed == [whole] * len(kills), output


def train(env: dict[str, str], *arguments: Any, ranks: int = 2, dies: bool = False) -> list[dict[str, Any]]:
    said = peers.run("transformers", SCRIPT, *arguments, ranks=ranks, env=env, dies=dies, timeout=SECONDS)
    return sorted(reports(said), key=lambda report: report["rank"])


@pytest.mark.timeout(1200)
def test_a_lost_rank_changes_no_bit(tmp_path: Path, env: dict[str, str]) -> None:
    whole = train(env, "train", tmp_path / "whole")
    assert [report["batches"] for report in whole] == [15, 15]
    assert whole[0]["random"] != whole[1]["random"]  # random numbers are each rank's own
    assert train(env, "train", tmp_path / "killed", "8", dies=True) == []
    assert train(env, "train", tmp_path / "killed") == whole


@pytest.mark.timeout(1200)
def test_fsdp2_resumes_exactly_and_on_another_number_of_ranks(tmp_path: Path, env: dict[str, str]) -> None:
    sharded = {**env, "LAYOUT": "fsdp2"}
    whole = train(sharded, "train", tmp_path / "whole")
    assert [report["layout"] for report in whole] == ["DistributedType.FSDP"] * 2
    assert whole[0]["weights"] != whole[1]["weights"]  # each has its own part
    assert train(sharded, "train", tmp_path / "killed", "8", dies=True) == []
    assert train(sharded, "train", tmp_path / "killed") == whole
    said = peers.run("transformers", SCRIPT, "together", tmp_path, ranks=2, env=sharded, timeout=SECONDS)
    assert said.count("together: ok") == 2, said
    for ranks in (1, 3):
        found = train(sharded, "restored", tmp_path / "whole", ranks=ranks)
        assert [report["batches"] for report in found] == [15] * ranks
        assert {report["whole"] for report in found} == {whole[0]["whole"]}
        assert {report["average"] for report in found} == {whole[0]["average"]}


KINDS = ("plain", "seedable", "generator", "workers", "iterable")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_loader_goes_on_inside_of_its_epoch(
    tmp_path: Path, env: dict[str, str], kind: str
) -> None:
    kills = (4, 10, 19)  # batches: inside of an epoch, at its end, before its last batch
    arguments = ["loader", tmp_path, *map(str, kills)]
    output = peers.run("transformers", SCRIPT, *arguments, env={**env, "KIND": kind}, timeout=SECONDS)
    whole, *resumed = reports(output)
    assert len(whole["seen"]) == 25, output
    assert resumed == [whole] * len(kills), output


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["plain", "seedable"])
def test_prepared_loaders_of_several_ranks(tmp_path: Path, env: dict[str, str], kind: str) -> None:
    kinds = {**env, "KIND": kind}
    whole = train(kinds, "loader-train", tmp_path / "whole")
    assert whole[0]["seen"] != whole[1]["seen"]
    assert train(kinds, "loader-train", tmp_path / "killed", "14", dies=True) == []
    assert train(kinds, "loader-train", tmp_path / "killed") == whole


def test_an_epoch_that_is_not_continued_is_reported(tmp_path: Path, env: dict[str, str]) -> None:
    output = peers.run("transformers", SCRIPT, "loader-told", tmp_path, env=env, timeout=SECONDS)
    assert "told: function" in output, output
    assert "told: none" in output, output
    assert "told: late" in output, output


def test_single_saves_and_what_does_not_fit(tmp_path: Path, env: dict[str, str]) -> None:
    assert "own: ok" in peers.run("transformers", SCRIPT, "own", tmp_path / "own", env=env, timeout=SECONDS)


def test_save_state_and_load_state_with_accelerates_names(tmp_path: Path, env: dict[str, str]) -> None:
    said = peers.run("transformers", SCRIPT, "folders", tmp_path / "folders", env=env, timeout=SECONDS)
    assert "folders: ok" in said, said


@pytest.mark.timeout(1200)
def test_the_example_passes_the_drill(tmp_path: Path, env: dict[str, str]) -> None:
    command = ["-m", "everystep.cli", "drill", "--times", "2", "--workdir", tmp_path / "drill", "--"]
    python = peers.interpreter("transformers")
    output = peers.run("transformers", *command, python, EXAMPLE, env=env, cwd=tmp_path, timeout=900)
    assert "32 checkpoints seen in both, all equal" in output, output
