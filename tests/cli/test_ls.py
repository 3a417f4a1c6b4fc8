"""``everystep ls``."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import everystep
from support.processes.command import (
    SHARD,
    TWO_FILES,
    command,
    damage_leaf,
    damage_manifest,
    make_run,
    step_path,
    truncate,
)


def test_lists_checkpoints_in_order_of_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [10, 9, 100])
    outcome = command("ls", run)
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.lines[2:5]] == ["9", "10", "100"]
    assert outcome.lines[2].endswith("loss 1.1111")
    assert "3 checkpoints" in outcome.out


def test_json_holds_every_fact(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    document = command("ls", run, "--json").document
    keys = ("path", "checkpoints", "runs", "others", "leftovers", "nbytes", "damaged", "unreadable")
    assert set(document) == set(keys)
    assert document["path"] == str(run)
    first, second = document["checkpoints"]
    files = list(step_path(run, 1).iterdir())
    assert first["nbytes"] == sum(file.stat().st_size for file in files)
    assert first["created"] <= second["created"]
    del first["created"], first["nbytes"]
    assert first == {
        "name": "step-000000000001",
        "path": str(step_path(run, 1)),
        "step": 1,
        "leaves": 2,
        "metrics": {"loss": 10.0},
        "damage": None,
    }
    assert document["leftovers"] == document["damaged"] == document["unreadable"] == []


def test_metrics_that_are_no_json_numbers_are_text(tmp_path: Path) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"w": np.zeros(1)}, mode="sync") as checkpointer:
        checkpointer.save(1, metrics={"loss": math.nan, "norm": math.inf})
    (entry,) = command("ls", tmp_path / "run", "--json").document["checkpoints"]
    assert entry["metrics"] == {"loss": "nan", "norm": "inf"}


def test_damaged_checkpoints_are_flagged_and_exit_with_1(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2, 3, 4])
    damage_manifest(step_path(run, 1))
    truncate(step_path(run, 2))
    (step_path(run, 3) / SHARD).unlink()
    outcome = command("ls", run)
    assert outcome.code == 1
    assert "damaged: step 1, step 2, step 3." in outcome.out
    document = command("ls", run, "--json").document
    damages = [entry["damage"] for entry in document["checkpoints"]]
    assert "digest" in damages[0]
    assert "bytes instead of" in damages[1]
    assert "is missing" in damages[2]
    assert damages[3] is None
    assert document["damaged"] == [str(step_path(run, step)) for step in (1, 2, 3)]


def test_does_not_read_arrays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    damage_leaf(step_path(run, 1), "model.w")
    assert command("ls", run).code == 0


def test_a_step_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2], TWO_FILES)
    (step_path(run, 2) / "manifest.json").unlink()
    document = command("ls", run, "--json").document
    assert document["checkpoints"][1]["step"] == 2
    assert "no manifest" in document["checkpoints"][1]["damage"]


def test_leftovers_are_mentioned_and_are_no_problem(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    shutil.copytree(step_path(run, 2), run / "step-000000000003.partial")
    shutil.copytree(step_path(run, 1), run / "step-000000000000.retired")
    (run / "notes.partial").mkdir()
    outcome = command("ls", run)
    assert outcome.code == 0
    assert "step-000000000003.partial" in outcome.out
    assert "notes" not in outcome.out
    document = command("ls", run, "--json").document
    assert [(item["kind"], item["nbytes"] > 0) for item in document["leftovers"]] == [
        ("retired", True),
        ("partial", True),
    ]
    assert len(document["checkpoints"]) == 2


@pytest.mark.parametrize("end", ["partial", "retired"])
def test_what_is_not_committed_is_refused_as_by_show_and_verify(end: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    leftover = run / f"step-000000000003.{end}"
    shutil.copytree(step_path(run, 1), leftover)
    for name in ("ls", "show", "verify"):
        outcome = command(name, leftover, "--json")
        assert outcome.code == 1
        assert "not a committed checkpoint" in outcome.document["error"]["message"]


def test_an_empty_directory_has_no_checkpoints(tmp_path: Path) -> None:
    outcome = command("ls", tmp_path)
    assert outcome.code == 0
    assert "no checkpoints" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_a_single_checkpoint_lists_itself(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"w": np.zeros(3)}, step=7)
    document = command("ls", tmp_path / "one", "--json").document
    assert [entry["step"] for entry in document["checkpoints"]] == [7]


@pytest.mark.parametrize("columns", ["0", "1", "20", "40", "50", "60", "80"])
def test_however_narrow_the_terminal_nothing_is_lost(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", [1, 123456789])
    truncate(step_path(run, 1))
    monkeypatch.setenv("COLUMNS", columns)
    outcome = command("ls", run)
    assert outcome.code == 1
    rows = [line for line in outcome.lines if line.startswith("123456789 ")]
    assert "ago 2 8.0 KiB loss" in " ".join(rows).replace("123456789 loss", "loss")
    assert "damaged:" in outcome.out


def test_a_name_with_terminal_commands_is_shown_escaped(tmp_path: Path) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"w": np.zeros(1)}, mode="sync") as checkpointer:
        checkpointer.save(1, metrics={"a\x1b[2Jb": 1.0})
    outcome = command("ls", tmp_path / "run")
    assert "\x1b" not in outcome.out
    assert "a\\x1b[2Jb" in outcome.out


@pytest.mark.parametrize("columns", ["40", "60", "70", "75"])
def test_a_narrow_terminal_keeps_a_metric_on_one_line(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"w": np.zeros(1)}, mode="sync") as checkpointer:
        checkpointer.save(1, metrics={"loss": 10.837, "accuracy": 0.5, "rate": 1.25e-05})
    monkeypatch.setenv("COLUMNS", columns)
    out = command("ls", tmp_path / "run").out
    for metric in ("loss 10.837", "accuracy 0.5", "rate 1.25e-05"):
        assert metric in out
