"""Leaves come, go and change on any rank while a training runs: all replan, and each save is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from support.worlds.disturbed_trainings import Mode, leftovers
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS

WORLD = 3
_BASE = np.arange(300.0).reshape(30, 10)

Change = Callable[[int, dict[str, Any]], None]


def _appears(rank: int, state: dict[str, Any]) -> None:
    """A stage's parameter gets its first gradient, and the optimizer a state for it."""
    if rank == 1:
        state["stage1"]["moment"] = _BASE + 1


def _appears_on_two(rank: int, state: dict[str, Any]) -> None:
    """A copy of the same on two ranks, and something of its own on one of them; none on rank 0."""
    if rank > 0:
        state["both"] = _BASE * 3
    if rank == 2:
        state["stage2"]["scale"] = np.float32(0.5).reshape(())


def _disappears(rank: int, state: dict[str, Any]) -> None:
    if rank == 1:
        del state["stage1"]["moment"]


def _copy_disappears(rank: int, state: dict[str, Any]) -> None:
    """The other holder of it writes it all from now on."""
    if rank == 1:
        del state["both"]


def _type_and_shape(rank: int, state: dict[str, Any]) -> None:
    if rank == 2:
        state["stage2"] = {"w": _BASE[:7].astype(np.float32), "scale": np.zeros(2, np.int64)}


def _two_at_once(rank: int, state: dict[str, Any]) -> None:
    """Different changes on two ranks."""
    if rank == 1:
        state["stage1"]["late"] = _BASE - 1
    if rank == 2:
        del state["stage2"]["scale"]


def _everywhere(rank: int, state: dict[str, Any]) -> None:
    state["common"] = np.full(9, 4.0)


def _nothing(rank: int, state: dict[str, Any]) -> None:
    """Planned once, that goes on to be enough."""


CHANGES: tuple[Change, ...] = (
    _nothing,
    _appears,
    _nothing,
    _appears_on_two,
    _type_and_shape,
    _copy_disappears,
    _disappears,
    _two_at_once,
    _everywhere,
)


def _counted_plans() -> list[int]:
    """How often this rank has planned, counted in the last number."""
    from everystep.store.ranks.write_shares import WriteShares

    plans: list[int] = []
    plan = WriteShares.plan

    def counted(self: WriteShares, *arguments: Any) -> None:
        plans[-1] += 1
        plan(self, *arguments)

    WriteShares.plan = counted  # type: ignore[method-assign]
    return plans


def _train(run: Path, mode: Mode, every: int) -> dict[str, Any]:
    """Saves through all changes; what one process finds of each save that differs from what all ranks had."""
    import torch.distributed as dist

    rank = dist.get_rank()
    plans = _counted_plans()
    state: dict[str, Any] = {"step": 0, "common": np.zeros(5), f"stage{rank}": {"w": _BASE + rank}}
    different: list[int] = []
    options: dict[str, Any] = {"mode": mode, "every": every, "timeout": PATIENCE_SECONDS}
    with everystep.Checkpointer(run, state, keep=everystep.Keep(last=100), **options) as checkpointer:
        for number, change in enumerate(CHANGES):
            change(rank, state)
            for step in range(number * every + 1, (number + 1) * every + 1):
                state["step"] = step
                plans.append(0)
                checkpointer.save(step)
            checkpointer.wait()
            mine: list[Any] = [None] * WORLD
            dist.all_gather_object(mine, state)
            if rank == 0 and not _equal(everystep.load(run, process_group="none"), mine):
                different.append(step)
        steps = checkpointer.steps
    return {"different": different, "steps": steps, "plans": plans}


def _equal(found: dict[str, Any], states: list[dict[str, Any]]) -> bool:
    """Whether it is all that the ranks had, and no more."""
    expected: dict[str, Any] = {}
    for state in states:
        expected |= _leaves(state)
    there = _leaves(found)
    return there.keys() == expected.keys() and all(
        np.array_equal(there[name], array) and there[name].dtype == array.dtype
        for name, array in expected.items()
    )


def _leaves(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        inner = (
            _leaves(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: np.asarray(value)}
        )
        found |= inner
    return found


@pytest.mark.parametrize(("mode", "every"), [("sync", 1), ("snapshot", 2)])
def test_the_leaves_of_any_rank_may_change(tmp_path: Path, mode: Any, every: int) -> None:
    run = tmp_path / "run"
    for found in values(launch(WORLD, _train, run, mode, every)):
        assert found["different"] == []
        assert found["steps"] == list(range(every, len(CHANGES) * every + 1, every))
        due = found["plans"][every - 1 :: every]
        # At the first save, and whenever something changed somewhere; never at one that is skipped.
        assert due == [int(number == 0 or change is not _nothing) for number, change in enumerate(CHANGES)]
        assert sum(found["plans"]) == sum(due)
    assert leftovers(run) == []


def _values_change(run: Path) -> tuple[list[int], Any]:
    """Ranks with states of one structure, until one of them has a plain value that the others do not have."""
    import torch.distributed as dist

    plans = _counted_plans()
    state: dict[str, Any] = {"losses": [], "deep": {"inside": {"epoch": 1}}, "w": np.zeros(5)}
    with everystep.Checkpointer(run, state, mode="sync", timeout=PATIENCE_SECONDS) as checkpointer:
        for step in range(1, 6):
            plans.append(0)
            state["losses"].append(0.5)  # on all ranks: no reason to replan
            if step == 3 and dist.get_rank() == 2:
                state["deep"]["inside"]["late"] = 7
            checkpointer.save(step)
    return plans, everystep.load(run, process_group="none")["deep"]


def test_a_plain_value_may_first_appear_on_any_rank(tmp_path: Path) -> None:
    for plans, found in values(launch(WORLD, _values_change, tmp_path / "run")):
        assert plans == [1, 0, 1, 0, 0]
        assert found == {"inside": {"epoch": 1, "late": 7}}


def _contradict(run: Path) -> list[Any]:
    """What appears on two ranks and cannot be one leaf is refused, by all; then training goes on."""
    import torch.distributed as dist

    rank = dist.get_rank()
    state: dict[str, Any] = {"w": np.zeros(5), f"own{rank}": np.ones(2)}
    found: list[Any] = []
    keep = everystep.Keep(last=9)
    with everystep.Checkpointer(run, state, mode="sync", keep=keep, timeout=PATIENCE_SECONDS) as checkpointer:
        checkpointer.save(1)
        others = {1: np.zeros((2, 3)), 2: np.zeros(6)}, {1: np.zeros(4), 2: np.ones(4)}, {1: 1.0, 2: 2.0}
        for step, on in enumerate(others, start=2):
            if rank in on:
                state["late"] = on[rank]
            with pytest.raises(everystep.errors.RanksDisagree, match="late") as caught:
                checkpointer.save(step)
            found.append(caught.value.ranks)
            state.pop("late", None)
            checkpointer.save(step)
        return [*found, checkpointer.steps]


def test_what_contradicts_on_ranks_other_than_0_is_refused(tmp_path: Path) -> None:
    found = values(launch(WORLD, _contradict, tmp_path / "run"))
    assert found == [[(1, 2), (2,), (1, 2), [1, 2, 3, 4]]] * WORLD
