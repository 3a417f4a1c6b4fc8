"""A tag that several ranks save: all of it or nothing, whichever rank or call fails. Without DeepSpeed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

import everystep
from everystep.engine import faults
from everystep.errors import MutatedDuringSave, SaveFailed
from everystep.integrations.deepspeed import tags
from everystep.integrations.deepspeed.saves import TagSave
from support.crashes.power_cuts import Budget, Disk

MODEL = "mp_rank_00_model_states.pt"
SECONDS = 60


def optimizer_of(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def alone(said: str | None) -> list[str | None]:
    return [said]


def save(folder: Path, tag: str, step: int) -> None:
    saving = TagSave(str(folder), tag, step, alone, is_coordinator=True)
    for name in (MODEL, optimizer_of(0)):
        saving.write(name, {"w": np.full(10, step)}, watched=False)
    saving.commit(latest=True)


def content(folder: Path) -> set[int]:
    """What the files of the newest tag have in them."""
    tag = tags.read_latest(str(folder))
    assert tag is not None
    files = tags.files_of(str(folder / tag))
    assert len(files) == 2
    return {int(everystep.load(path)["w"][0]) for path in files}


def test_a_tag_has_all_files_and_is_named_as_the_latest(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    assert tags.read_latest(str(tmp_path)) == "b"
    assert content(tmp_path) == {2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_without_latest_the_file_keeps_naming_the_tag_before(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    saving = TagSave(str(tmp_path), "b", 2, alone, is_coordinator=True)
    saving.write(MODEL, {"w": np.ones(3)}, watched=False)
    saving.commit(latest=False)
    assert (tmp_path / "b").is_dir()
    assert tags.read_latest(str(tmp_path)) == "a"


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_failing_call_leaves_the_tag_before_or_the_new_one(tmp_path: Path, tag: str) -> None:
    save(tmp_path, "a", 1)
    for call in range(1, 200):
        failed = False
        with faults.injected(f"any:{call}:EIO"):
            try:
                save(tmp_path, tag, 2)
            except OSError:
                failed = True
        assert content(tmp_path) in ({1}, {2})
        if not failed:
            break
    assert content(tmp_path) == {2}
    assert call > 20


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_kill_at_every_third_call_leaves_the_tag_before_or_the_new_one(tmp_path: Path, tag: str) -> None:
    def killed_at(call: int, folder: Path) -> bool:
        pid = os.fork()
        if pid == 0:
            faults.install(faults.Fault("any", call, "kill"))
            save(folder, tag, 2)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    found = []
    for call in range(1, 200, 3):
        folder = tmp_path / str(call)
        save(folder, "a", 1)
        killed = killed_at(call, folder)
        found.append(content(folder))
        assert found[-1] in ({1}, {2})
        if not killed:
            break
    assert found[0] == {1}
    assert found[-1] == {2}
    assert len(found) > 8


@pytest.mark.parametrize("tag", ["a", "b"], ids=["replaced", "new"])
def test_a_power_cut_leaves_the_tag_before_or_the_new_one(tmp_path: Path, tag: str) -> None:
    root, after = tmp_path / "disk", tmp_path / "after"
    root.mkdir()
    after.mkdir()
    with faults.traced() as first:
        save(root, "a", 1)
    with faults.traced() as second:
        save(root, tag, 2)
    earlier, events = (
        [event for event in some if event.path.startswith(str(root))] for some in (first, second)
    )
    disk, rng, tried = Disk(root), random.Random(0), set()
    for event in earlier:
        disk.replay(event)
    found: set[int] = set()
    for number, event in enumerate(events, 1):
        disk.replay(event)
        for image in disk.crashes(Budget(), rng):
            reported = number == len(events)
            if (image.digest(), reported) not in tried:
                tried.add((image.digest(), reported))
                image.write(after)
                found = content(after)
                assert found in (({2},) if reported else ({1}, {2}))
    assert found == {2}
    assert len(tried) > 40


def test_a_change_while_the_training_goes_on_fails_the_save(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    array = np.zeros(1 << 20)
    saving = TagSave(str(tmp_path), "b", 2, alone, is_coordinator=True)
    saving.write(MODEL, {"w": array}, watched=True)
    array += 1
    with pytest.raises(MutatedDuringSave, match="w changed while it was written"):
        saving.commit(latest=True)
    assert content(tmp_path) == {1}
    assert not (tmp_path / "b").exists()


def in_ranks(
    count: int, act: Callable[[int, Callable[[str | None], list[str | None]]], None]
) -> list[object]:
    """What each of so many ranks raises, if anything. They are threads here."""
    barrier = Barrier(count)
    said: list[str | None] = [None] * count

    def run(rank: int) -> object:
        def gather(own: str | None) -> list[str | None]:
            said[rank] = own
            barrier.wait(SECONDS)
            heard = list(said)
            barrier.wait(SECONDS)
            return heard

        try:
            act(rank, gather)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_if_one_rank_fails_all_raise_and_there_is_no_tag(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)

    def act(rank: int, gather: Callable[[str | None], list[str | None]]) -> None:
        saving = TagSave(str(tmp_path), "b", 2, gather, is_coordinator=rank == 0)
        state = {"w": object() if rank == 1 else np.ones(3)}
        saving.write(optimizer_of(rank), state, watched=False)
        saving.commit(latest=True)

    other, own = in_ranks(2, act)
    assert isinstance(own, everystep.UnsupportedState)
    assert isinstance(other, SaveFailed)
    assert "because of rank 1: UnsupportedState" in str(other)
    assert content(tmp_path) == {1}
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("strange")])
def test_a_failure_of_any_kind_reaches_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(self: object, flat: object) -> None:
        raise error

    monkeypatch.setattr("everystep.store.Commit.run", fails)

    def act(rank: int, gather: Callable[[str | None], list[str | None]]) -> None:
        saving = TagSave(str(tmp_path), "b", 2, gather, is_coordinator=rank == 0)
        if rank == 1:
            saving.write(optimizer_of(rank), {"w": np.ones(3)}, watched=False)
        saving.commit(latest=True)

    other, own = in_ranks(2, act)
    assert own is error
    assert isinstance(other, SaveFailed)
    assert not (tmp_path / "b").exists()


def test_a_tag_may_be_below_another_directory(tmp_path: Path) -> None:
    save(tmp_path, "first/a", 1)
    assert tags.read_latest(str(tmp_path)) == "first/a"
    assert content(tmp_path) == {1}
    assert tags.newest_first(str(tmp_path)) == [str(tmp_path / "first" / "a")]


def test_all_ranks_raise_if_the_leader_cannot_commit(tmp_path: Path) -> None:
    save(tmp_path, "a", 1)
    (tmp_path / "a" / "folder").mkdir()  # to replace the tag would remove it

    def act(rank: int, gather: Callable[[str | None], list[str | None]]) -> None:
        saving = TagSave(str(tmp_path), "a", 2, gather, is_coordinator=rank == 0)
        saving.write(optimizer_of(rank), {"w": np.full(10, 2)}, watched=False)
        saving.commit(latest=True)

    own, other = in_ranks(2, act)
    assert isinstance(own, everystep.CheckpointExists)
    assert isinstance(other, SaveFailed)
    assert content(tmp_path) == {1}


def test_files_of_all_ranks_are_in_the_tag(tmp_path: Path) -> None:
    def act(rank: int, gather: Callable[[str | None], list[str | None]]) -> None:
        saving = TagSave(str(tmp_path), "a", 1, gather, is_coordinator=rank == 0)
        saving.write(optimizer_of(rank), {"w": np.full(10, rank)}, watched=False)
        saving.commit(latest=True)

    assert in_ranks(3, act) == [None] * 3
    files = tags.files_of(str(tmp_path / "a"))
    assert [Path(path).name for path in files] == [optimizer_of(rank) for rank in range(3)]
    assert [int(everystep.load(path)["w"][0]) for path in files] == [0, 1, 2]
