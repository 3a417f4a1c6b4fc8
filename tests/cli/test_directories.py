"""``ls``, ``verify`` and ``prune`` on directories that are no plain run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import everystep
from support.processes.command import command, damage_leaf, damage_manifest, make_run, run_names, step_path


@pytest.fixture
def named(tmp_path: Path) -> Path:
    for number in (1, 2, 10):
        everystep.save(tmp_path / "named" / f"epoch-{number}", {"w": np.full(3, number)}, step=number * 100)
    return tmp_path / "named"


def test_checkpoints_of_other_names_are_listed_as_people_sort_them(named: Path) -> None:
    outcome = command("ls", named)
    assert outcome.code == 0
    assert [line.split()[:2] for line in outcome.lines[2:5]] == [
        ["epoch-1", "100"],
        ["epoch-2", "200"],
        ["epoch-10", "1000"],
    ]


def test_verify_reads_checkpoints_of_other_names(named: Path) -> None:
    outcome = command("verify", named)
    assert (outcome.code, outcome.lines[-1].split(":")[0]) == (0, "3 checkpoints intact")
    damage_leaf(named / "epoch-2", "w")
    outcome = command("verify", named)
    assert outcome.code == 1
    assert "DAMAGED epoch-2 1 problem" in outcome.lines


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """What a Trainer of transformers leaves in its ``output_dir``, as far as names matter."""
    state = {"w": np.ones(3, np.float32)}
    source = everystep.save(tmp_path / "source", state).path
    for step in (9, 10, 20):
        folder = tmp_path / "outputs" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        everystep.inspect.export(source, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    (tmp_path / "outputs" / "runs").mkdir()
    (tmp_path / "outputs" / "notes.txt").write_text("hello")
    return tmp_path / "outputs"


def test_a_directory_of_other_systems_checkpoints_names_them(outputs: Path, tmp_path: Path) -> None:
    names = "checkpoint-9, checkpoint-10, checkpoint-20"
    advice = f"Name one of them, such as {outputs / 'checkpoint-20'}"
    page, target = tmp_path / "page.html", tmp_path / "target"
    for arguments in (
        ("show", outputs),
        ("verify", outputs),
        ("diff", outputs, outputs),
        ("convert", outputs, target),
        ("export", outputs, tmp_path / "a.safetensors"),
        ("view", outputs, "--out", page),
    ):
        outcome = command(*arguments)
        assert outcome.code == 1
        assert f"holds 3 of other systems: {names}. {advice}" in outcome.err
    listed = command("ls", outputs)
    assert listed.code == 0
    assert f"but 3 of other systems: {names}" in listed.out
    assert command("ls", outputs, "--json").document["others"] == names.split(", ")
    with pytest.raises(everystep.CheckpointNotFound, match="checkpoint-9, checkpoint-10, checkpoint-20"):
        everystep.load(outputs)
    with (
        everystep.Checkpointer(tmp_path / "run", {"model": {"w": np.zeros(3)}}, mode="sync") as checkpointer,
        pytest.raises(everystep.CheckpointNotFound, match="checkpoint-9, checkpoint-10, checkpoint-20"),
    ):
        checkpointer.restore(init_from=outputs)
    assert not page.exists()
    assert not target.exists()


def test_a_damaged_one_is_called_by_its_name(named: Path) -> None:
    damage_manifest(named / "epoch-10")
    outcome = command("ls", named)
    assert outcome.code == 1
    assert "damaged: epoch-10." in outcome.out


def test_directories_of_other_programs_are_no_checkpoints(named: Path) -> None:
    (named / "web").mkdir()
    (named / "web" / "manifest.json").write_text('{"name": "app"}')
    assert len(command("ls", named, "--json").document["checkpoints"]) == 3
    assert command("verify", named).code == 0


def test_prune_leaves_checkpoints_of_other_names_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (1, 2, 3))
    everystep.save(run / "best", {"w": np.ones(1)}, step=1)
    document = command("prune", run, "--last", "1", "--json").document
    assert [item["step"] for item in document["removed"]] == [1, 2]
    assert run_names(run) == ["best", "step-000000000003"]
    assert [line.split()[0] for line in command("ls", run).lines[2:4]] == ["step-000000000003", "best"]


def test_a_directory_above_runs_lists_the_runs(tmp_path: Path) -> None:
    for name in ("b", "a", "sweep/lr-1", ".hidden/c", "a/inner"):
        make_run(tmp_path / "runs" / name, (1, 2))
    outcome = command("ls", tmp_path)
    assert outcome.code == 0
    assert [line.split()[:3] for line in outcome.lines[2:5]] == [
        ["runs/a", "2", "2"],
        ["runs/b", "2", "2"],
        ["runs/sweep/lr-1", "2", "2"],
    ]
    assert outcome.lines[-1].startswith("3 runs, 6 checkpoints, ")
    first = command("ls", tmp_path / "runs", "--json").document["runs"][0]
    assert (first["path"], first["checkpoints"], first["newest"]["step"]) == (str(tmp_path / "runs/a"), 2, 2)


def test_a_checkpoint_beside_runs_does_not_hide_them(named: Path) -> None:
    make_run(named.parent / "named" / "run", (1, 2))
    outcome = command("ls", named)
    assert [line.split()[0] for line in outcome.lines if line.startswith(("epoch", "run "))] == [
        *("epoch-1", "epoch-2", "epoch-10"),
        *("run", "run"),
    ]
    assert "3 checkpoints, 24.0 KiB" in outcome.lines
    assert len(command("verify", named, "--json").document["checkpoints"]) == 5


def test_verify_reads_all_runs_below(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, (1, 2))
    damage_leaf(step_path(tmp_path / "b", 1), "model.w")
    outcome = command("verify", tmp_path)
    assert outcome.code == 1
    assert "intact a/step-000000000001 2 leaves, 8.0 KiB" in outcome.lines
    assert "DAMAGED b/step-000000000001 1 problem" in outcome.lines
    assert outcome.lines[-1] == "1 of 4 checkpoints damaged"


def test_prune_of_a_directory_above_runs_removes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "a", (1, 2, 3, 4, 5))
    outcome = command("prune", tmp_path)
    assert outcome.code == 1
    assert "there are runs below it" in outcome.err
    assert len(run_names(tmp_path / "a")) == 5
    assert not (tmp_path / ".lock").exists()


def test_without_a_path_ls_lists_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run(tmp_path / "run", (1,)))
    assert "1 checkpoint, " in command("ls").out


def test_a_checkpoint_of_another_system_is_pointed_out(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"w": np.ones(3)})
    command("export", tmp_path / "one", tmp_path / "hf.safetensors")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf.safetensors").rename(tmp_path / "hf" / "model.safetensors")
    assert "is a checkpoint of another system" in command("ls", tmp_path / "hf").out


def test_a_directory_above_runs_is_no_checkpoint_but_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, (1,))
    for name in ("show", "stats"):
        outcome = command(name, tmp_path)
        assert outcome.code == 1
        assert f"{tmp_path}/a" in outcome.err
    assert "a, b" in command("show", tmp_path).err


def test_stats_of_checkpoints_without_a_training_says_why_there_is_nothing(named: Path) -> None:
    assert "that no Checkpointer made" in command("stats", named).err


@pytest.mark.parametrize("name", ["ls", "stats", "prune"])
def test_a_file_is_not_called_a_missing_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    outcome = command(name, tmp_path / "notes.txt")
    assert outcome.code == 1
    assert "notes.txt is a file, not a run" in outcome.err
    assert "there is no run at" in command(name, tmp_path / "nothing").err


def test_a_step_of_a_directory_above_runs_names_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a", (30,))
    outcome = command("show", f"{tmp_path}/runs@30")
    assert outcome.code == 1
    assert f"holds runs: name one of them, such as {run}" in outcome.err


def test_show_of_a_shelf_and_of_an_empty_file_says_what_they_are(tmp_path: Path) -> None:
    with everystep.Shelf(tmp_path / "s.shelf") as shelf:
        shelf.n = 1
    assert "Found a shelf, which `everystep shelf ls` lists" in command("show", tmp_path / "s.shelf").err
    (tmp_path / "empty").touch()
    assert "Found an empty file" in command("show", tmp_path / "empty").err
