"""A run belongs to the training that opened it: a path that comes to lead elsewhere leads no writer there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Checkpointer, Keep
from everystep.checkpointer.checkpointer import Mode
from everystep.store import step_name

MODES: list[Mode] = ["sync", "snapshot"]
Move = Callable[[Path], Path]


def content(run: Path) -> dict[str, str]:
    """Every file of a run's checkpoints, by a digest of its bytes and by its inode."""
    return {
        f"{path.relative_to(run)}": f"{path.stat().st_ino} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(run.rglob("step-*/*"))
    }


def fill(run: Path, size: int, steps: int = 3, keep: int = 9) -> Checkpointer:
    checkpointer = Checkpointer(run, {"w": np.full(size, 100)}, keep=Keep(last=keep), mode="sync")
    for step in range(1, steps + 1):
        checkpointer.save(step)
    return checkpointer


def save_and_wait(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step)
    checkpointer.wait()


def link_to_another(path: Path) -> Path:
    """``path`` is a link, and now leads to another run."""
    path.unlink()
    path.symlink_to(path.parent / "other")
    return path.parent / "first"


def rename_and_put_another(path: Path) -> Path:
    """The run is renamed, and another one takes its path."""
    path.rename(path.parent / "moved")
    (path.parent / "other").rename(path)
    return path.parent / "moved"


def opened(tmp_path: Path, move: Move) -> Path:
    """The path that a training opens, so that `move` can happen to it."""
    if move is rename_and_put_another:
        return tmp_path / "current"
    (tmp_path / "first").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "first")
    return tmp_path / "current"


@pytest.fixture(params=[link_to_another, rename_and_put_another], ids=lambda move: move.__name__)
def move(request: pytest.FixtureRequest) -> Move:
    found: Move = request.param
    return found


@pytest.fixture(params=[100, 300_000], ids=["small", "large"])
def size(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_path_that_leads_to_another_run_fails_the_save_and_touches_neither(
    tmp_path: Path, move: Move, size: int, mode: Mode
) -> None:
    current = opened(tmp_path, move)
    state = {"w": np.zeros(size)}
    with fill(tmp_path / "other", size):
        with Checkpointer(current, state, keep=Keep(last=2), mode=mode) as checkpointer:
            for step in range(1, 5):
                checkpointer.save(step)
            checkpointer.wait()
            others = content(tmp_path / "other")
            mine = move(current)
            before = content(mine)
            for step in range(5, 9):
                with pytest.raises(everystep.errors.RunMoved, match="leads to another directory") as caught:
                    save_and_wait(checkpointer, step)
                assert str(current) in str(caught.value)
                assert str(mine) in str(caught.value), "it says where the run is now"
            other = tmp_path / "other" if move is link_to_another else current
            assert content(other) == others
            assert sorted(name for name in os.listdir(other) if name.startswith("step-")) == [
                step_name(step) for step in (1, 2, 3)
            ]
            assert {name for name in content(mine) if ".retired" not in name} == {
                name for name in before if ".retired" not in name
            }
        assert everystep.load(mine)["w"].shape == (size,)
        assert content(other) == others


def test_training_goes_on_when_the_path_leads_back(tmp_path: Path) -> None:
    current = opened(tmp_path, link_to_another)
    (tmp_path / "other").mkdir()
    with Checkpointer(current, {"w": np.arange(5)}, mode="sync") as checkpointer:
        checkpointer.save(1)
        link_to_another(current)
        with pytest.raises(everystep.errors.RunMoved):
            checkpointer.save(2)
        current.unlink()
        current.symlink_to(tmp_path / "first")
        checkpointer.save(3)
    assert everystep.load(current)["w"].tolist() == [0, 1, 2, 3, 4]
    assert os.listdir(tmp_path / "other") == []


def test_a_run_that_was_renamed_fails_the_save_and_keeps_what_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Checkpointer(run, {"w": np.arange(5)}, mode="sync") as checkpointer:
        checkpointer.save(1)
        run.rename(tmp_path / "renamed")
        with pytest.raises(everystep.errors.RunMoved, match="renamed"):
            checkpointer.save(2)
    assert not run.exists()
    assert everystep.load(tmp_path / "renamed")["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_state_is_not_restored_from_another_run(tmp_path: Path) -> None:
    current = opened(tmp_path, link_to_another)
    fill(tmp_path / "other", 5).close()
    state = {"w": np.zeros(5)}
    with Checkpointer(current, state, mode="sync") as checkpointer:
        checkpointer.save(1)
        link_to_another(current)
        with pytest.raises(everystep.errors.RunMoved):
            checkpointer.restore()
    assert state["w"].tolist() == [0] * 5


def test_events_are_written_to_the_run_that_was_opened(tmp_path: Path) -> None:
    current = opened(tmp_path, link_to_another)
    (tmp_path / "other").mkdir()
    with Checkpointer(current, {"w": np.arange(5)}, mode="sync") as checkpointer:
        link_to_another(current)
        with pytest.raises(everystep.errors.RunMoved):
            checkpointer.save(1)
    assert os.listdir(tmp_path / "other") == []
    assert "RunMoved" in (tmp_path / "first" / "events.jsonl").read_text()


def test_a_second_writer_is_refused_after_the_lock_file_was_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"w": np.arange(5)}, mode="sync") as checkpointer:
        (tmp_path / ".lock").unlink()
        for _ in range(2):
            with pytest.raises(everystep.errors.Locked):
                Checkpointer(tmp_path, {"w": np.arange(5)}, mode="sync")
            (tmp_path / ".lock").unlink(missing_ok=True)
        checkpointer.save(1)
    Checkpointer(tmp_path, {"w": np.arange(5)}, mode="sync").close()


def test_a_second_writer_is_refused_by_another_path_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with (
        Checkpointer(tmp_path / "run", {"w": 1}, mode="sync"),
        pytest.raises(everystep.errors.Locked, match="in this process already"),
    ):
        Checkpointer(tmp_path / "link", {"w": 1}, mode="sync")


def test_an_overlapped_save_fails_and_tells_so_with_the_next_call(tmp_path: Path, move: Move) -> None:
    torch = pytest.importorskip("torch")
    current = opened(tmp_path, move)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with fill(tmp_path / "other", 100):
        others = content(tmp_path / "other")
        with Checkpointer(current, {"m": model, "o": optimizer}, keep=Keep(last=1)) as checkpointer:
            for step in range(1, 8):
                model(torch.ones(300)).sum().backward()
                optimizer.step()
                if step == 4:
                    checkpointer.wait()
                    mine = move(current)
                if step < 5:
                    checkpointer.save(step)
                else:
                    with pytest.raises(everystep.errors.RunMoved):
                        checkpointer.save(step)
            with pytest.raises(everystep.errors.RunMoved):
                checkpointer.wait()
            assert checkpointer.last_durable == 3
        assert content(tmp_path / "other" if move is link_to_another else current) == others
    assert everystep.verify(mine / step_name(3)).intact


def test_the_ledger_of_volumes_stays_in_the_run_that_was_opened(tmp_path: Path) -> None:
    current = opened(tmp_path, link_to_another)
    (tmp_path / "volume").mkdir()
    options = everystep.Options(volumes=[tmp_path / "volume"])
    state = {"w": np.zeros(9)}
    with Checkpointer(tmp_path / "other", state, keep=Keep(last=1), mode="sync", options=options) as other:
        other.save(1)
        with Checkpointer(current, state, keep=Keep(last=1), mode="sync", options=options) as checkpointer:
            for step in range(1, 4):
                checkpointer.save(step)
            link_to_another(current)
            for step in range(4, 7):
                with pytest.raises(everystep.errors.RunMoved):
                    checkpointer.save(step)
        other.save(2)
    assert everystep.verify(tmp_path / "other" / step_name(2)).intact
    assert everystep.verify(tmp_path / "first" / step_name(3)).intact
