"""Resuming: the newest checkpoint of a run that is whole, the same one on all ranks.

A damaged checkpoint is passed over. With several ranks, one that sees damage makes all pass over it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.errors import CheckpointNotFound, CorruptCheckpoint, HoldfastError, ReadFailed
from holdfast.store import Checkpoint, Crew
from holdfast.store.loading import load_together
from holdfast.store.unison import open_together
from holdfast.team import Team


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on. `candidates`: the steps there were to choose from."""

    step: int
    nbytes: int
    seconds: float
    candidates: tuple[int, ...]


def resume(
    crew: Crew,
    state: object,
    steps: Sequence[int],
    path_of: Callable[[int], str],
    only: int | None,
    passed_over: Callable[[int, HoldfastError], None],
) -> Resumed | None:
    """Fills the state from the newest of these steps that is intact; None when there is none at all.

    With `only`, from that one. The coordinator's list of steps counts.
    """
    with crew.again(f"restore from {os.path.dirname(path_of(0))}") as team:
        return _resume(crew, team, state, steps, path_of, only, passed_over)


def _resume(
    crew: Crew,
    team: Team | None,
    state: object,
    steps: Sequence[int],
    path_of: Callable[[int], str],
    only: int | None,
    passed_over: Callable[[int, HoldfastError], None],
) -> Resumed | None:
    candidates = _agreed(crew, team, steps)
    failures: list[HoldfastError] = []
    for step in reversed(candidates if only is None else [only]):
        began = time.perf_counter()
        try:
            nbytes = _load(crew, team, state, path_of(step), step)
        except (CorruptCheckpoint, ReadFailed) as error:
            if only is not None:
                raise
            failures.append(error)
            passed_over(step, error)
        except CheckpointNotFound:
            run = os.path.dirname(path_of(step))
            raise CheckpointNotFound(f"run {run} has no checkpoint of step {step}") from None
        else:
            return Resumed(step, nbytes, time.perf_counter() - began, tuple(candidates))
    if failures:
        raise CorruptCheckpoint(
            f"none of the {len(failures)} checkpoints is intact, the newest: {failures[0]}",
            path=os.path.dirname(path_of(candidates[-1])),
        ) from failures[0]
    return None


def _agreed(crew: Crew, team: Team | None, steps: Sequence[int]) -> list[int]:
    if team is None:
        return list(steps)
    crew.restart(team)
    mine = msgspec.json.encode(list(steps)) if crew.leads else None
    return msgspec.json.decode(team.tell("steps", mine, crew.timeout), type=list[int])


def _load(crew: Crew, team: Team | None, state: Any, path: str, step: int) -> int:
    if team is None:
        with Checkpoint(path) as checkpoint:
            _check(checkpoint, step)
            checkpoint.load(state)
            return checkpoint.nbytes
    with open_together(team, path, crew.timeout, lambda found: _check(found, step)) as checkpoint:
        load_together(
            team,
            checkpoint,
            state,
            select=None,
            verify=True,
            strict=True,
            timeout=crew.timeout,
            link=crew.link,
        )
        return checkpoint.nbytes


def _check(checkpoint: Checkpoint, step: int) -> None:
    if checkpoint.step != step:
        reason = f"it is a checkpoint of step {checkpoint.step}, put in the place of another"
        raise CorruptCheckpoint(reason, path=checkpoint.path)
