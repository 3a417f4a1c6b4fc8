"""A directory is put elsewhere while a checkpoint is saved into it: that save fails and touches no other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.engine import fs

STATE = {"w": np.arange(300_000)}


def before_sync(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Calls `do` once, when all bytes of a save are written and none is durable."""
    real = fs.sync

    def sync(*args: Any) -> None:
        monkeypatch.undo()
        do()
        real(*args)

    monkeypatch.setattr(fs, "sync", sync)


def point(link: Path, to: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(to)


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """A link to the first of two directories."""
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
    point(tmp_path / "current", tmp_path / "first")
    return tmp_path / "current"


@pytest.mark.parametrize("size", [9, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_follows_no_link_that_is_re_pointed(
    current: Path, monkeypatch: pytest.MonkeyPatch, size: int, overwrite: bool
) -> None:
    first, other = current.with_name("first"), current.with_name("other")
    if overwrite:
        for folder in (first, other):
            everystep.save(folder / "model", {"w": np.full(size, 7)})
    inodes = {path: path.stat().st_ino for path in other.rglob("*")}
    before_sync(monkeypatch, lambda: point(current, other))
    with pytest.raises(everystep.errors.RunMoved, match="leads to another directory"):
        everystep.save(current / "model", {"w": np.arange(size)}, overwrite=overwrite)
    assert {path: path.stat().st_ino for path in other.rglob("*")} == inodes
    assert os.listdir(first) == (["model"] if overwrite else []), (
        "the failed save has cleaned up after itself"
    )
    if overwrite:
        assert everystep.load(first / "model")["w"][-1] == 7


def test_a_volume_that_is_swapped_is_not_reported_durable(
    current: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest would name a path at which there is no shard."""
    first, other, model = (current.with_name(name) for name in ("first", "other", "model"))
    options = everystep.Options(volumes=[current])

    def swap() -> None:
        shutil.copytree(first, other, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        point(current, other)

    before_sync(monkeypatch, swap)
    with pytest.raises(everystep.errors.RunMoved):
        everystep.save(model, STATE, options=options)
    assert not model.exists()
    everystep.save(model, STATE, options=options)
    assert np.array_equal(everystep.load(model)["w"], STATE["w"])
