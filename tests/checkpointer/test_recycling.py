"""Retired checkpoints lend their files to new ones, but never files that are being read."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Checkpointer, Keep
from everystep.engine import faults, fs
from everystep.store import step_name
from support.crashes.run_model import SHARD

LARGE, SMALL = 1 << 20, 100  # elements: 8 MiB becomes a spare at once, 800 bytes with the next save


def inode(run: Path, step: int) -> int:
    return (run / step_name(step) / SHARD).stat().st_ino


def recycled(events: list[faults.TracedCall]) -> bool:
    """Whether a retired checkpoint was taken to be written over; an equal inode alone could be chance."""
    return any(
        event.call == "rename" and event.path.endswith(".retired") and event.path2.endswith(".partial")
        for event in events
    )


@pytest.mark.parametrize(("size", "delay"), [(LARGE, 2), (SMALL, 3)], ids=["large", "small"])
def test_in_the_long_run_every_save_writes_over_old_files(tmp_path: Path, size: int, delay: int) -> None:
    state = {"w": np.zeros(size)}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        inodes = []
        for step in range(8):
            state["w"][:] = step
            with faults.traced() as events:
                checkpointer.save(step)
            inodes.append(inode(tmp_path, step))
            assert recycled(events) == (step >= delay)
            assert everystep.verify(tmp_path / step_name(step)).intact
            assert (everystep.load(tmp_path)["w"] == step).all()
        for step in range(delay, 8):
            assert inodes[step] == inodes[step - delay]


@pytest.mark.parametrize("backend", ["uring", "threads", "buffered"])
def test_files_of_other_sizes_are_written_over_exactly(tmp_path: Path, backend: everystep.Options) -> None:
    options = everystep.Options(backend=backend, small_nbytes=0)  # type: ignore[arg-type]
    try:
        checkpointer = Checkpointer(tmp_path, keep=Keep(last=1), options=options, mode="sync")
        checkpointer.save(0, {})
    except everystep.errors.EngineUnavailable as error:
        checkpointer.close()
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    with checkpointer:
        for step, (elements, words) in enumerate(
            [
                (LARGE, 3),
                (LARGE // 2, 90_000),
                (LARGE * 2, 1),
                (10, 500),
                (LARGE, 0),
                (LARGE, 10),
                (0, 0),
                (7, 7),
            ],
            1,
        ):
            state = {"w": rng.random(elements), "text": "x" * words}
            checkpointer.save(step, state)
            assert everystep.verify(tmp_path / step_name(step)).intact
            found = everystep.load(tmp_path)
            assert np.array_equal(found["w"], state["w"])
            assert found["text"] == state["text"]


def test_files_that_are_being_read_are_not_written_over(tmp_path: Path) -> None:
    state = {"w": np.zeros(LARGE)}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(0)
        with everystep.open(tmp_path / step_name(0)) as reader:
            leaf = reader["w"]
            for step in range(1, 5):
                state["w"][:] = step
                checkpointer.save(step)
                assert (leaf[:] == 0).all()
            assert (reader.load()["w"] == 0).all()
        state["w"][:] = 5
        checkpointer.save(5)
        assert (everystep.load(tmp_path)["w"] == 5).all()


def test_strangers_in_a_retired_checkpoint_do_not_survive_in_a_new_one(tmp_path: Path) -> None:
    state = {"w": np.zeros(LARGE)}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(0)
        (tmp_path / step_name(0) / "notes.txt").write_text("mine")
        checkpointer.save(1)
        with faults.traced() as events:
            checkpointer.save(2)
        assert recycled(events)
        assert sorted(path.name for path in (tmp_path / step_name(2)).iterdir()) == ["manifest.json", SHARD]


def test_a_spare_that_vanished_is_no_obstacle(tmp_path: Path) -> None:
    state = {"w": np.zeros(LARGE)}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1)
        (spare,) = tmp_path.glob("*.retired")
        for file in spare.iterdir():
            file.unlink()
        spare.rmdir()
        checkpointer.save(2)
        assert checkpointer.steps == [2]
    assert everystep.verify(tmp_path).intact


def test_a_spare_with_files_missing_is_no_obstacle(tmp_path: Path) -> None:
    state = {"w": np.arange(float(LARGE))}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1)
        (spare,) = tmp_path.glob("*.retired")
        (spare / SHARD).unlink()
        (spare / "manifest.json").unlink()
        checkpointer.save(2)
    assert everystep.verify(tmp_path).intact
    assert np.array_equal(everystep.load(tmp_path)["w"], state["w"])


def test_a_backup_of_hard_links_keeps_what_it_has(tmp_path: Path) -> None:
    """`cp -al` and `rsync --link-dest` share files with the checkpoint that they were made of."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    state = {"w": np.ones(LARGE)}
    with Checkpointer(run, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(1)
        shutil.copytree(run / step_name(1), backup, copy_function=os.link)
        for step in range(2, 6):
            state["w"][:] = step
            checkpointer.save(step)
        assert not list(run.glob("step-000000000001*"))
        with faults.traced() as events:
            checkpointer.save(6)
        assert recycled(events)  # those that are not shared are still written over
    with everystep.open(backup) as opened:
        assert opened.step == 1
        assert (opened.load()["w"] == 1).all()


def test_one_shared_file_is_enough(tmp_path: Path) -> None:
    run, shared = tmp_path / "run", tmp_path / "model.safetensors"
    state = {"w": np.ones(SMALL)}
    with Checkpointer(run, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(1)
        os.link(run / step_name(1) / SHARD, shared)
        before = shared.read_bytes()
        for step in range(2, 7):
            state["w"][:] = step
            checkpointer.save(step)
    assert shared.read_bytes() == before


def test_files_behind_symbolic_links_are_not_written_over(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    state = {"w": np.ones(LARGE)}
    with Checkpointer(run, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(1)
        shard = run / step_name(1) / SHARD
        shard.rename(elsewhere)
        shard.symlink_to(elsewhere)
        before = elsewhere.read_bytes()
        for step in range(2, 6):
            state["w"][:] = step
            checkpointer.save(step)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["large", "small"])
def test_a_checkpoint_linked_into_a_run_is_neither_written_over_nor_removed(
    tmp_path: Path, size: int
) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    state = {"w": np.ones(size)}
    everystep.save(kept, state, step=1)
    run.mkdir()
    (run / step_name(1)).symlink_to(kept)
    with Checkpointer(run, state, keep=Keep(last=1), mode="sync") as checkpointer:
        assert checkpointer.restore() == 1
        for step in range(2, 6):
            state["w"][:] = step
            checkpointer.save(step)
        assert checkpointer.steps == [5]
    assert not list(run.glob("step-000000000001*"))
    assert everystep.verify(kept).intact
    assert (everystep.load(kept)["w"] == 1).all()


def test_a_directory_in_a_retired_checkpoint_is_no_obstacle(tmp_path: Path) -> None:
    state = {"w": np.zeros(LARGE)}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        checkpointer.save(0)
        (tmp_path / step_name(0) / "plots").mkdir()
        for step in range(1, 4):
            checkpointer.save(step)
        assert checkpointer.steps == [3]
    assert everystep.verify(tmp_path).intact


def test_a_checkpoint_that_resists_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fs.rename

    def rename(source: fs.Entry, target: fs.Entry) -> None:
        if step_name(1) in source.name and target.name.endswith(".retired"):
            raise PermissionError(errno.EPERM, "Operation not permitted", source.path)
        real(source, target)

    monkeypatch.setattr(fs, "rename", rename)
    state = {"w": np.zeros(4)}
    with everystep.Checkpointer(tmp_path, state, keep=everystep.Keep(last=2), mode="sync") as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
        for step in range(3, 7):
            with pytest.warns(
                RuntimeWarning, match=f"step {step} is saved, but .*could not remove .*{step_name(1)}"
            ):
                checkpointer.save(step)
        assert checkpointer.steps == [1, 5, 6]
        monkeypatch.undo()
        checkpointer.save(7)
        assert checkpointer.steps == [6, 7]


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["large", "small"])
def test_what_training_went_back_on_is_gone_for_good_when_the_next_save_is_durable(
    tmp_path: Path, size: int
) -> None:
    state = {"w": np.zeros(size)}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), mode="sync") as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step)
        with pytest.warns(RuntimeWarning, match="going back to step 2"):
            checkpointer.restore(2)
        with faults.traced() as events:
            checkpointer.save(3)
        assert checkpointer.steps == [1, 2, 3]
    retired = [
        n for n, event in enumerate(events) if event.call == "rename" and event.path2.endswith(".retired")
    ]
    synced = [n for n, event in enumerate(events) if event.call == "sync_dir" and event.path == str(tmp_path)]
    committed = next(n for n, event in enumerate(events) if event.path2 == str(tmp_path / step_name(3)))
    assert [os.path.basename(events[n].path) for n in retired] == [step_name(n) for n in (5, 4, 3)]
    assert any(max(retired) < n < committed for n in synced), "a kill, or a power cut, would bring it back"


def test_a_commit_that_fails_after_it_has_made_way_leaves_what_training_went_back_to(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), mode="sync") as checkpointer:
        for step in range(1, 5):
            state["w"][:] = step
            checkpointer.save(step)
        with pytest.warns(RuntimeWarning, match="going back to step 2"):
            checkpointer.restore(2)
        with faults.injected("rename:3:EIO"), pytest.raises(everystep.SaveFailed):
            checkpointer.save(3)  # the first two are those of steps 4 and 3
        assert checkpointer.steps == [1, 2]
        assert checkpointer.restore() == 2
        assert state["w"][0] == 2
        checkpointer.save(3)
        assert checkpointer.steps == [1, 2, 3]


def test_what_training_went_back_on_and_resists_goes_with_a_later_save(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), mode="sync") as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step)
        with pytest.warns(RuntimeWarning, match="going back to step 2"):
            checkpointer.restore(2)
        # Those of steps 6, 5 and 4; the fourth is that of step 3, which becomes the spare.
        with faults.injected("rename:1:EIO,rename:2:EIO,rename:3:EIO"), pytest.warns(match="tries again"):
            checkpointer.save(3)
        assert checkpointer.steps == [1, 2, 3, 4, 5, 6]
        with faults.injected("rename:2:EIO,rename:3:EIO"), pytest.warns(match="tries again"):
            checkpointer.save(5)  # in the place of one that resists
        assert checkpointer.steps == [1, 2, 3, 5, 6]
        checkpointer.save(7)
        assert checkpointer.steps == [1, 2, 3, 5, 7]
        checkpointer.save(8)
        assert checkpointer.steps == [1, 2, 3, 5, 7, 8]


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["large", "small"])
def test_going_back_again_and_again_recycles_namesakes(tmp_path: Path, size: int) -> None:
    """The spare may bear the name of a step that is there again, and is to be retired under that name."""
    state = {"w": np.zeros(size)}
    version = 1
    with Checkpointer(tmp_path, state, keep=Keep(last=9), mode="sync") as checkpointer:
        checkpointer.save(1)
        for last in (4, 2, 3, 2, 5, 2):
            for step in range(2, last + 1):
                version += 1
                state["w"][:] = version
                checkpointer.save(step)
                if step == 2 < version:
                    assert (tmp_path / f"{step_name(2)}.retired").is_dir(), "no spare for the next save"
            assert checkpointer.steps == list(range(1, last + 1))
            assert everystep.load(tmp_path / step_name(last))["w"][-1] == version
            with pytest.warns(RuntimeWarning, match="going back to step 1"):
                checkpointer.restore(1)
    assert not [name for name in os.listdir(tmp_path) if "." in name[1:] and name != "events.jsonl"]
