"""Short names of a run's checkpoints, wherever a path is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import inspect, universal
from support.processes.command import command, make_run, make_state, step_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "a", (10, 20, 30))


@pytest.mark.parametrize(("name", "step"), [("@10", 10), ("@latest", 30), ("@-1", 30), ("@-3", 10)])
def test_every_call_that_reads_takes_a_reference(run: Path, name: str, step: int, tmp_path: Path) -> None:
    path = f"{run}{name}"
    assert everystep.load(path)["model"]["b"][0] == step
    with everystep.open(path) as checkpoint:
        assert checkpoint.step == step
    assert everystep.verify(path).step == step
    assert inspect.describe(path).step == step
    assert inspect.compare(path, step_path(run, step)).equal
    assert [entry.step for entry in inspect.list_run(path).checkpoints] == [step]
    assert [report.step for report in inspect.verify_all(path)] == [step]
    assert inspect.export(path, tmp_path / "out.safetensors").step == step
    universal.convert(path, tmp_path / "copy")
    assert everystep.load(tmp_path / "copy")["model"]["b"][0] == step
    fresh = make_state()
    with everystep.Checkpointer(tmp_path / "new", fresh) as checkpointer:
        checkpointer.restore(init_from=path)
    assert fresh["model"]["b"][0] == step


def test_commands_take_a_reference(run: Path) -> None:
    for name in ("ls", "show", "verify"):
        assert command(name, f"{run}@20").code == 0
    assert command("diff", f"{run}@10", f"{run}@10").code == 0
    assert command("diff", f"{run}@10", f"{run}@latest").code == 1


def test_inside_of_a_run_the_reference_stands_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert everystep.open("@20").step == 20


def test_what_exists_under_the_name_comes_first(run: Path, tmp_path: Path) -> None:
    everystep.save(tmp_path / "a@10", {"w": np.ones(1)}, step=7)
    make_run(tmp_path / "a", (10,))
    assert everystep.open(tmp_path / "a@10").step == 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("@31", "has steps 10, 20, 30"),
        ("@-4", "has steps 10, 20, 30"),
        ("@-0", "has steps 10, 20, 30"),
        ("@best", "after @ comes a step, latest, or -N"),
        ("@", "after @ comes a step"),
    ],
)
def test_an_error_names_the_steps_that_there_are(run: Path, name: str, said: str) -> None:
    with pytest.raises(everystep.CheckpointNotFound, match=said):
        everystep.load(f"{run}{name}")


def test_of_many_steps_the_nearest_are_named(tmp_path: Path) -> None:
    for step in range(0, 200, 10):
        step_path(tmp_path, step).mkdir()
    with pytest.raises(everystep.CheckpointNotFound, match="20 steps from 0 to 190; the nearest are 110 and"):
        everystep.load(f"{tmp_path}@114")


def test_without_a_run_it_is_a_path_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(everystep.CheckpointNotFound, match=r"there is no checkpoint at .*nowhere@3"):
        everystep.load(tmp_path / "nowhere@3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(everystep.CheckpointNotFound, match="holds no checkpoints that are named by"):
        everystep.load(tmp_path / "empty@3")


def test_nothing_is_saved_under_a_reference(run: Path) -> None:
    with pytest.raises(ValueError, match="means a checkpoint of the run"):
        everystep.save(f"{run}@10", {"w": np.ones(1)})
    with pytest.raises(ValueError, match="means a checkpoint of the run"):
        everystep.Checkpointer(f"{run}@10", {"w": np.ones(1)})
    assert not Path(f"{run}@10").exists()


def test_other_names_with_an_at_sign_may_be_saved_to(tmp_path: Path) -> None:
    everystep.save(tmp_path / "me@host", {"w": np.ones(1)})
    with everystep.Checkpointer(tmp_path / "lr@3", {"w": np.ones(1)}, mode="sync") as checkpointer:
        checkpointer.save(1)
    assert everystep.open(tmp_path / "lr@3").step == 1
    assert everystep.open(f"{tmp_path / 'lr@3'}@1").step == 1


def test_a_directory_of_named_checkpoints_says_which_there_are(tmp_path: Path) -> None:
    for name in ("epoch-2", "epoch-10"):
        everystep.save(tmp_path / name, {"w": np.ones(1)})
    with pytest.raises(everystep.CheckpointNotFound, match="holds 2: epoch-2, epoch-10"):
        everystep.load(tmp_path)
