"""Directories that are there already: a checkpoint settles in beside the files of others, which stay."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import everystep
from everystep.engine import faults
from everystep.store import step_name
from support.crashes.power_cuts import Budget, Disk, Image, image_of
from support.foreign.dcp_states import assert_same, failures, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

STATE = {"w": torch.arange(3000.0), "epoch": 3}
OTHER = {"w": torch.arange(3000.0) + 7, "epoch": 4}
FILES = ["manifest.json", "r00000.v0.safetensors"]


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def with_config(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("mine")
    (path / "meta.pt").write_bytes(b"also mine")
    return path


def test_an_empty_directory_will_do_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.mkdir(mode=0o700)
    inode = path.stat().st_ino
    save(STATE, path)
    assert_same(load(STATE, path), STATE)
    assert names(tmp_path) == ["made"]
    assert names(path) == FILES
    assert path.stat().st_ino == inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {(path / name).stat().st_nlink for name in FILES} == {1}


def test_files_and_directories_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_config(tmp_path / "model")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab").write_text("words")
    (path / "link").symlink_to("config.json")
    monkeypatch.chdir(path)
    save(STATE, path)
    assert_same(load(STATE, path), STATE)
    assert everystep.verify(path).problems == ()
    assert Path("config.json").read_text() == "mine", "the current directory is still this one"
    assert (path / "tokenizer" / "vocab").read_text() == "words"
    assert names(path) == sorted([*FILES, "config.json", "link", "meta.pt", "tokenizer"])
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("save_first", [save, lambda state, path: everystep.save(path, state)])
def test_replacing_a_checkpoint_keeps_the_files_beside_it(
    tmp_path: Path, save_first: Callable[[object, Path], None]
) -> None:
    path = tmp_path / "model"
    save_first(STATE, path)
    with_config(path)
    (path / "link").symlink_to("config.json")
    opened = (path / "meta.pt").open("ab")
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists"):
        save(OTHER, path)
    save(OTHER, path, overwrite=True)
    assert_same(load(OTHER, path), OTHER)
    with opened:
        opened.write(b", still")
    assert (path / "meta.pt").read_bytes() == b"also mine, still", "it is the same file"
    assert (path / "config.json").read_text() == "mine"
    assert os.readlink(path / "link") == "config.json"
    assert names(tmp_path) == ["model"]
    everystep.save(path, {"n": 1}, overwrite=True)
    assert names(path) == ["config.json", "link", "meta.pt", "r00000.v0.safetensors"]
    assert {(path / name).lstat().st_nlink for name in names(path)} == {1}


def test_a_directory_beside_a_checkpoint_that_would_be_replaced_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(STATE, path)
    (path / "logs").mkdir()
    (path / "logs" / "today").write_text("mine")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(OTHER, path, overwrite=True)
    assert "the directory logs" in str(failures(caught.value)[0])
    assert_same(load(STATE, path), STATE)
    assert (path / "logs" / "today").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_runs_and_checkpoints_of_dcp_itself_are_not_joined(tmp_path: Path, overwrite: bool) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"w": torch.ones(3)}, mode="sync") as checkpointer:
        checkpointer.save(1)
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "run", tmp_path / "theirs", tmp_path / "link"):
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save(STATE, path, overwrite=overwrite)
        assert "is not a checkpoint" in str(failures(caught.value)[0])
    assert (tmp_path / "run" / step_name(1)).exists()


def test_everystep_save_takes_an_empty_directory_and_no_other(tmp_path: Path) -> None:
    for small in (0, 1 << 20):
        path = tmp_path / str(small)
        path.mkdir()
        everystep.save(path, {"w": torch.ones(3)}, options=everystep.Options(small_nbytes=small))
        assert everystep.load(path)["w"].tolist() == [1, 1, 1]
        with pytest.raises(everystep.CheckpointExists, match="Checkpoint already exists"):
            everystep.save(path, {"w": 1})
    path = with_config(tmp_path / "others")
    with pytest.raises(everystep.CheckpointExists, match="is not a checkpoint"):
        everystep.save(path, {"w": 1})
    assert names(path) == ["config.json", "meta.pt"]


# --- failures, kills, power cuts ----------------------------------------------------------------------------


def prepare(kind: str, path: Path) -> None:
    if kind == "replacing":
        save(STATE, path)
    if kind == "empty":
        path.mkdir()
    else:
        with_config(path)


def check(kind: str, path: Path) -> bool:
    """All or nothing of the new state, and all files of others. Whether it is there."""
    if kind != "empty":
        assert (path / "config.json").read_text() == "mine"
        assert (path / "meta.pt").read_bytes() == b"also mine"
    try:
        with everystep.open(path) as checkpoint:
            epoch = checkpoint.values["epoch"]
    except everystep.EverystepError:
        assert kind != "replacing"
        return False
    wanted = {3: STATE, 4: OTHER}[epoch]
    assert_same(load(wanted, path), wanted)
    return bool(epoch == 4)


KINDS = ["empty", "beside", "replacing"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_leaves_nothing_or_all(tmp_path: Path, kind: str) -> None:
    nth = 0
    while True:
        nth += 1
        root = tmp_path / str(nth)
        root.mkdir()
        prepare(kind, root / "model")
        before = names(root / "model")
        with faults.injected(f"any:{nth}:EIO"):
            try:
                save(OTHER, root / "model", overwrite=True)
                failed = False
            except dcp.api.CheckpointException:
                failed = True
            calls = faults.count_calls()
        there = check(kind, root / "model")
        assert there or failed
        if failed and not there:
            assert names(root / "model") == before
            save(OTHER, root / "model", overwrite=True)
            assert check(kind, root / "model")
            assert names(root) == ["model"]
        if calls < nth:
            break
    assert nth > 15


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_leaves_nothing_or_all_and_never_loses_a_file_of_others(
    tmp_path: Path, kind: str
) -> None:
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    prepare(kind, root / "model")
    disk = Disk(root, image_of(root))
    rng = random.Random(0)
    with faults.traced() as events:
        save(OTHER, root / "model", overwrite=True)
    seen: set[object] = set()
    tried = committed = 0
    for event in events:
        if not Path(event.path).is_relative_to(root):
            continue
        disk.replay(event)
        for image in disk.crashes(Budget(names=32, torn=0, single=False), rng):
            if image.digest() in seen:
                continue
            seen.add(image.digest())
            tried += 1
            _restore(image, scratch)
            there = check(kind, scratch / "model")
            committed += there
            # The next save works, as if nothing had happened, and sweeps.
            save(OTHER, scratch / "model", overwrite=there or kind == "replacing")
            assert check(kind, scratch / "model")
            assert names(scratch) == ["model"]
            expected = FILES if kind == "empty" else sorted([*FILES, "config.json", "meta.pt"])
            assert names(scratch / "model") == expected
    assert tried > 10
    assert 0 < committed < tried
    assert all("model/manifest.json" in image.tree for image in disk.crashes(Budget(), rng))


def _restore(image: Image, folder: Path) -> None:
    """As the image says; files with the same content are one, as links are."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    known: dict[tuple[str, bytes], Path] = {}
    for path, content in sorted(image.tree.items()):
        if content is None:
            (folder / path).mkdir()
            continue
        first = known.setdefault((os.path.basename(path), content), folder / path)
        if first == folder / path:
            first.write_bytes(content)
        else:
            os.link(first, folder / path)
