"""When to kill: moments drawn at random over the whole training, some of them inside a save or a restore.

A moment is a place in the training (steps, and a share of the next one), not a time of day, so kills
spread over the run even if its starts are slow, and training always advances between them. A save or restore
of a small state ends before another process could notice it; there the script's process kills itself at the
nth call of the engine (`Kill`). Long saves and restores are also killed by the clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from everystep.checkpointer.drilling import Kill
from everystep.drill.activity import ActivityLog
from everystep.drill.processes import Trigger
from everystep.engine import READING, SAVING, Backend

Kind = Literal["saving", "restoring", "training"]

_ROTATION: tuple[Kind, ...] = ("saving", "training", "restoring", "training")
_SMALL_SAVE_CALLS, _LARGE_SAVE_CALLS = 6, 11
"""Calls of a save beside the writes of its data: directories, files, syncs, the rename, the manifest."""
_RESTORE_CALLS = 2
_SHORT_SECONDS = 0.05
"""A phase shorter than this cannot be hit by the clock."""


@dataclass(frozen=True, slots=True)
class Aim:
    """`place`: steps completed, and the share of the next one. `share`: how far into the save or restore."""

    kind: Kind
    place: float
    share: float
    coin: bool


@dataclass(slots=True)
class TrainingProfile:
    """How long things take, from the undisturbed run; corrected as restores are seen."""

    first_step: int
    last_step: int
    last_save: int
    step_seconds: float
    save_seconds: float
    save_calls: int
    restore_seconds: float
    restore_calls: int
    own_process: bool


def count_save_calls(stored_nbytes: int, backend: Backend) -> int:
    """How many calls of the engine a save of so many bytes makes, with default options."""
    tuning = replace(SAVING, backend=backend)
    beside = _SMALL_SAVE_CALLS if stored_nbytes <= tuning.small_nbytes else _LARGE_SAVE_CALLS
    return beside + tuning.count_writes(stored_nbytes)


def count_restore_calls(stored_nbytes: int) -> int:
    """A first guess. A restore that ends before it is killed gives the right number."""
    return _RESTORE_CALLS + math.ceil(stored_nbytes / READING.window_nbytes)


def draw_aims(times: int, profile: TrainingProfile, seed: int) -> list[Aim]:
    """So many moments, in the order in which training reaches them."""
    rng = random.Random(seed)
    kinds = [_ROTATION[number % len(_ROTATION)] for number in range(times)]
    rng.shuffle(kinds)
    if kinds[0] == "restoring":  # nothing to restore yet
        other = next(number for number, kind in enumerate(kinds) if kind != "restoring")
        kinds[0], kinds[other] = kinds[other], kinds[0]
    places = sorted(rng.uniform(profile.first_step, profile.last_step) for _ in kinds)
    return [
        Aim(kind, place, rng.random(), rng.random() < 0.5) for kind, place in zip(kinds, places, strict=True)
    ]


def how_to_kill(aim: Aim, profile: TrainingProfile) -> tuple[Trigger | None, Kill | None]:
    """The two ways to kill: a trigger for the drill's process, or a `Kill` for the script's own."""
    match aim.kind:
        case "training":
            part = aim.place - math.floor(aim.place)
            return _Moment(lambda log: _at(log) >= math.floor(aim.place), part * profile.step_seconds), None
        case "saving":
            step = min(math.ceil(aim.place), profile.last_save)
            if _by_call(aim, profile, profile.save_seconds):
                return None, Kill("saving", 1 + int(aim.share * profile.save_calls), step)
            return _Moment(lambda log: _saves(log, step), aim.share * profile.save_seconds), None
        case "restoring":
            if _by_call(aim, profile, profile.restore_seconds):
                # If it makes fewer calls, it dies right after it.
                return _Moment(lambda log: _at(log) >= 0, 0.0), Kill(
                    "restoring", 1 + int(aim.share * profile.restore_calls)
                )
            return _Moment(lambda log: bool(log.runs), aim.share * profile.restore_seconds), None


class _Moment:
    """A fixed time after something was seen."""

    def __init__(self, seen: Callable[[ActivityLog], bool], delay: float) -> None:
        self._seen = seen
        self._delay = delay
        self._due: float | None = None

    def __call__(self, log: ActivityLog, now: float) -> bool:
        if self._due is None and self._seen(log):
            self._due = now + self._delay
        return self._due is not None and now >= self._due


def _by_call(aim: Aim, profile: TrainingProfile, seconds: float) -> bool:
    # Under a launcher, the launcher would handle the death of the script.
    return profile.own_process and (seconds < _SHORT_SECONDS or aim.coin)


def _at(log: ActivityLog) -> int:
    return max(
        (activity.position for activity in log.runs.values() if activity.position is not None), default=-1
    )


def _saves(log: ActivityLog, step: int) -> bool:
    return any(activity.begun_at is not None and activity.begun[-1] >= step for activity in log.runs.values())
