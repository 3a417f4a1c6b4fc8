"""Something is wrong on one rank: all learn what and where, nothing is committed, the next save succeeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everystep
from support.worlds import random_rank_troubles as failing_random
from support.worlds import rank_troubles as failing
from support.worlds.disturbed_trainings import Mode
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS
from support.worlds.rank_troubles import Got

pytestmark = pytest.mark.race

WORLD = 3

DEVICE_TROUBLES = [
    (1, "open:1:EIO"),
    (1, "write:1:ENOSPC"),
    (2, "sync:1:EIO"),
    (1, "sync_dir:1:EIO"),
    (0, "mkdir:1:ENOSPC"),
    (0, "write:1:ENOSPC"),
    (0, "sync:1:EIO"),
    (0, "rename:1:EIO"),
]


def gathered(found: list[Any]) -> dict[str, list[Got]]:
    """What each rank got in each trouble."""
    assert [notes for _, notes in found] == [[]] * len(found)
    return {name: [got[name] for got, _ in found] for name in found[0][0]}


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_the_device_of_one_rank_fails(tmp_path: Path, mode: Mode) -> None:
    found = gathered(values(launch(WORLD, failing.failing_device, tmp_path / "run", mode, DEVICE_TROUBLES)))
    for rank, fault in DEVICE_TROUBLES:
        got = found[f"{fault} on {rank}"]
        own = "StorageFull" if fault.endswith("ENOSPC") else "SaveFailed"
        for other, (kind, message, ranks) in enumerate(got):
            if other == rank:
                assert kind == own, (fault, got)
            else:
                assert (kind, ranks) == ("RankFailed", (rank,)), (fault, got)
                assert f"failed on rank {rank}: {own}: " in message, message


@pytest.mark.parametrize("mode", ["sync", pytest.param("overlap", marks=pytest.mark.slow)])
def test_ranks_that_do_not_save_the_same(tmp_path: Path, mode: Mode) -> None:
    found = gathered(values(launch(WORLD, failing.disagreeing, tmp_path / "run", mode)))
    for name, rank in (
        ("unsupported on 1", 1),
        ("unsupported on 0", 0),
        ("unsupported on 1, replanned", 1),
    ):
        for other, (kind, message, _) in enumerate(found[name]):
            assert kind == ("UnsupportedState" if other == rank else "RankFailed"), (name, other, message)
            assert "odd" in message
            assert other == rank or f"rank {rank}" in message
    assert [kind for kind, _, _ in found["values of 1"]] == ["RanksDisagree"] * WORLD
    assert all("ranks 0 and 1" in message and "'lr'" in message for _, message, _ in found["values of 1"])
    assert [kind for kind, _, _ in found["copy of 2"]] == ["RanksDisagree"] * WORLD
    assert all("model.0" in message and "rank 2" in message for _, message, _ in found["copy of 2"])


MISSING = {
    # What each rank gets.
    "1 skips": ["RankFailed", "", "RankFailed"],
    "0 skips": ["", "RankFailed", "RankFailed"],
    "2 skips, replanned": ["RankFailed", "RankFailed", ""],
    "1 ahead": ["RanksDisagree"] * WORLD,
    # Who is behind is told at once, and the others wait whether it gets there.
    "1 behind": ["RankFailed", "RanksDisagree", "RankFailed"],
    "0 ahead": ["RankFailed", "RanksDisagree", "RanksDisagree"],
    "0 behind": ["RanksDisagree"] * WORLD,
    "bad step on 1": ["RankFailed", "ValueError", "RankFailed"],
}


def missing(run: Path, mode: Mode, troubles: list[str]) -> dict[str, list[Got]]:
    found = gathered(values(launch(WORLD, failing.missing, run, mode, troubles)))
    assert {name: _kinds(found, name) for name in troubles} == {name: MISSING[name] for name in troubles}
    return found


def test_ranks_that_do_not_come_to_a_save(tmp_path: Path) -> None:
    troubles = ["1 skips", "0 skips", "2 skips, replanned", "1 ahead", "1 behind"]
    found = missing(tmp_path / "run", "overlap", troubles)
    assert "rank 1 (last at: " in found["1 skips"][0][1]
    assert "rank 0 (last at: " in found["0 skips"][1][1]
    assert found["1 skips"][0][2] == found["1 skips"][2][2] == (1,)
    for _, message, _ in found["1 ahead"]:
        assert "rank 1 called the Checkpointer's save with step" in message
    assert "rank 1 (last at: the Checkpointer's save, step" in found["1 behind"][0][1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_ranks_that_do_not_come_to_a_save_in_all_ways(tmp_path: Path, mode: Mode) -> None:
    missing(tmp_path / "run", mode, list(MISSING))


@pytest.mark.parametrize("mode", ["sync", pytest.param("overlap", marks=pytest.mark.slow)])
def test_a_rank_that_was_given_up_disturbs_no_other(tmp_path: Path, mode: Mode) -> None:
    found = gathered(values(launch(WORLD, failing.straggling, tmp_path / "run", mode)))
    assert _kinds(found, "late") == ["RankFailed"] * WORLD
    assert all("nothing heard from rank 1" in message for _, message, _ in found["late"])
    assert _kinds(found, "again") == _kinds(found, "again, durable") == [""] * WORLD


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("seed", range(8))
def test_ranks_with_minds_of_their_own(tmp_path: Path, mode: Mode, seed: int) -> None:
    found = values(launch(WORLD, failing_random.wander, tmp_path / "run", mode, seed, 15, timeout=300))
    assert found == [[]] * WORLD


def test_weights_of_one_rank_change_while_they_are_written(tmp_path: Path) -> None:
    got = gathered(values(launch(2, failing.mutated, tmp_path / "run")))["mutated on 1"]
    assert [kind for kind, _, _ in got] == ["RankFailed", "MutatedDuringSave"]
    assert "failed on rank 1: MutatedDuringSave: " in got[0][1]


def test_troubles_of_single_saves_and_of_opening(tmp_path: Path) -> None:
    found = values(launch(WORLD, failing.one_by_one, tmp_path))
    got = {name: [rank[name] for rank in found] for name in found[0]}
    kinds = {name: _kinds(got, name) for name in got}
    assert kinds["another path"] == ["RankFailed"] * WORLD
    assert f"save to {tmp_path / 'a'}" in got["another path"][0][1]
    assert f"save to {tmp_path / 'b'}" in got["another path"][1][1]
    for name in ("the same path", "trusted copies", "unlocked"):
        assert kinds[name] == [""] * WORLD
    assert kinds["it exists"] == ["CheckpointExists"] * WORLD
    assert kinds["copies"] == ["RanksDisagree"] * WORLD
    assert all("w: the copy of rank 1 differs" in message for _, message, _ in got["copies"])
    assert kinds["writers"][1] == "RanksDisagree"
    assert all("writers=" in message and "rank 1" in message for _, message, _ in got["writers"])
    assert kinds["volume"] == ["RankFailed", "StorageMissing", "RankFailed"]
    assert all(
        f"the volume {tmp_path / 'none'} does not exist on " in message for _, message, _ in got["volume"]
    )
    assert kinds["no directory"][1:] == ["RankFailed"] * (WORLD - 1)
    assert "rank 0" in got["no directory"][1][1]
    assert kinds["locked"] == ["Locked"] * WORLD
    assert all("is being written by process" in message for _, message, _ in got["locked"])


def _kinds(found: dict[str, list[Got]], name: str) -> list[str]:
    return [kind for kind, _, _ in found[name]]


def _caught(folder: Path) -> tuple[list[str], list[str]]:
    """The types that callers may catch what a save raises by: of values that differ, and of a silent rank."""
    import torch.distributed as dist

    rank = dist.get_rank()

    def catchable(function: Callable[[], Any]) -> list[str]:
        with pytest.raises(everystep.SaveFailed) as caught:
            function()
        kinds = (everystep.RankFailed, everystep.errors.RanksDisagree, TimeoutError)
        return [kind.__name__ for kind in kinds if isinstance(caught.value, kind)]

    differing = catchable(lambda: everystep.save(folder / "one", {"n": rank}, timeout=PATIENCE_SECONDS))
    if rank == 1:
        return differing, []
    return differing, catchable(lambda: everystep.save(folder / "two", {}, timeout=0.5))


def test_every_failure_of_a_save_is_a_save_failed_and_a_time_out_a_timeout_error(tmp_path: Path) -> None:
    first, second = values(launch(2, _caught, tmp_path))
    assert first == (["RanksDisagree"], ["RankFailed", "TimeoutError"])
    assert second[0] == ["RanksDisagree"]
