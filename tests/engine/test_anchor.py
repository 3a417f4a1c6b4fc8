"""The names on the way to a directory are made durable once, and again when it is not the same any more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from everystep.engine import fs


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = fs.sync_dir

    def sync_dir(path: str) -> None:
        seen.append(path)
        real(path)

    monkeypatch.setattr(fs, "sync_dir", sync_dir)
    return seen


def anchored(directory: Path, synced: list[str]) -> list[str]:
    synced.clear()
    fs.anchor(str(directory), once=True)
    return list(synced)


def test_a_directory_that_stays_is_anchored_once(tmp_path: Path, synced: list[str]) -> None:
    run = tmp_path / "above" / "run"
    run.mkdir(parents=True)
    assert anchored(run, synced)[:2] == [str(run.parent), str(tmp_path)]
    assert anchored(run, synced) == []


def test_a_directory_made_again_is_anchored_again(tmp_path: Path, synced: list[str]) -> None:
    """It mostly gets the inode of the one that was removed."""
    run = tmp_path / "run"
    run.mkdir()
    anchored(run, synced)
    before = fs.identity(str(run))
    run.rmdir()
    run.mkdir()
    if fs.identity(str(run))[2] == 0:
        pytest.skip("this file system does not keep when a directory was made")
    while fs.identity(str(run)) == before:  # the clock of file systems moves in ticks
        run.rmdir()
        time.sleep(0.005)
        run.mkdir()
    assert anchored(run, synced) == [str(tmp_path)]


def test_a_directory_that_was_moved_is_anchored_again(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "there").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    anchored(run, synced)
    moved = run.rename(tmp_path / "there" / "run")
    assert str(moved.parent) in anchored(moved, synced)


def test_directories_are_made_below_the_current_one(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fs.make_directories("above/run")
    assert (tmp_path / "above" / "run").is_dir()
    assert synced[:2] == [str(tmp_path / "above"), str(tmp_path)]
