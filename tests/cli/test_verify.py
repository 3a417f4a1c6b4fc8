"""``everystep verify``."""

from __future__ import annotations

from pathlib import Path

import everystep
from support.processes.command import (
    SHARD,
    TWO_FILES,
    command,
    damage_leaf,
    damage_manifest,
    make_run,
    make_state,
    step_path,
    truncate,
)


def test_an_intact_checkpoint(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", make_state())
    outcome = command("verify", tmp_path / "one")
    assert outcome.code == 0
    assert outcome.lines[0].startswith("intact one 2 leaves,")


def test_of_a_run_every_checkpoint_is_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2, 3])
    damage_leaf(step_path(run, 1), "model.b")
    outcome = command("verify", run)
    assert outcome.code == 1
    assert [line.split()[0] for line in outcome.lines if line.split()[0] in ("intact", "DAMAGED")] == [
        "DAMAGED",
        "intact",
        "intact",
    ]
    assert "1 of 3 checkpoints damaged" in outcome.out


def test_damage_names_file_and_leaf(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    damage_leaf(step_path(run, 1), "model.b")
    outcome = command("verify", run)
    assert str(step_path(run, 1) / SHARD) in outcome.out
    assert "'model.b'" in outcome.out


def test_json_lists_problems(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2, 3, 4])
    damage_leaf(step_path(run, 1), "model.w")
    damage_manifest(step_path(run, 2))
    truncate(step_path(run, 3))
    (step_path(run, 4) / "stranger.txt").write_text("hello")
    outcome = command("verify", run, "--json")
    assert outcome.code == 1
    document = outcome.document
    assert set(document) == {"path", "intact", "checkpoints"}
    assert document["intact"] is False
    one, two, three, four = document["checkpoints"]
    assert set(one) == {
        "path",
        "step",
        "intact",
        "leaves",
        "nbytes",
        "files",
        "problems",
        "strangers",
        "instead",
    }
    assert (one["step"], one["intact"]) == (1, False)
    (problem,) = one["problems"]
    assert (problem["file"], problem["leaf"]) == (str(step_path(run, 1) / SHARD), "model.w")
    assert "checksum" in problem["reason"]
    assert two["problems"][0]["file"] == str(step_path(run, 2) / SHARD)
    assert "bytes" in three["problems"][0]["reason"]
    assert (four["intact"], four["strangers"]) == (True, ["stranger.txt"])


def test_a_missing_manifest_in_a_run_is_damage_of_that_checkpoint_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2], TWO_FILES)
    (step_path(run, 1) / "manifest.json").unlink()
    document = command("verify", run, "--json").document
    assert [item["intact"] for item in document["checkpoints"]] == [False, True]
    assert "no manifest" in document["checkpoints"][0]["problems"][0]["reason"]


def test_a_missing_shard_names_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1], TWO_FILES)
    (step_path(run, 1) / SHARD).unlink()
    (problem,) = command("verify", run, "--json").document["checkpoints"][0]["problems"]
    assert problem["file"] == str(step_path(run, 1) / SHARD)
    assert "missing" in problem["reason"]


def test_an_empty_directory_is_not_intact(tmp_path: Path) -> None:
    assert command("verify", tmp_path).code == 1
