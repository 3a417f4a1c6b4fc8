"""Restoring: the newest checkpoint of a run that is whole goes back into the state, the same on all ranks.

A damaged checkpoint is passed over (`shows_damage`). With several ranks, one that sees damage makes all pass
over it. One that cannot be read for another reason (no descriptors, no memory, no permission) may be whole:
that error is raised, on all ranks, since a training that went on from an older one would write over it. A
state that cannot be restored in place is an error, whether there is anything to restore yet or not.
"""

from __future__ import annotations

import difflib
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from everystep.caller import stack_level
from everystep.checkpointer.events import PassedOver, Restored
from everystep.checkpointer.opening import RunContext
from everystep.checkpointer.run_observer import NothingToRestore, Restoring
from everystep.engine import READING
from everystep.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    EverystepError,
    IncompleteCheckpoint,
    ReadFailed,
    StateMismatch,
)
from everystep.state.marks import PerRank
from everystep.state.node import NAMELESS, pairs_of, shorten
from everystep.state.targets import MAPPINGS, is_array
from everystep.state.torch_objects import is_stateful
from everystep.store import RankGroup, list_steps
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.open_together import open_newest_together, open_together
from everystep.store.ranks.shared_load import load_together
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint, open_newest
from everystep.store.read.read_errors import shows_damage

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Into:
    """What a restore fills.

    Args:
        state: The objects to fill.
        strict: Whether everything must fit; if not, what fits is filled.
        in_place: Whether the training goes on with `state` itself. Otherwise it takes the object that the
            restore returns, so a value that cannot be changed may be replaced.
        rename: Gives the parameters of a checkpoint the names that they have in `state`.
    """

    state: object
    strict: bool
    in_place: bool
    rename: Callable[[str], str] | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """Where training goes on: the restored state, and the steps that the run has."""

    step: int
    state: object
    nbytes: int
    seconds: float
    candidates: Sequence[int]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run without checkpoints begins. It counts from 0, unless it is to continue the steps there."""

    path: str | os.PathLike[str]
    rename: Callable[[str], str] | None
    continue_steps: bool


def restore(
    context: RunContext, into: Into, step: int | None, begin: Beginning | None = None
) -> tuple[int, object]:
    """Fills a state from the newest checkpoint that is intact, or from that of `step`.

    When the run holds no checkpoint, fills it from where it is to `begin`. Returns the step at which training
    goes on, and the restored state: the one given, unless it had to be replaced.
    """
    context.observers.tell(Restoring())
    found = _load_newest(context, into, step)
    if found is None:
        context.observers.tell(NothingToRestore())
        context.retention.resumed(None)
        if begin is None:
            return 0, into.state
        begun, restored = _begin_from(context, replace(into, rename=begin.rename), begin)
        context.schedule.resumed(begun)
        return begun, restored
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
    return found.step, found.state


def _load_newest(context: RunContext, into: Into, only: int | None) -> _Found | None:
    group, run = context.group, context.run
    with group.reconvene(f"restore from {run.path}") as meeting:
        with _all_or_none(meeting):
            run.require_current()
            if into.in_place:
                refuse_fixed(into.state)
        candidates = _agreed(group, meeting, list_steps(run.path) if group.is_coordinator else [])
        failures: list[EverystepError] = []
        for step in reversed(candidates if only is None else [only]):
            began = time.perf_counter()
            try:
                restored, nbytes = _load(group, meeting, into, run.path_of(step))
            except (CorruptCheckpoint, ReadFailed) as error:
                if only is not None or not shows_damage(error):
                    raise
                failures.append(error)
                _pass_over(context, step, error)
            except CheckpointNotFound:
                raise CheckpointNotFound(f"run {run.path} has no checkpoint of step {step}") from None
            else:
                return _Found(step, restored, nbytes, time.perf_counter() - began, candidates)
        if failures:
            raise _none_intact(run.path, failures) from failures[0]
        return None


def _load(group: RankGroup, meeting: Meeting | None, into: Into, path: str) -> tuple[object, int]:
    """The state filled from a checkpoint, and how many bytes that has."""
    with open_checkpoint(path) if meeting is None else open_together(meeting, path, _check) as checkpoint:
        if meeting is None:
            _check(checkpoint)
        return _fill(group, meeting, checkpoint, into), checkpoint.nbytes


def _begin_from(context: RunContext, into: Into, begin: Beginning) -> tuple[int, object]:
    """Fills the entries that the checkpoint has; the other entries of the state stay."""
    group, path, state = context.group, begin.path, into.state
    tuning = replace(READING, max_inflation=group.settings.tuning.max_inflation)
    with group.reconvene(f"start from {os.fspath(path)}") as meeting:
        opened: AbstractContextManager[Checkpoint]
        if meeting is None:
            opened = open_newest(path, tuning)
        else:
            group.restart(meeting)
            opened = open_newest_together(meeting, path, tuning)
        with opened as checkpoint:
            entries = _keys_of(checkpoint)
            part = _entries_in(state, checkpoint)
            restored = _fill(group, meeting, checkpoint, replace(into, state=part))
            if isinstance(state, dict) and isinstance(restored, dict):
                if restored is not state:  # plain values go back into the dict that holds them
                    state.update(restored)
                restored = state
            if group.is_coordinator:
                _warn_of_entries(state, entries, checkpoint, begin)
            return checkpoint.step if begin.continue_steps else 0, restored


def _fill(group: RankGroup, meeting: Meeting | None, checkpoint: Checkpoint, into: Into) -> object:
    if meeting is None:
        restored = checkpoint._restore(into.state, strict=into.strict, rename=into.rename)
    else:
        restored = load_together(
            meeting,
            checkpoint,
            into.state,
            select=None,
            verify=True,
            strict=into.strict,
            rename=into.rename,
            channel=group.channel,
        )
    with _all_or_none(meeting):
        if into.in_place:
            refuse_replaced(into.state, restored, checkpoint.path)
    return restored


def _keys_of(checkpoint: Checkpoint) -> list[str]:
    """The entries of a checkpoint, by name; none if it is not a dict."""
    return [key for key, _ in pairs_of(checkpoint._parts.tree) or () if isinstance(key, str)]


def _warn_of_entries(state: object, there: Sequence[str], checkpoint: Checkpoint, begin: Beginning) -> None:
    """Warns, in one line, about entries that only one side has, and about steps that do not count."""
    here = [key for key in state if isinstance(key, str)] if isinstance(state, dict) else []
    left = [key for key in here if key not in there]
    unused = [key for key in there if key not in here] if here else []
    uncounted = checkpoint.step and not begin.continue_steps
    if not (left or unused or uncounted):
        return
    said = [f"filled {_listed([key for key in here if key in there])}" if here else "filled the state"]
    if left:
        said.append(f"left {_listed(left)} as {'it was' if len(left) == 1 else 'they were'}")
    if unused:
        said.append(f"did not use {_listed(unused)} of the checkpoint")
    if uncounted:
        said.append(
            f"and counts from step 0 (that checkpoint is of step {checkpoint.step}; with "
            "continue_steps=True the run goes on from there)"
        )
    alike = [(own, other) for own in left for other in unused if _alike(own, other)]
    hints = [
        f". Is {other!r} there what the state calls {own!r}? Then give both one name" for own, other in alike
    ]
    warnings.warn(
        f"started from {checkpoint.path}: {', '.join(said)}{''.join(hints)}",
        RuntimeWarning,
        stacklevel=stack_level(),
    )


def _alike(one: str, other: str) -> bool:
    """Whether two names may mean the same, such as ``lr_scheduler`` and ``scheduler``."""
    short, long = sorted((one.lower(), other.lower()), key=len)
    return (len(short) > 2 and short in long) or bool(difflib.get_close_matches(short, [long], 1))


def _listed(names: Sequence[str]) -> str:
    shown = [repr(shorten(name, 40)) for name in names[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _entries_in(state: object, checkpoint: Checkpoint) -> object:
    """The entries of a state that a checkpoint has something for; the whole state if it is not a dict.

    What only the checkpoint has, such as the counters of another system, is left out.
    """
    checkpoint._fit_to(state)
    if not isinstance(state, dict):
        return state
    there = set(_keys_of(checkpoint))
    common: dict[str, object] = {key: item for key, item in state.items() if key in there}
    if not common:
        return state  # the error that follows lists both sides
    checkpoint._parts.keep_entries(common)
    return common


def _none_intact(run: str, failures: Sequence[EverystepError]) -> CorruptCheckpoint:
    kind = IncompleteCheckpoint if isinstance(failures[0], IncompleteCheckpoint) else CorruptCheckpoint
    return kind(f"none of the {len(failures)} checkpoints is intact, the newest: {failures[0]}", path=run)


def _pass_over(context: RunContext, step: int, error: EverystepError) -> None:
    context.retention.mark_damaged(step)
    context.observers.tell(PassedOver(step, time.time(), str(error)))
    warnings.warn(f"passing over step {step}: {error}", RuntimeWarning, stacklevel=stack_level())


def _agreed(group: RankGroup, meeting: Meeting | None, steps: Sequence[int]) -> list[int]:
    if meeting is None:
        return list(steps)
    group.restart(meeting)
    mine = msgspec.json.encode(list(steps)) if group.is_coordinator else None
    return msgspec.json.decode(meeting.tell(mine), type=list[int])


def _all_or_none(meeting: Meeting | None) -> AbstractContextManager[None]:
    return nullcontext() if meeting is None else meeting.all_or_none()


def _check(checkpoint: Checkpoint) -> None:
    reason = checkpoint._misplaced
    if reason is not None:
        raise CorruptCheckpoint(reason, path=checkpoint.path)


_CONTAINERS = (*MAPPINGS, list, deque, set, bytearray, PerRank)
_ADVICE = 'Put it in a dict, such as {"w": w, "epoch": 0}, and take it from there after restore()'


def refuse_fixed(state: object, place: str = "") -> None:
    """Raises if an object at the top cannot be restored in place, such as a number or a read-only array.

    A tuple can be if its items can, since training refers to those.
    """
    if type(state) is tuple:
        for index, item in enumerate(state):
            refuse_fixed(item, f"{place}.{index}" if place else str(index))
    elif not _takes(state):
        kind = f"{'read-only ' if is_array(state) else ''}{type(state).__name__}"
        raise StateMismatch(
            f"{f'state.{place}' if place else 'the state'} cannot be restored: no dict, list or object holds "
            f"this {kind}, so you would keep the one you have. {_ADVICE}",
            wrong=[place or NAMELESS],
        )


def refuse_replaced(state: object, restored: object, checkpoint: str) -> None:
    """Raises if the restored object is not the state itself, but a new one in its place."""
    if not _same(state, restored):
        raise StateMismatch(
            f"{checkpoint} holds a {type(restored).__name__} that cannot be put back into the state, "
            f"a {type(state).__name__}: the state is not what was saved. Give the Checkpointer a state of "
            "that form",
            wrong=[NAMELESS],
        )


def _takes(state: Any) -> bool:
    if is_array(state):
        flags = getattr(state, "flags", None)  # numpy's; whether torch can write is seen when it is done
        return flags is None or bool(flags.writeable)
    return isinstance(state, _CONTAINERS) or is_stateful(state)


def _same(state: object, restored: object) -> bool:
    if type(state) is tuple and type(restored) is tuple:
        return len(state) == len(restored) and all(map(_same, state, restored))
    return state is restored
