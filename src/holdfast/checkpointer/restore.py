"""Restoring: the newest checkpoint of a run that is whole goes back into the state, the same on all ranks.

A damaged checkpoint is passed over (`shows_damage`). With several ranks, one that sees damage makes all pass
over it. One that cannot be read for another reason (no descriptors, no memory, no permission) may be whole:
that error is raised, on all ranks, since a training that went on from an older one would write over it. A
state that cannot be restored in place is an error, whether there is anything to restore yet or not.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec

from holdfast.caller import stack_level
from holdfast.checkpointer.context import RunContext
from holdfast.checkpointer.events import PassedOver, Restored
from holdfast.checkpointer.in_place import refuse_fixed, refuse_replaced
from holdfast.checkpointer.run_observer import NothingToRestore, Restoring
from holdfast.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    HoldfastError,
    IncompleteCheckpoint,
    ReadFailed,
)
from holdfast.state.node import pairs_of
from holdfast.store import RankGroup, list_steps
from holdfast.store.os_errors import shows_damage
from holdfast.store.ranks.consensus import all_or_none
from holdfast.store.ranks.open_together import open_newest_together, open_together
from holdfast.store.ranks.shared_load import load_together
from holdfast.store.read.stored_checkpoint import StoredCheckpoint, open_newest
from holdfast.team import Team


@dataclass(frozen=True, slots=True)
class _Found:
    """Where training goes on. `candidates`: the steps there were to choose from."""

    step: int
    nbytes: int
    seconds: float
    candidates: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Target:
    """What is to be filled. Unless `strict`, with what fits."""

    state: object
    strict: bool


def restore(
    context: RunContext,
    state: object,
    step: int | None,
    *,
    strict: bool,
    start_from: str | os.PathLike[str] | None = None,
) -> int:
    """Fills the state from the newest checkpoint that is intact, or from that of `step`; returns its step.

    When the run holds no checkpoint, fills it from `start_from` and returns the step of that; else returns 0.
    """
    context.observers.tell(Restoring())
    found = _load_newest(context, _Target(state, strict), step)
    if found is None:
        context.observers.tell(NothingToRestore())
        context.retention.resumed(None)
        if start_from is None:
            return 0
        begun = _begin_from(context, _Target(state, strict), start_from)
        context.schedule.resumed(begun)
        return begun
    context.observers.tell(Restored(found.step, time.time(), found.nbytes, found.seconds))
    context.schedule.resumed(found.step)
    context.retention.resumed(found.step)
    later = [other for other in found.candidates if step is not None and other > step]
    context.retention.supersede(later)
    if later:
        warnings.warn(
            f"going back to step {step}: the first save removes the later checkpoints "
            f"({', '.join(map(str, later))})",
            RuntimeWarning,
            stacklevel=stack_level(),
        )
    return found.step


def _load_newest(context: RunContext, into: _Target, only: int | None) -> _Found | None:
    group, run = context.group, context.run
    with group.again(f"restore from {run.path}") as team:
        with _all_or_none(group, team, "target"):
            run.require_current()
            refuse_fixed(into.state)
        candidates = _agreed(group, team, list_steps(run.path) if group.leads else [])
        failures: list[HoldfastError] = []
        for step in reversed(candidates if only is None else [only]):
            began = time.perf_counter()
            try:
                nbytes = _load(group, team, into, run.path_of(step))
            except (CorruptCheckpoint, ReadFailed) as error:
                if only is not None or not shows_damage(error):
                    raise
                failures.append(error)
                _pass_over(context, step, error)
            except CheckpointNotFound:
                raise CheckpointNotFound(f"run {run.path} has no checkpoint of step {step}") from None
            else:
                return _Found(step, nbytes, time.perf_counter() - began, candidates)
        if failures:
            raise _none_intact(run.path, failures) from failures[0]
        return None


def _begin_from(context: RunContext, into: _Target, path: str | os.PathLike[str]) -> int:
    """Fills what the checkpoint at `path` has something for; the other entries of the state stay."""
    group = context.group
    with group.again(f"start from {os.fspath(path)}") as team:
        if team is None:
            with open_newest(path) as checkpoint:
                part = _entries_in(into.state, checkpoint)
                restored = checkpoint.load(part, strict=into.strict)
                refuse_replaced(part, restored, checkpoint.path)
                _put_back(into.state, restored)
                return checkpoint.step
        group.restart(team)
        with open_newest_together(team, path, group.timeout) as checkpoint:
            part = _entries_in(into.state, checkpoint)
            restored = load_together(
                team,
                checkpoint,
                part,
                select=None,
                verify=True,
                strict=into.strict,
                timeout=group.timeout,
                channel=group.channel,
            )
            with _all_or_none(group, team, "in place"):
                refuse_replaced(part, restored, checkpoint.path)
            _put_back(into.state, restored)
            return checkpoint.step


def _entries_in(state: object, checkpoint: StoredCheckpoint) -> object:
    """The entries of a state that a checkpoint has something for; all of a state that is no dict.

    What only the checkpoint has, such as the counters of another system, is left out.
    """
    pairs = pairs_of(checkpoint.tree)
    if not isinstance(state, dict) or pairs is None:
        return state
    there = {key for key, _ in pairs if isinstance(key, str)}
    common: dict[str, object] = {key: item for key, item in state.items() if key in there}
    if not common:
        return state  # the error that follows lists both sides
    checkpoint.keep_entries(common)
    return common


def _put_back(state: object, restored: object) -> None:
    """Plain values are no objects that can be filled: they go back into the dict that holds them."""
    if isinstance(state, dict) and isinstance(restored, dict) and state is not restored:
        state.update(restored)


def _none_intact(run: str, failures: Sequence[HoldfastError]) -> CorruptCheckpoint:
    kind = IncompleteCheckpoint if isinstance(failures[0], IncompleteCheckpoint) else CorruptCheckpoint
    return kind(f"none of the {len(failures)} checkpoints is intact, the newest: {failures[0]}", path=run)


def _pass_over(context: RunContext, step: int, error: HoldfastError) -> None:
    context.retention.mark_damaged(step)
    context.observers.tell(PassedOver(step, time.time(), str(error)))
    warnings.warn(f"passing over step {step}: {error}", RuntimeWarning, stacklevel=stack_level())


def _agreed(group: RankGroup, team: Team | None, steps: Sequence[int]) -> list[int]:
    if team is None:
        return list(steps)
    group.restart(team)
    mine = msgspec.json.encode(list(steps)) if group.leads else None
    return msgspec.json.decode(team.tell("steps", mine, group.timeout), type=list[int])


def _load(group: RankGroup, team: Team | None, into: _Target, path: str) -> int:
    if team is None:
        with StoredCheckpoint(path) as checkpoint:
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


def _check(checkpoint: StoredCheckpoint) -> None:
    reason = checkpoint.misplaced()
    if reason is not None:
        raise CorruptCheckpoint(reason, path=checkpoint.path)
