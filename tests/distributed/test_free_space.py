"""A device that is full, under several ranks: rank 0 makes room before it begins a save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import everystep
from everystep.checkpointer.events import RemovedEarly, read_events
from everystep.store import WritableRun, list_steps
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS


def _on_a_full_device(folder: Path) -> list[Any]:
    state: Any = {"w": np.zeros(100_000)}

    def free(run: WritableRun) -> tuple[int, int]:
        """Space for two."""
        return (2 - len(list_steps(run.path))) * 1_200_000, 1 << 30

    WritableRun.free = free  # type: ignore[method-assign]
    with (
        warnings.catch_warnings(record=True) as caught,
        everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c,
    ):
        warnings.simplefilter("always")
        for step in range(1, 5):
            state["w"][:] = step
            c.save(step)
        state["w"][:] = 0
        restored = c.restore()
    return [restored, float(state["w"][0]), len([item for item in caught if "space" in str(item.message)])]


def test_several_ranks_go_on_when_the_device_is_full(tmp_path: Path) -> None:
    assert values(launch(2, _on_a_full_device, tmp_path)) == [[4, 4.0, 2], [4, 4.0, 0]]
    events, _ = read_events(tmp_path)
    assert [event.steps for event in events if isinstance(event, RemovedEarly)] == [(1,), (2,)]
    assert list_steps(str(tmp_path)) == [3, 4]
