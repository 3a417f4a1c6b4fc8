"""SIGKILL at every system call of saves whose shards go to a volume: nothing is lost, and nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.engine import faults
from everystep.store import step_name
from support.processes.child_processes import Pipe, forked

KEPT = 1


def _options(place: Path) -> everystep.Options:
    return everystep.Options(volumes=[place / "volume"], backend="buffered")


def _state(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(1000, step)}


def _train(place: Path, *steps: int) -> None:
    with everystep.Checkpointer(
        place / "run",
        None,
        keep=everystep.Keep(last=KEPT),
        options=_options(place),
        mode="sync",
        start_over=True,
    ) as checkpointer:
        for step in steps:
            checkpointer.state = _state(step)
            checkpointer.save(step)


def _replace(place: Path, *steps: int) -> None:
    for step in steps:
        everystep.save(place / "model", _state(step), step=step, overwrite=True, options=_options(place))


def _check_killed(work: Callable[..., None], checkpoint: str, root: Path, most: int, stride: int) -> int:
    """Kills `work` `stride` calls later each time. What is there is whole, and `most` saves lie on the volume
    once it has been done again. Returns the number of calls."""

    def child(pipe: Pipe, place: Path, fault: str) -> None:
        faults.install(*faults.parse(fault))
        work(place, 1, 2, 2)

    for nth in range(1, 1000, stride):
        place = root / str(nth)
        (place / "volume").mkdir(parents=True)
        with forked(child, place, f"any:{nth}:kill") as killed:
            code = killed.wait()
        assert code in (0, -signal.SIGKILL)
        path = place / checkpoint
        if path.exists() and (checkpoint == "model" or any(path.glob("step-" + "[0-9]" * 12))):
            assert everystep.verify(path).intact
        # What a crash has left, one that is killed in its turn must not forget.
        with forked(child, place, "write:1:kill") as killed:
            assert killed.wait() == -signal.SIGKILL
        work(place, 4, 5)
        assert everystep.load(path)["w"][0] == 5
        assert everystep.verify(path).intact
        assert sum(len(os.listdir(home)) for home in (place / "volume").iterdir()) <= most
        shutil.rmtree(place)
        if code == 0:
            return nth - 1
    raise AssertionError("it never gets through")


STRIDES = pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.crash_large)])


@STRIDES
def test_killed_at_calls_of_a_run(ram: Path, stride: int) -> None:
    # The one that is kept, and the one that has made place for it: that goes with the next save.
    assert _check_killed(_train, "run", ram, KEPT + 1, stride) > 50


@STRIDES
def test_killed_at_calls_of_a_save_that_replaces(ram: Path, stride: int) -> None:
    assert _check_killed(_replace, "model", ram, 1, stride) > 50


def test_what_a_killed_run_has_committed_keeps_its_shards_when_it_is_moved_away(ram: Path) -> None:
    """However short before its end the save was killed."""

    def child(pipe: Pipe, place: Path, fault: str) -> None:
        faults.install(*faults.parse(fault))
        _train(place, 1)

    moved = 0
    for nth in range(1, 100):
        place = ram / str(nth)
        (place / "volume").mkdir(parents=True)
        with forked(child, place, f"any:{nth}:kill") as killed:
            code = killed.wait()
        committed = place / "run" / step_name(1)
        if committed.exists():
            committed.rename(place / "archive")
            _train(place, 2, 3)
            assert everystep.verify(place / "archive").intact
            moved += code != 0
        shutil.rmtree(place)
        if code == 0:
            break
    assert moved, "no kill between the commit and the end"
