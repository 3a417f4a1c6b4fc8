"""Checkpoints of one file and of two in one run: each may be written over by the other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Checkpointer, Keep
from everystep.engine import faults
from everystep.store import step_name

SHARD = "r00000.v0.safetensors"
ONE, TWO = [SHARD], ["manifest.json", SHARD]
SMALL, LARGE = 1000, 300_000  # elements of 8 bytes


def names(run: Path, step: int) -> list[str]:
    return sorted(os.listdir(run / step_name(step)))


def recycled(events: list[faults.TracedCall]) -> bool:
    return any(event.call == "rename" and event.path.endswith(".retired") for event in events)


def synced_directories(events: list[faults.TracedCall]) -> list[str]:
    return [os.path.basename(event.path) for event in events if event.call == "sync_dir"]


def test_each_form_is_written_over_the_other(tmp_path: Path) -> None:
    sizes = [SMALL, SMALL, SMALL, LARGE, LARGE, LARGE, LARGE, SMALL, SMALL, SMALL, 3 * SMALL, SMALL // 10]
    sizes += [SMALL] * 3
    state: dict[str, object] = {}
    written_over = 0
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        for step, size in enumerate(sizes):
            state["w"] = np.arange(size) + step
            with faults.traced() as events:
                checkpointer.save(step)
            assert names(tmp_path, step) == (ONE if size < LARGE else TWO)
            assert everystep.verify(tmp_path / step_name(step)).intact
            assert np.array_equal(everystep.load(tmp_path)["w"], state["w"])  # type: ignore[arg-type]
            written_over += recycled(events)
    assert written_over >= len(sizes) - 4


def test_the_directory_of_a_spare_of_ours_is_not_synced_again(tmp_path: Path) -> None:
    state = {"w": np.zeros(SMALL)}
    with Checkpointer(tmp_path, state, keep=Keep(last=1), mode="sync") as checkpointer:
        for step in range(3):
            checkpointer.save(step)
        with faults.traced() as events:
            checkpointer.save(3)
        assert recycled(events)
        assert synced_directories(events) == [tmp_path.name]
        assert not any(event.creates for event in events)


@pytest.mark.parametrize("why", ["strangers", "another process"])
def test_a_directory_of_which_we_are_not_sure_is_synced(tmp_path: Path, why: str) -> None:
    """Something was removed from it just now; or another program made it, and may not have synced it."""
    state = {"w": np.zeros(SMALL)}
    with Checkpointer(tmp_path, state, keep=Keep(last=3), mode="sync") as checkpointer:
        for step in range(3):
            checkpointer.save(step)
            if why == "strangers":
                (tmp_path / step_name(step) / "notes.txt").write_text("mine")
        if why == "strangers":
            for step in (3, 4):
                checkpointer.save(step)
            with faults.traced() as events:
                checkpointer.save(5)
    if why == "another process":
        with Checkpointer(tmp_path, state, keep=Keep(last=3), mode="sync") as checkpointer:
            checkpointer.restore()
            for step in (3, 4):
                checkpointer.save(step)
            with faults.traced() as events:
                checkpointer.save(5)
    assert recycled(events)
    assert synced_directories(events) == [f"{step_name(5)}.partial", tmp_path.name]
    assert names(tmp_path, 5) == ONE


def test_checkpoints_of_both_forms_are_listed_kept_and_restored(tmp_path: Path) -> None:
    state = {"w": np.zeros(SMALL)}
    with Checkpointer(
        tmp_path, state, mode="sync", options=everystep.Options(small_nbytes=0)
    ) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, state, mode="sync") as checkpointer:
        assert checkpointer.steps == [1]
        assert checkpointer.restore() == 1
        state["w"] += 1
        checkpointer.save(2)
        assert (names(tmp_path, 1), names(tmp_path, 2)) == (TWO, ONE)
        state["w"] -= 7
        assert checkpointer.restore() == 2
        assert state["w"][0] == 1
    assert everystep.load(tmp_path / step_name(1))["w"][0] == 0
