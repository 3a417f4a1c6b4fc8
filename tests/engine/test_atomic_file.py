"""A file that is replaced whole or not at all, whatever fails on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everystep.engine import faults, fs
from everystep.engine.atomic_file import file_to_replace, replace_file


def by_path(directory: Path, data: bytes, **options: bool) -> None:
    replace_file(str(directory / "x"), data, **options)


def within(directory: Path, data: bytes, **options: bool) -> None:
    held = fs.open_directory(str(directory))
    try:
        replace_file("x", data, within=held, **options)
    finally:
        held.release()


def streamed(directory: Path, data: bytes, **options: bool) -> None:
    with file_to_replace(str(directory / "x"), **options) as file:
        file.write(data)


WAYS = [by_path, within, streamed]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_made_and_replaced(tmp_path: Path, way: Callable[..., None]) -> None:
    for data in (b"first", b"second and longer", b""):
        way(tmp_path, data)
        assert (tmp_path / "x").read_bytes() == data
    with pytest.raises(FileExistsError):
        way(tmp_path, b"other", overwrite=False)
    assert (tmp_path / "x").read_bytes() == b""
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("way", WAYS)
def test_whatever_fails_the_old_content_or_the_new_one_is_there(
    tmp_path: Path, way: Callable[..., None]
) -> None:
    failed = 0
    for call in ("open", "write", "sync", "rename", "sync_dir"):
        (tmp_path / "x").write_bytes(b"old")
        with faults.injected(f"{call}:1:EIO"):
            try:
                way(tmp_path, b"new")
            except OSError:
                failed += 1
        assert (tmp_path / "x").read_bytes() in (b"old", b"new")
        assert os.listdir(tmp_path) == ["x"]
    assert failed >= 2


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_bytes(b"half of what it wan")
    within(tmp_path, b"whole")
    assert (tmp_path / "x").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["x"]


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    by_path(tmp_path, b"old")

    def interrupted() -> None:
        with file_to_replace(str(tmp_path / "x")) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
