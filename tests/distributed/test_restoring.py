"""Resuming on several ranks with states that do not fit, or that cannot be filled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from support.crashes.error_kinds import kind_of
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS


def _restore_what_fits(folder: Path) -> list[Any]:
    state: dict[str, Any] = {"w": np.ones(10), "gone": np.ones(3)}
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        c.save(1)
        c.state = {"w": np.zeros(10), "new": np.zeros(3)}
        with pytest.raises(everystep.StateMismatch, match="strict=False"):
            c.restore()
        untouched = float(c.state["w"].sum())
        with pytest.warns(RuntimeWarning, match="All else has been restored"):
            step = c.restore(strict=False)
        return [untouched, step, float(c.state["w"].sum())]


def test_what_fits_is_restored_on_all_ranks(tmp_path: Path) -> None:
    assert values(launch(2, _restore_what_fits, tmp_path)) == [[0.0, 1, 10.0]] * 2


def _restore_strictly_on_some(folder: Path) -> list[Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    state: Any = {"w": np.ones(10), "gone": np.ones(3)}
    found: list[Any] = []
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        c.save(1)
        c.state = {"w": np.zeros(10), "new": np.zeros(3)}
        with pytest.raises(everystep.errors.RanksDisagree) as restored:
            c.restore(strict=rank != 1)
        with pytest.raises(everystep.errors.RanksDisagree) as loaded:
            everystep.load(folder, c.state, strict=rank == 1, timeout=PATIENCE_SECONDS)
        for caught in (restored, loaded):
            found.append((str(caught.value).partition(". ")[0], caught.value.ranks))
        with pytest.warns(RuntimeWarning, match="All else has been restored"):
            found.append(c.restore(strict=False))  # and all go on
    return found


def test_strictness_that_differs_ends_on_all_ranks_at_once(tmp_path: Path) -> None:
    assert (
        values(launch(3, _restore_strictly_on_some, tmp_path))
        == [
            [
                ("rank 0 loads with strict=True, but rank 1 with strict=False", (0, 1)),
                ("rank 0 loads with strict=False, but rank 1 with strict=True", (0, 1)),
                1,
            ]
        ]
        * 3
    )


def _restore_nothing(folder: Path) -> list[Any]:
    import torch.distributed as dist

    state: Any = {"w": np.ones(10), "v": np.ones(3)}
    found: list[Any] = []
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        c.save(1)
        c.state = {"model": {"w": np.zeros(10), "v": np.zeros(3)}}
        with pytest.raises(everystep.StateMismatch, match="it is one state dict itself") as caught:
            c.restore(strict=False)
        found += [list(caught.value.extra), float(c.state["model"]["w"].sum())]
        # It is no error on one rank, as long as another has a place for something.
        c.state = {"new": np.zeros(3), **({"w": np.zeros(10)} if dist.get_rank() else {})}
        with pytest.warns(RuntimeWarning, match="All else has been restored"):
            found.append(c.restore(strict=False))
        found.append({name: float(array.sum()) for name, array in c.state.items()})
    return found


def test_a_restore_of_nothing_on_any_rank_is_an_error_on_all(tmp_path: Path) -> None:
    told = [["w", "v"], 0.0, 1]
    first, second = values(launch(2, _restore_nothing, tmp_path))
    assert first == [*told, {"new": 0.0}]
    assert second == [*told, {"new": 0.0, "w": 10.0}]


def _restore_into_thin_air(folder: Path) -> list[Any]:
    import torch.distributed as dist

    state: Any = {"w": np.ones(10)}
    found: list[Any] = []
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        c.save(1)
        c.state = 7 if dist.get_rank() == 1 else state
        with pytest.raises(everystep.EverystepError, match="cannot be restored") as caught:
            c.restore()
        found.append(kind_of(caught.value))
        c.state = state
        state["w"][:] = 0
        found += [c.restore(), float(state["w"].sum())]
    return found


def test_a_state_that_cannot_be_filled_on_one_rank_stops_all_and_at_once(tmp_path: Path) -> None:
    assert values(launch(2, _restore_into_thin_air, tmp_path)) == [
        ["RankFailed", 1, 10.0],
        ["StateMismatch", 1, 10.0],
    ]


def _pass_states(folder: Path) -> list[Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    state: Any = (np.zeros(10), 0, everystep.per_rank({"own": -1}))
    with everystep.Checkpointer(folder, mode="sync", timeout=PATIENCE_SECONDS) as c:
        first, state = c.restore(into=state)
        for step in range(first + 1, 4):
            state = (np.full(10, float(step)), step, everystep.per_rank({"own": 10 * step + rank}))
            c.save(step, state)
        c.check_replicas(state)
    bound: Any = {"w": np.zeros(10)} if rank else None
    with everystep.Checkpointer(folder, bound, mode="sync", timeout=PATIENCE_SECONDS) as c:
        step, found = c.restore(into=(np.zeros(10), 0, everystep.per_rank({"own": 0})))
        return [first, step, float(found[0].sum()), found[1], found[2].value]


def test_ranks_pass_new_states_and_get_new_ones_back(tmp_path: Path) -> None:
    assert values(launch(2, _pass_states, tmp_path)) == [
        [0, 3, 30.0, 3, {"own": 30}],
        [0, 3, 30.0, 3, {"own": 31}],
    ]


def _go_back(folder: Path) -> list[Any]:
    state: Any = {"w": np.zeros(10)}
    keep = everystep.Keep(last=9)
    with everystep.Checkpointer(folder, state, keep=keep, mode="sync", timeout=PATIENCE_SECONDS) as c:
        for step in (1, 2, 3, 4):
            state["w"][:] = step
            c.save(step)
        with pytest.warns(RuntimeWarning, match="going back to step 2"):
            c.restore(2)
        state["w"][:] = 30
        c.save(3)
        return [c.steps, c.last_durable, c.restore(), float(state["w"][0])]


def test_all_ranks_go_on_from_where_they_went_back_to(tmp_path: Path) -> None:
    assert values(launch(2, _go_back, tmp_path)) == [[[1, 2, 3], 3, 3, 30.0]] * 2


def _without_descriptors(folder: Path) -> list[Any]:
    import resource

    import torch.distributed as dist

    state: Any = {"w": np.zeros(300_000)}
    found: list[Any] = []
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        for step in (1, 2):
            state["w"][:] = step
            c.save(step)
        c.restore()  # what ranks keep open for each other is open from here on
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if dist.get_rank() == 1:
            free = os.open(os.devnull, os.O_RDONLY)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(everystep.EverystepError) as caught:
                c.restore()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        named = "Too many open files" in str(caught.value), "rank 1" in str(caught.value)
        found += [isinstance(caught.value, everystep.errors.OutOfResources), *named]
        state["w"][:] = 0
        found += [c.restore(), float(state["w"][0])]
    return found


def test_a_rank_short_of_descriptors_is_named_and_no_rank_falls_back(tmp_path: Path) -> None:
    assert values(launch(2, _without_descriptors, tmp_path)) == [
        [True, True, True, 2, 2.0],
        [True, True, False, 2, 2.0],
    ]


def _begin_in_a_used_run(folder: Path) -> list[Any]:
    state: Any = {"w": np.ones(10)}
    found: list[Any] = []
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        for step in (8, 9):
            c.save(step)
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS) as c:
        with pytest.raises(everystep.errors.RunInUse, match="steps 8 to 9"):
            c.save(1)
        found += [c.last_durable, c.steps, c.restore()]
        with pytest.raises(everystep.CheckpointExists, match="step 8 already"):
            c.save(8)
        c.save(10)
        found.append(c.steps)
    with everystep.Checkpointer(folder, state, mode="sync", timeout=PATIENCE_SECONDS, start_over=True) as c:
        c.save(9)  # one of the old ones has that name
        found += [c.last_durable, c.steps]
        c.save(10)
        found.append(c.steps)
    return found


def test_a_new_training_in_a_used_run_fails_on_all_ranks_at_once(tmp_path: Path) -> None:
    assert (
        values(launch(2, _begin_in_a_used_run, tmp_path))
        == [[None, [8, 9], 9, [8, 9, 10], 9, [9], [9, 10]]] * 2
    )
