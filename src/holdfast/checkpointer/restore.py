"""Resuming: the newest checkpoint of a run that is whole, the same one on all ranks.

A damaged checkpoint is passed over (`shows_damage`). With several ranks, one that sees damage makes all pass
over it. One that cannot be read for another reason (no descriptors, no memory, no permission) may be whole:
that error is raised, on all ranks, since a training that went on from an older one would write over it. A
state that cannot be restored in place is refused, whether there is anything to restore yet or not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec

from holdfast.checkpointer.in_place import refuse_fixed, refuse_replaced
from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    HoldfastError,
    IncompleteCheckpoint,
    ReadFailed,
)
from holdfast.store import Checkpoint, RankGroup
from holdfast.store.os_errors import shows_damage
from holdfast.store.ranks.consensus import all_or_none
from holdfast.store.ranks.open_together import open_together
from holdfast.store.ranks.shared_load import load_together
from holdfast.team import Team


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on. `candidates`: the steps there were to choose from."""

    step: int
    nbytes: int
    seconds: float
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be filled. Unless `strict`, with what fits."""

    state: object
    strict: bool = True


def resume(
    group: RankGroup,
    into: Target,
    steps: Sequence[int],
    path_of: Callable[[int], str],
    only: int | None,
    passed_over: Callable[[int, HoldfastError], None],
    require_current: Callable[[], None],
) -> Resumed | None:
    """Fills the state from the newest of these steps that is intact; None when there is none at all.

    With `only`, from that one. The coordinator's list of steps counts. `require_current` raises when the
    run's path does not lead to the run any more.
    """
    with group.again(f"restore from {os.path.dirname(path_of(0))}") as team:
        return _resume(group, team, into, steps, path_of, only, passed_over, require_current)


def _resume(
    group: RankGroup,
    team: Team | None,
    into: Target,
    steps: Sequence[int],
    path_of: Callable[[int], str],
    only: int | None,
    passed_over: Callable[[int, HoldfastError], None],
    require_current: Callable[[], None],
) -> Resumed | None:
    with _all_or_none(group, team, "target"):
        require_current()
        refuse_fixed(into.state)
    candidates = _agreed(group, team, steps)
    failures: list[HoldfastError] = []
    for step in reversed(candidates if only is None else [only]):
        began = time.perf_counter()
        try:
            nbytes = _load(group, team, into, path_of(step))
        except (CorruptCheckpoint, ReadFailed) as error:
            if only is not None or not shows_damage(error):
                raise
            failures.append(error)
            passed_over(step, error)
        except CheckpointNotFound:
            run = os.path.dirname(path_of(step))
            raise CheckpointNotFound(f"run {run} has no checkpoint of step {step}") from None
        else:
            return Resumed(step, nbytes, time.perf_counter() - began, tuple(candidates))
    if failures:
        kind = IncompleteCheckpoint if isinstance(failures[0], IncompleteCheckpoint) else CorruptCheckpoint
        raise kind(
            f"none of the {len(failures)} checkpoints is intact, the newest: {failures[0]}",
            path=os.path.dirname(path_of(candidates[-1])),
        ) from failures[0]
    return None


def _agreed(group: RankGroup, team: Team | None, steps: Sequence[int]) -> list[int]:
    if team is None:
        return list(steps)
    group.restart(team)
    mine = msgspec.json.encode(list(steps)) if group.leads else None
    return msgspec.json.decode(team.tell("steps", mine, group.timeout), type=list[int])


def _load(group: RankGroup, team: Team | None, into: Target, path: str) -> int:
    if team is None:
        with Checkpoint(path) as checkpoint:
            _check(checkpoint)
            restored = checkpoint.load(into.state, strict=into.strict)
            refuse_replaced(into.state, restored, path)
            return checkpoint.nbytes
    with open_together(team, path, group.timeout, _check) as checkpoint:
        restored = load_together(
            team,
            checkpoint,
            into.state,
            select=None,
            verify=True,
            strict=into.strict,
            timeout=group.timeout,
            channel=group.channel,
        )
        with _all_or_none(group, team, "in place"):
            refuse_replaced(into.state, restored, path)
        return checkpoint.nbytes


def _all_or_none(group: RankGroup, team: Team | None, what: str) -> AbstractContextManager[None]:
    return nullcontext() if team is None else all_or_none(team, what, group.timeout)


def _check(checkpoint: Checkpoint) -> None:
    reason = checkpoint.misplaced()
    if reason is not None:
        raise CorruptCheckpoint(reason, path=checkpoint.path)
