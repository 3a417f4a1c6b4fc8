"""Names and directories: what the native calls do, and refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everystep.engine import fs


def a_file(path: Path) -> None:
    path.write_text("there")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("put", [a_file, a_directory, a_link_to_nowhere], ids=lambda put: put.__name__)
def test_rename_new_replaces_nothing(tmp_path: Path, put: Callable[[Path], None]) -> None:
    new, there = tmp_path / "new", tmp_path / "there"
    new.mkdir()
    put(there)
    before = os.lstat(there)
    assert fs.exists(there)
    with pytest.raises(FileExistsError, match="there"):
        fs.rename_new(new, there)
    assert os.lstat(there) == before
    assert new.is_dir()
    assert not fs.exists(tmp_path / "elsewhere")
    fs.rename_new(new, tmp_path / "elsewhere")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "there"]


def test_a_directory_is_held_from_its_making_to_its_release(tmp_path: Path) -> None:
    held = fs.make_directory(tmp_path / "d")
    assert held is not None
    assert fs.lock_directory(tmp_path / "d", False) is None
    with pytest.raises(FileExistsError):
        fs.make_directory(tmp_path / "d")
    held.release()
    again = fs.lock_directory(tmp_path / "d", True)
    assert again is not None
    again.release()


def test_a_release_reaches_those_that_share_the_descriptor(tmp_path: Path) -> None:
    """As a forked child does: closing alone would leave the directory locked for as long as it lives."""
    held = fs.make_directory(tmp_path / "d")
    assert held is not None
    shared = os.dup(held.fileno())
    try:
        held.release()
        again = fs.lock_directory(tmp_path / "d", True)
        assert again is not None
        again.release()
    finally:
        os.close(shared)
