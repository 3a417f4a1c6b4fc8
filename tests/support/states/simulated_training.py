"""A training on a simulated clock: steps, stalls and overlapped saves take the seconds a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from everystep.checkpointer.schedule import Cost, Schedule

Seconds = float | Callable[[int], float]


def at(value: Seconds, step: int) -> float:
    return value(step) if callable(value) else value


@dataclass
class Training:
    """`step` is a step by itself. A save stalls for `stall`, then writes `write` seconds beside the steps,
    which go slower by the share `slow` meanwhile. `failing` saves never become durable. Of the stall, the
    share `told` is known when the save is durable."""

    schedule: Schedule
    step: Seconds = 1.0
    stall: Seconds = 0.0
    write: Seconds = 0.0
    slow: float = 0.0
    told: float = 1.0
    failing: Callable[[int], bool] = lambda step: False
    stride: int = 1
    now: float = 1000.0
    done: int = 0
    undisturbed: float = 0.0
    saves: list[int] = field(default_factory=list)
    clock: dict[int, tuple[float, float]] = field(default_factory=dict)
    _in_flight: tuple[int, float, float, float] | None = None
    _stalled: float = 0.0

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self._one()
        return self

    def run_until(self, saves: int, limit: int = 200_000) -> Training:
        while len(self.saves) < saves:
            assert self.done < limit, f"only {len(self.saves)} saves in {limit} steps"
            self._one()
        return self

    def _one(self) -> None:
        saving = self._in_flight is not None
        self.done += self.stride
        work = at(self.step, self.done) * self.stride
        self.now += self._beside(work)
        self.undisturbed += work
        self.schedule.stepped(self.done, self.now, self._stalled, saving)
        self._stalled = 0.0
        if self.schedule.due(self.done, self.now):
            self._save()

    def _save(self) -> None:
        assert self._in_flight is None, "due while a save is in flight"
        step, began = self.done, self.now
        self.saves.append(step)
        self.clock[step] = (self.now, self.undisturbed)
        self.schedule.started(step, began)
        stall, write = at(self.stall, step), at(self.write, step)
        self.now += stall
        self._stalled = stall
        if write > 0:
            self._in_flight = (step, began, write, stall)
        elif not self.failing(step):
            self.schedule.finished(Cost(step, stall * self.told, stall))

    def _beside(self, work: float) -> float:
        """Seconds that `work` takes, some of it beside the save in flight."""
        if self._in_flight is None:
            return work
        step, began, left, stall = self._in_flight
        shared = min(work * (1 + self.slow), left)
        left -= shared
        if left > 0:
            self._in_flight = (step, began, left, stall)
        else:
            self._in_flight = None
            if not self.failing(step):
                self.schedule.finished(Cost(step, stall * self.told, stall + at(self.write, step)))
        return shared + work - shared / (1 + self.slow)

    def overhead(self, since: int) -> float:
        """Time lost per time of undisturbed work, from the save number `since` to the last one."""
        (began, work_before), (ended, work_after) = (
            self.clock[self.saves[since]],
            self.clock[self.saves[-1]],
        )
        return (ended - began) / (work_after - work_before) - 1


def waste_under_failures(interval: float, cost: float, mtbf: float, *, work: float, seed: int) -> float:
    """Seconds lost to saves, and to work done again, in a training that fails at random (memoryless)."""
    chance = np.random.default_rng(seed)
    left = round(work / interval)
    total = 0.0
    while left:
        survived = chance.exponential(mtbf, left)
        failed = survived < interval + cost
        total += survived[failed].sum() + (left - failed.sum()) * (interval + cost)
        left = int(failed.sum())
    return total - work
