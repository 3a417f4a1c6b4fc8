"""`save`, `load`, `open`: what the calls take, return and refuse."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import everystep
from everystep import Checkpointer, Options, engine
from everystep.engine import fs
from everystep.store import step_name
from everystep.store.read.checkpoint import open_newest
from support.states.array_samples import bits


def shard(path: Path) -> Path:
    return path / "r00000.v0.safetensors"


# --- saving -------------------------------------------------------------------------------------------------


def test_a_save_tells_what_it_did(tmp_path: Path) -> None:
    before, began = time.time(), time.perf_counter()
    state = {"w": np.zeros((100, 10), np.float32), "tied": None}
    state["tied"] = state["w"]
    info = everystep.save(
        tmp_path / "c", state, step=12, metrics={"loss": 0.5, "bad": math.nan, "top": math.inf}
    )
    took = time.perf_counter() - began
    assert info.path == os.fspath(tmp_path / "c")
    assert (info.step, info.leaves, info.nbytes) == (12, 1, 4000)
    assert info.stored_nbytes == sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert re.fullmatch(r"[0-9a-f]{32}", info.id)
    assert before <= info.created <= time.time()
    assert 0 < info.seconds < took
    with everystep.open(tmp_path / "c") as opened:
        assert (opened.step, opened.id, opened.created) == (12, info.id, info.created)
        assert opened.metrics["loss"] == 0.5
        assert math.isnan(opened.metrics["bad"])
        assert opened.metrics["top"] == math.inf


@pytest.mark.parametrize("elements", [5, 120_000])
def test_a_small_checkpoint_is_one_file_and_nothing_else(tmp_path: Path, elements: int) -> None:
    info = everystep.save(tmp_path / "c", {"w": np.zeros(elements)})
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert os.listdir(tmp_path / "c") == ["r00000.v0.safetensors"]
    assert info.stored_nbytes == os.path.getsize(shard(tmp_path / "c")) <= Options().small_nbytes


def test_a_large_checkpoint_is_two_files_and_nothing_else(tmp_path: Path) -> None:
    nbytes = 1 << 20  # data of just the limit: with the header it is more
    everystep.save(tmp_path / "c", {"w": np.zeros(nbytes, np.uint8)})
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "r00000.v0.safetensors"]


def test_small_arrays_with_many_values_are_two_files(tmp_path: Path) -> None:
    """What counts is the file, and the values would be in it."""
    state = {"w": np.zeros(5), "words": ["word"] * 200_000}
    everystep.save(tmp_path / "c", state)
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "r00000.v0.safetensors"]
    assert everystep.load(tmp_path / "c")["words"] == state["words"]


def test_a_header_longer_than_first_thought_says_where_everything_is(tmp_path: Path) -> None:
    state = {"w": np.arange(5), "text": 'a "quoted\\" text\x00é' * 500, "v": np.arange(7.0)}
    everystep.save(tmp_path / "c", state)
    assert os.listdir(tmp_path / "c") == ["r00000.v0.safetensors"]
    assert everystep.verify(tmp_path / "c").intact
    loaded = everystep.load(tmp_path / "c")
    assert loaded["text"] == state["text"]
    assert np.array_equal(loaded["v"], state["v"])


@pytest.mark.parametrize("way", ["one file beside a manifest", "a manifest beside one file"])
def test_two_manifests_are_one_too_many(tmp_path: Path, way: str) -> None:
    everystep.save(tmp_path / "one", {"w": np.arange(5)})
    everystep.save(tmp_path / "two", {"w": np.arange(5)}, options=Options(small_nbytes=0))
    if way == "one file beside a manifest":
        shutil.copyfile(shard(tmp_path / "one"), shard(tmp_path / "two"))
        damaged = tmp_path / "two"
    else:
        shutil.copyfile(tmp_path / "two" / "manifest.json", tmp_path / "one" / "manifest.json")
        damaged = tmp_path / "one"
    with pytest.raises(everystep.CorruptCheckpoint, match="beside it") as caught:
        everystep.open(damaged)
    assert caught.value.path == str(shard(damaged))
    assert not everystep.verify(damaged).intact


def test_neither_manifest_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": np.arange(5)}, options=Options(small_nbytes=0))
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(everystep.errors.IncompleteCheckpoint, match="no manifest") as caught:
        everystep.load(tmp_path / "c")
    assert caught.value.path == str(shard(tmp_path / "c"))


def test_every_shard_opens_with_the_safetensors_package(tmp_path: Path, options: Options) -> None:
    state = {
        "model": {"w": torch.randn(300, 500), "t": torch.randn(200, 300).T, "half": torch.ones(3).bfloat16()},
        "n": np.arange(7),
        "complex": np.array([1 + 2j]),
    }
    everystep.save(tmp_path / "c", state, options=options)
    with safe_open(shard(tmp_path / "c"), "pt") as opened:
        assert opened.metadata()["format"] == "pt"
        names = [name for name in opened.keys() if not name.startswith("__pad__")]  # noqa: SIM118
        assert sorted(names) == ["complex", "model.half", "model.t", "model.w", "n"]
        for name in ("w", "t", "half"):
            assert torch.equal(opened.get_tensor(f"model.{name}"), state["model"][name])
        assert opened.get_tensor("n").tolist() == list(range(7))
        assert opened.get_tensor("complex").tolist() == [
            [1.0, 2.0]
        ]  # 128 bits have no name of their own there


def test_checkpoints_are_immutable(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": 1})
    for existing in (tmp_path / "c", tmp_path):
        with pytest.raises(everystep.CheckpointExists, match="overwrite=True"):
            everystep.save(existing, {"w": 2})
    assert everystep.load(tmp_path / "c") == {"w": 1}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_what_appears_at_the_path_during_a_save_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool, overwrite: bool
) -> None:
    """A plain rename would put the checkpoint in the place of an empty directory, and of a file."""
    target = tmp_path / "c"
    move = fs.rename_new

    def somebody_was_faster(partial: str, name: str) -> None:
        target.mkdir(exist_ok=True)
        (target / "theirs").touch()
        move(partial, name)

    monkeypatch.setattr(fs, "rename_new", somebody_was_faster)
    options = Options() if small else Options(small_nbytes=0)
    with pytest.raises(everystep.CheckpointExists, match=re.escape(os.fspath(target))):
        everystep.save(target, {"w": np.arange(5)}, overwrite=overwrite, options=options)
    assert list(tmp_path.iterdir()) == [target]
    assert list(target.iterdir()) == [target / "theirs"]


def test_a_large_state_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everystep.save(tmp_path / "c", {"w": 1})
    monkeypatch.setattr(engine, "write", lambda *args, **kwargs: pytest.fail("it is written"))
    with pytest.raises(everystep.CheckpointExists):
        everystep.save(tmp_path / "c", {"w": np.arange(5)}, options=Options(small_nbytes=0))


@pytest.mark.parametrize("small", [True, False])
def test_overwriting_replaces_a_checkpoint_whole(tmp_path: Path, small: bool) -> None:
    options = Options() if small else Options(small_nbytes=0)
    old = {"w": np.arange(300_000), "only": np.ones(3)}
    everystep.save(tmp_path / "c", old, step=1)
    with everystep.open(tmp_path / "c") as reader:
        new = everystep.save(tmp_path / "c", {"w": np.arange(5)}, step=2, overwrite=True, options=options)
        # Who has the old one open goes on reading it.
        assert np.array_equal(reader.load()["w"], old["w"])
    with everystep.open(tmp_path / "c") as opened:
        assert opened.id == new.id
        assert list(opened) == ["w"]
    assert np.array_equal(everystep.load(tmp_path / "c")["w"], np.arange(5))
    everystep.save(tmp_path / "c", {"w": 3}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["c"]
    everystep.save(tmp_path / "new", {"w": 3}, overwrite=True)  # nothing there: as without


def test_a_checkpoint_that_lost_its_manifest_can_be_overwritten(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": np.arange(5)}, options=Options(small_nbytes=0))
    (tmp_path / "c" / "manifest.json").unlink()
    everystep.save(tmp_path / "c", {"w": 3}, overwrite=True)
    assert everystep.load(tmp_path / "c") == {"w": 3}


def test_overwriting_never_takes_away_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    home, run, file, link = (tmp_path / name for name in ("home", "run", "file", "link"))
    (home / "deep").mkdir(parents=True)
    (home / "deep" / "thesis.tex").write_text("years of work")
    (home / "model.safetensors").write_text("somebody's")
    with Checkpointer(run, {"w": np.arange(3)}, mode="sync") as checkpointer:
        checkpointer.save(1)
    file.write_text("a file")
    link.symlink_to(run / step_name(1))
    for target in (home, run, file, link):
        for overwrite in (True, False):
            with pytest.raises(everystep.CheckpointExists, match="not even overwrite=True replaces it"):
                everystep.save(target, {"w": 2}, overwrite=overwrite)
    with pytest.raises(everystep.SaveFailed, match=f"{file} is not a directory"):
        everystep.save(file / "c", {"w": 2})
    assert (home / "deep" / "thesis.tex").read_text() == "years of work"
    assert file.read_text() == "a file"
    assert np.array_equal(everystep.load(run)["w"], np.arange(3))


@pytest.mark.parametrize("volumes", [0, 1])
def test_directories_above_the_path_are_made(tmp_path: Path, volumes: int) -> None:
    (tmp_path / "v").mkdir()
    options = everystep.Options(volumes=[tmp_path / "v"] * volumes)
    everystep.save(tmp_path / "a" / "b" / "c", {"w": np.ones(3)}, options=options)
    assert everystep.load(tmp_path / "a" / "b" / "c")["w"].tolist() == [1, 1, 1]


def test_a_state_that_cannot_be_saved_makes_no_directories(tmp_path: Path) -> None:
    with pytest.raises(everystep.UnsupportedState):
        everystep.save(tmp_path / "a" / "c", {"w": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_file_above_the_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(everystep.SaveFailed, match=re.escape(os.fspath(tmp_path / "a"))):
        everystep.save(tmp_path / "a" / "b" / "c", {"w": 1})
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("volumes", [0, 1])
@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_steps_and_metrics_are_numbers_of_any_library(tmp_path: Path, step: Any, volumes: int) -> None:
    (tmp_path / "v").mkdir()
    options = everystep.Options(volumes=[tmp_path / "v"] * volumes)
    metrics = {"n": np.int64(2), "loss": torch.tensor(0.5)}
    everystep.save(tmp_path / "c", {}, step=step, metrics=metrics, options=options)  # type: ignore[arg-type]
    with everystep.open(tmp_path / "c") as opened:
        assert (opened.step, opened.metrics) == (3, {"n": 2.0, "loss": 0.5})
        assert type(opened.step) is int


@pytest.mark.parametrize("metrics", [{"a": None}, {"a": 10**400}, {"a": "much"}, {"\ud800": 1.0}, {1: 1.0}])
def test_metrics_that_are_no_numbers_are_refused_by_name(tmp_path: Path, metrics: Any) -> None:
    with pytest.raises(TypeError, match="metric"):
        everystep.save(tmp_path / "c", {}, metrics=metrics)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "1", None, np.array([1, 2]), np.float64(1)])
def test_steps_are_small_integers(tmp_path: Path, step: object) -> None:
    with pytest.raises(ValueError, match="step"):
        everystep.save(tmp_path / "c", {}, step=step)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("small", [True, False])
def test_an_interrupted_save_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    def interrupted(job: engine.WriteJob, **how: Any) -> None:
        raise KeyboardInterrupt

    options = Options() if small else Options(small_nbytes=0)
    with monkeypatch.context() as patched:
        patched.setattr(engine.WriteJob, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            everystep.save(tmp_path / "c", {"w": np.zeros(1 << 20)}, options=options)
    assert list(tmp_path.iterdir()) == []
    everystep.save(tmp_path / "c", {"w": np.zeros(1 << 20)}, options=options)


@pytest.mark.parametrize("name", ["c.partial", "c.retired"])
def test_names_that_mark_unfinished_saves_cannot_be_taken(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="choose another"):
        everystep.save(tmp_path / name, {})


def test_the_backend_can_be_forced_by_option_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(everystep.errors.EngineUnavailable, match="'tape'"):
        everystep.save(tmp_path / "c", {}, options=Options(backend="tape"))  # type: ignore[arg-type]
    monkeypatch.setenv("EVERYSTEP_BACKEND", "drum")
    with pytest.raises(everystep.errors.EngineUnavailable, match="'drum'"):
        everystep.save(tmp_path / "c", {"w": np.zeros(1 << 20)})
    assert list(tmp_path.iterdir()) == []
    everystep.save(tmp_path / "c", {"w": np.zeros(1 << 20)}, options=Options(backend="buffered"))
    with pytest.raises(everystep.errors.EngineUnavailable, match="'drum'"):
        everystep.load(tmp_path / "c")


@pytest.mark.parametrize("memory_nbytes", [0, 1, 100 << 10, 5 << 20, 1 << 30])
def test_any_budget_of_memory_works(tmp_path: Path, memory_nbytes: int) -> None:
    data = np.arange(1 << 19)
    options = Options(memory_nbytes=memory_nbytes, small_nbytes=0)
    tuning = options.tuning()
    assert tuning.window_nbytes * tuning.depth <= max(memory_nbytes, 128 << 10)
    everystep.save(tmp_path / "c", {"w": data.reshape(512, -1).T}, options=options)
    assert np.array_equal(everystep.load(tmp_path / "c")["w"], data.reshape(512, -1).T)


# --- opening and loading ------------------------------------------------------------------------------------


def test_nothing_at_a_path(tmp_path: Path) -> None:
    for call in (everystep.open, everystep.load, everystep.verify):
        with pytest.raises(everystep.CheckpointNotFound, match="no checkpoint"):
            call(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(everystep.CheckpointNotFound, match="not a checkpoint, nor a run"):
        everystep.load(tmp_path / "empty")
    (tmp_path / "empty" / "r00000.json").write_text("{}")
    with pytest.raises(everystep.errors.IncompleteCheckpoint, match="the manifest is missing"):
        everystep.load(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(everystep.CheckpointNotFound):
        everystep.load(tmp_path / "file")


def test_a_run_means_its_newest_checkpoint(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    with Checkpointer(tmp_path / "run", state, mode="sync") as checkpointer:
        for step in (5, 12, 120):
            state["w"][:] = step
            checkpointer.save(step)
        with everystep.open(tmp_path / "run") as opened:
            assert opened.step == 120
            assert opened.path == os.fspath(tmp_path / "run" / step_name(120))
        assert everystep.load(tmp_path / "run")["w"][0] == 120
        assert everystep.load(tmp_path / "run" / step_name(12))["w"][0] == 12


def test_an_open_checkpoint_tells_what_it_holds(tmp_path: Path) -> None:
    weight = torch.zeros(3, 4, dtype=torch.bfloat16)
    state = {
        "model": {"w": weight, "tied": weight},
        "data": [np.zeros(2), "shuffled"],
        "epoch": 3,
        "seeds": [1, 2],
    }
    everystep.save(tmp_path / "c", state, step=9)
    with everystep.open(tmp_path / "c") as opened:
        assert opened.step == 9
        assert set(opened.leaves) == set(opened) == {"model.w", "model.tied", "data.0"}
        assert len(opened) == 3
        assert opened.leaves["model.w"] == everystep.LeafInfo("BF16", (3, 4), 24, "torch")
        assert opened.leaves["model.tied"] == everystep.LeafInfo("BF16", (3, 4), 24, "torch", "model.w")
        assert opened.leaves["data.0"] == everystep.LeafInfo("F64", (2,), 16, "numpy")
        assert opened.values == {"data.1": "shuffled", "epoch": 3, "seeds": [1, 2]}
        assert opened.nbytes == 40
        assert "model.w" in opened
        assert "model.x" not in opened
        assert "step 9, 3 leaves, 40 bytes" in repr(opened)
        with pytest.raises(KeyError, match=r"model\.x"):
            opened["model.x"]


@pytest.fixture
def selectable(tmp_path: Path) -> Path:
    state = {
        "model": {"w": np.arange(3), "b": np.arange(4)},
        "optimizer": {"m": np.arange(5), "steps": 7},
        "list": [np.zeros(1), np.ones(1)],
        "epoch": 3,
    }
    everystep.save(tmp_path / "c", state)
    return tmp_path / "c"


def test_select_takes_only_what_matches(selectable: Path) -> None:
    found = everystep.load(selectable, select="model.*")
    assert list(found) == ["model"]
    assert found["model"]["b"].tolist() == [0, 1, 2, 3]
    assert list(everystep.load(selectable, select=["model.w", "optimizer.*"])) == ["model", "optimizer"]
    # In a sequence the place of an element means something, so what is left out leaves a gap.
    first, second = everystep.load(selectable, select="list.1")["list"]
    assert first is None
    assert second.tolist() == [1]


def test_read_gives_the_selected_leaves_by_name(selectable: Path) -> None:
    with everystep.open(selectable) as opened:
        found = opened.read("*.?")
        assert sorted(found) == ["list.0", "list.1", "model.b", "model.w", "optimizer.m"]
        assert isinstance(opened.read("model.w", framework="torch")["model.w"], torch.Tensor)
        assert sorted(opened.read()) == sorted(opened.leaves)
        assert opened.read([]) == {}


@pytest.mark.parametrize("name", ["a[0]", "[x]", "b*", "c?"])
def test_a_name_that_looks_like_a_pattern_matches_itself(name: str, tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {name: np.arange(3), "other": np.zeros(2), "epoch": 1})
    assert everystep.load(tmp_path / "c", select=name)[name].tolist() == [0, 1, 2]
    with everystep.open(tmp_path / "c") as opened:
        assert opened.select([name]) == [name]
        assert opened.select("*") == [name, "other"]
    into = {name: np.zeros(3, np.int64)}
    everystep.load(tmp_path / "c", into, select=name)
    assert into[name].tolist() == [0, 1, 2]


@pytest.mark.parametrize("select", [b"model.w", 5, ["model.w", 5], [None]], ids=repr)
def test_what_is_no_pattern_is_a_type_error_that_says_what_is_wanted(selectable: Path, select: Any) -> None:
    with pytest.raises(TypeError, match="names or globs"):
        everystep.load(selectable, select=select)
    with everystep.open(selectable) as opened, pytest.raises(TypeError, match="names or globs"):
        opened.read(select)


@pytest.mark.parametrize("name", [None, 5, b"model.w", ("model", "w")], ids=repr)
def test_what_is_no_name_is_a_type_error_that_says_what_is_wanted(selectable: Path, name: Any) -> None:
    with everystep.open(selectable) as opened:
        with pytest.raises(TypeError, match="named by strings"):
            opened[name]
        assert name not in opened


def test_what_cannot_be_a_path_has_no_checkpoint() -> None:
    with pytest.raises(everystep.CheckpointNotFound):
        everystep.open("a\0b")


def test_a_leaf_that_is_not_there_is_an_error_of_ours(selectable: Path) -> None:
    with everystep.open(selectable) as opened:
        with pytest.raises(everystep.errors.LeafNotFound) as caught:
            opened["nope"]
        assert isinstance(caught.value, KeyError)
        assert str(caught.value).startswith(f"{selectable} has no leaf 'nope'")


def test_a_pattern_that_matches_nothing_is_a_mistake(selectable: Path) -> None:
    for patterns in ("modle.*", ["model.*", "nope"]):
        with pytest.raises(everystep.StateMismatch, match="matches") as caught:
            everystep.load(selectable, select=patterns)
        assert caught.value.missing in (("modle.*",), ("nope",))


def test_only_selected_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not selected may be damaged, and the load does not notice."""
    everystep.save(tmp_path / "c", {"a": np.arange(1 << 17), "b": np.arange(1 << 17) + 1})
    with open_newest(tmp_path / "c") as opened:
        offsets = {leaf.name: leaf.fragments[0].offset for leaf in opened._parts.root.part.leaves}
    with shard(tmp_path / "c").open("r+b") as file:
        file.seek(offsets["b"])
        file.write(b"\xff")
    assert np.array_equal(everystep.load(tmp_path / "c", select="a")["a"], np.arange(1 << 17))
    with pytest.raises(everystep.CorruptCheckpoint, match="'b'") as caught:
        everystep.load(tmp_path / "c")
    assert (caught.value.leaf, caught.value.path) == ("b", os.fspath(shard(tmp_path / "c")))
    # Not verifying is a choice, and then the bytes are what they are.
    found = everystep.load(tmp_path / "c", verify=False)
    assert found["b"][0] != 1
    assert bits(found["a"]) == bits(np.arange(1 << 17))


def test_progress_counts_the_bytes(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": np.zeros(1 << 22)})
    told: list[int] = []
    with everystep.open(tmp_path / "c") as opened:
        opened.read(progress=told.append)
    assert told == sorted(told)
    assert all(0 <= done <= opened.stored_nbytes for done in told)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (
            {"writers": "nodes"},
            'writers must be "all", "node", "socket" or a number from 1 on, not \'nodes\'',
        ),
        ({"writers": 0}, "a number from 1 on, not 0"),
        ({"writers": True}, "a number from 1 on, not True"),
        ({"volumes": "/nvme0"}, "volumes must be a list of directories, not '/nvme0'"),
        ({"volumes": 3}, "volumes must be a list of directories, not 3"),
        ({"replicas": "never"}, 'replicas must be "check" or "trust", not \'never\''),
        ({"small_nbytes": -1}, "small_nbytes must be a number of bytes, an int from 0 on, not -1"),
        ({"small_nbytes": 1e6}, "small_nbytes must be a number of bytes"),
        ({"small_nbytes": 1 << 64}, "small_nbytes must be a number of bytes"),
        ({"memory_nbytes": "1G"}, "memory_nbytes must be a number of bytes, an int from 0 on, not '1G'"),
        ({"memory_nbytes": -1}, "memory_nbytes must be a number of bytes"),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(wrong: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=re.escape(advice)):
        everystep.Options(**wrong)


def test_options_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape("options must be an everystep.Options(...), not 5")):
        everystep.save(tmp_path / "c", {"w": 1}, options=5)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_was_saved_from_torch_is_read_where_there_is_none(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": torch.arange(3.0), "large": torch.zeros(1 << 19), "epoch": 4})
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import everystep, numpy as np\n"
        "path = sys.argv[1]\n"
        "state = everystep.load(path, framework='numpy')\n"
        "assert state['w'].tolist() == [0.0, 1.0, 2.0] and type(state['large']) is np.ndarray\n"
        "try:\n    everystep.load(path)\n"
        "except everystep.UnsupportedState as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")], check=True, capture_output=True, text=True
    )
    assert "w: this leaf was saved from torch" in done.stdout
    assert "framework='numpy'" in done.stdout
