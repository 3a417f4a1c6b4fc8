"""A kill while a checkpoint with shards on volumes is retired: a checkpoint that stays loses none."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import everystep
from everystep.store import run as run_module
from everystep.store.commit.volumes import Ledger
from everystep.store.names import step_name
from support.processes.child_processes import Pipe, forked


def _checkpointer(folder: Path, state: dict[str, object]) -> everystep.Checkpointer:
    options = everystep.Options(volumes=[folder / "volume"])
    return everystep.Checkpointer(
        folder / "run", state, mode="sync", keep=everystep.Keep(last=1), options=options
    )


def _state(step: int) -> dict[str, object]:
    return {"w": np.full(1 << 18, step, np.float64)}


def _killed(pipe: Pipe, folder: Path, spot: str) -> None:
    """Saves steps 1 and 2; the retirement of step 1 dies at that spot."""
    state = _state(1)
    ckpt = _checkpointer(folder, state)
    ckpt.restore()
    ckpt.save(1)
    if spot == "before the rename":
        renaming_kills = {**vars(run_module.fs), "rename": lambda *names: os._exit(9)}
        run_module.fs = SimpleNamespace(**renaming_kills)  # type: ignore[assignment]
    else:
        Ledger.add = lambda self, ids: os._exit(9)  # type: ignore[method-assign]
    state.update(_state(2))
    ckpt.save(2)
    ckpt.close()


@pytest.mark.parametrize("spot", ["before the rename", "before the note"])
def test_a_checkpoint_moved_out_of_its_run_after_a_killed_retirement_keeps_its_shards(
    tmp_path: Path, spot: str
) -> None:
    (tmp_path / "volume").mkdir()
    with forked(_killed, tmp_path, spot) as child:
        assert child.wait() == 9
    moved = tmp_path / "moved"
    first = tmp_path / "run" / step_name(1)
    if spot == "before the rename":
        first.rename(moved)
    else:
        assert not first.exists()
    with _checkpointer(tmp_path, state := _state(0)) as ckpt:
        assert ckpt.restore() == 2
        for step in (3, 4):
            state.update(_state(step))
            ckpt.save(step)
    if spot == "before the rename":
        assert np.array_equal(everystep.load(moved)["w"], np.full(1 << 18, 1.0))
    left = {path.parent.name for path in (tmp_path / "volume").rglob("*.safetensors")}
    # Those of step 4, those of step 3 until the next save, and those that were moved.
    assert len(left) == (3 if spot == "before the rename" else 2)
