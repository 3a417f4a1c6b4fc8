"""Observers of a run hear of its moments, in order; the event log and a drill are two of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import Checkpointer
from everystep.checkpointer.events import Failed, read_events
from everystep.checkpointer.run_observer import Durable, Moment
from everystep.engine import faults


class Recorder:
    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def observe(self, moment: Moment) -> None:
        self.moments.append(moment)

    @property
    def names(self) -> list[tuple[str, int | None]]:
        return [(type(moment).__name__, getattr(moment, "step", None)) for moment in self.moments]


def observed(run: Path, state: object) -> tuple[Checkpointer, Recorder]:
    ckpt = Checkpointer(run, state, mode="sync", every=2)
    recorder = Recorder()
    ckpt._observers.add(recorder)
    return ckpt, recorder


def test_the_moments_of_a_run_come_in_order(tmp_path: Path) -> None:
    state = {"w": np.zeros(10)}
    ckpt, recorder = observed(tmp_path, state)
    with ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
        with faults.injected("sync:1:EIO"), pytest.raises(everystep.SaveFailed):
            ckpt.save(4)
    again, restoring = observed(tmp_path, state)
    with again:
        again.restore()
    assert recorder.names == [
        ("Restoring", None),
        ("NothingToRestore", None),
        ("Completed", 1),
        ("Completed", 2),
        ("Saving", 2),
        ("Durable", 2),
        ("Saved", 2),
        ("Completed", 4),
        ("Saving", 4),
        ("Failed", 4),
        ("Closed", None),
    ]
    assert restoring.names == [("Restoring", None), ("Restored", 2), ("Closed", None)]


def test_a_durable_checkpoint_is_announced_before_retention_removes_anything(tmp_path: Path) -> None:
    there: list[list[int]] = []

    class Looking:
        def observe(self, moment: Moment) -> None:
            if isinstance(moment, Durable):
                there.append(ckpt.steps)

    with Checkpointer(tmp_path, {"n": 1}, mode="sync", keep=everystep.Keep(last=1)) as ckpt:
        ckpt._observers.add(Looking())
        for step in range(1, 4):
            ckpt.save(step)
        assert ckpt.steps == [3]
    assert there == [[1], [1, 2], [2, 3]]


def test_a_save_that_cannot_begin_is_in_the_events(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, {"x": object()}, mode="sync")
    with ckpt, pytest.raises(everystep.UnsupportedState):
        ckpt.save(1)
    events, skipped = read_events(tmp_path)
    assert skipped == 0
    assert [(event.step, event.error) for event in events if isinstance(event, Failed)] == [
        (1, "UnsupportedState")
    ]
