"""Promise: a run that starts from another checkpoint counts from 0, and says what was not filled."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep


def _start(run: Path, state: Any, source: Path, **given: Any) -> tuple[int, list[str]]:
    with (
        everystep.Checkpointer(run, state, mode="sync") as ckpt,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        first = ckpt.restore(init_from=source, **given)
    return first, [str(warning.message) for warning in seen]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    saved = {
        "model": {"w": np.arange(3)},
        "lr_scheduler": {"last": 300},
        "optim": {"m": np.ones(3)},
        "epoch": 4,
    }
    everystep.save(tmp_path / "source", saved, step=300)
    return tmp_path / "source"


def test_a_fine_tune_trains_all_of_its_steps(source: Path, tmp_path: Path) -> None:
    state = {"model": {"w": np.zeros(3, int)}}
    trained = 0
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        for step in range(ckpt.restore(init_from=source), 5):
            trained += 1
            ckpt.save(step + 1)
        assert ckpt.steps == [3, 4, 5]
    assert trained == 5
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        assert ckpt.restore(init_from=source) == 5


def test_the_steps_of_the_source_go_on_when_asked(source: Path, tmp_path: Path) -> None:
    state = {"model": {"w": np.zeros(3, int)}}
    assert _start(tmp_path / "run", state, source, continue_steps=True)[0] == 300
    with (
        everystep.Checkpointer(tmp_path / "other", state) as ckpt,
        pytest.raises(ValueError, match="init_from="),
    ):
        ckpt.restore(continue_steps=True)


def test_one_line_says_what_was_filled_what_was_left_and_what_is_alike(source: Path, tmp_path: Path) -> None:
    state = {
        "model": {"w": np.zeros(3, int)},
        "optimizer": {"m": np.zeros(3)},
        "scheduler": {"last": 0},
        "epoch": 0,
    }
    first, said = _start(tmp_path / "run", state, source)
    assert first == 0
    assert said == [
        f"started from {source}: filled 'model', 'epoch', left 'optimizer', 'scheduler' as they were, "
        "did not use 'lr_scheduler', 'optim' of the checkpoint, and counts from step 0 (that checkpoint is "
        "of step 300; with continue_steps=True the run goes on from there). Is 'optim' there what the state "
        "calls 'optimizer'? Then give both one name. Is 'lr_scheduler' there what the state calls "
        "'scheduler'? Then give both one name"
    ]
    assert state["epoch"] == 4
    assert state["scheduler"] == {"last": 0}


def test_a_start_that_fills_and_uses_everything_is_silent(tmp_path: Path) -> None:
    everystep.save(tmp_path / "source", {"model": {"w": np.arange(3)}})
    assert _start(tmp_path / "run", {"model": {"w": np.zeros(3, int)}}, tmp_path / "source") == (0, [])


def test_later_launches_do_not_speak_of_the_start(source: Path, tmp_path: Path) -> None:
    state = {"model": {"w": np.zeros(3, int)}}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        ckpt.restore(init_from=source)
        ckpt.save(1)
    assert _start(tmp_path / "run", state, source) == (1, [])
