"""A file that is replaced whole or not at all, whatever fails on the way."""

from __future__ import annotations

import os
import zipfile
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
    for call in ("open", "write", "sync", "rename", "sync_dir"):
        (tmp_path / "x").write_bytes(b"old")
        with faults.injected(f"{call}:1:EIO"), pytest.raises(OSError, match=call) as failed:
            way(tmp_path, b"new")
        assert os.path.dirname(failed.value.filename) in (os.fspath(tmp_path), os.path.dirname(tmp_path))
        # A directory is synced before its file is renamed, too, where that is cheaper.
        allowed = (b"old", b"new") if call == "sync_dir" else (b"old",)
        assert (tmp_path / "x").read_bytes() in allowed
        assert os.listdir(tmp_path) == ["x"]


def test_a_streamed_file_may_be_written_from_place_to_place(tmp_path: Path) -> None:
    with faults.injected("write:2:short"), file_to_replace(str(tmp_path / "x")) as file:
        with zipfile.ZipFile(file, "w") as archive:  # which goes back to fill in sizes
            for name in "ab":
                archive.writestr(name, name * 100_000)
        end = file.tell()
        assert file.seek(-2, os.SEEK_END) == end - 2
        assert file.seek(1, os.SEEK_CUR) == end - 1
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert archive.testzip() is None
        assert archive.read("b") == b"b" * 100_000


def test_a_file_that_others_wrote_is_synced_over_the_seam(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"theirs")
    with faults.traced() as events:
        fs.sync_file(str(tmp_path / "x"))
    assert [(event.call, event.path) for event in events] == [("sync", str(tmp_path / "x"))]
    with faults.injected("sync:1:EIO"), pytest.raises(OSError, match="sync"):
        fs.sync_file(str(tmp_path / "x"))


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
