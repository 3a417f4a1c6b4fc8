"""Short names of a run's checkpoints: ``RUN@30`` (its step), ``RUN@latest``, ``RUN@-2`` (the last but one).

Every call that reads takes them. An existing path with that name takes precedence.
"""

from __future__ import annotations

import os
import re

from everystep.errors import CheckpointNotFound
from everystep.paths import local_path
from everystep.store.names import step_name
from everystep.store.read.listing import list_steps, runs_in
from everystep.store.read.read_errors import reading

_REFERENCE = re.compile(r"(latest|[0-9]{1,12}|-[0-9]{1,12})", re.ASCII)
_SHOWN_STEPS = 8


def locate(path: str | os.PathLike[str]) -> str:
    """The absolute path that a path means; for ``RUN@STEP``, the path of that checkpoint.

    Raises `CheckpointNotFound` if the run does not have that step. The message names the steps that it has.
    """
    where = local_path(path)
    parts = _split(where)
    if parts is None:
        return where
    run, name = parts
    with reading(run):
        steps = list_steps(run)
    if _REFERENCE.fullmatch(name) is None:
        hint = "after @ comes a step, latest, or -N to count from the newest"
        raise CheckpointNotFound(f"there is no checkpoint at {where}: {hint}. {_has(run, steps)}")
    step = _chosen(name, steps)
    if step is None:
        raise CheckpointNotFound(f"there is no checkpoint {run}@{name}. {_has(run, steps, name)}")
    return os.path.join(run, step_name(step))


def is_reference(path: str | os.PathLike[str]) -> bool:
    """Whether this is a short name of a checkpoint, which cannot be saved to."""
    parts = _split(os.path.abspath(os.fspath(path)))
    return parts is not None and _REFERENCE.fullmatch(parts[1]) is not None and bool(list_steps(parts[0]))


def _split(where: str) -> tuple[str, str] | None:
    """The run and the text after its @; None if the path exists, or the run does not."""
    directory, base = os.path.split(where)
    before, at, name = base.rpartition("@")
    if not at or os.path.lexists(where):
        return None
    run = os.path.join(directory, before) if before else directory
    return (run, name) if os.path.isdir(run) else None


def _chosen(name: str, steps: list[int]) -> int | None:
    if name == "latest":
        return steps[-1] if steps else None
    number = int(name)
    if not name.startswith("-"):
        return number if number in steps else None
    return steps[number] if 0 < -number <= len(steps) else None


def _has(run: str, steps: list[int], wanted: str = "") -> str:
    """A sentence about what the run has instead."""
    if not steps:
        runs = runs_in(run)
        if runs:
            example = os.path.join(run, runs[0])
            return f"{run} is not a run, but holds runs: name one of them, such as {example}"
        return f"The directory {run} holds no checkpoints that are named by their step"
    if len(steps) <= _SHOWN_STEPS:
        shown = ", ".join(map(str, steps))
        return f"The run has {'step' if len(steps) == 1 else 'steps'} {shown}"
    said = f"The run has {len(steps):,} steps from {steps[0]} to {steps[-1]}"
    if not wanted.isdecimal():
        return said
    near = sorted(sorted(steps, key=lambda step: abs(step - int(wanted)))[:2])
    return f"{said}; the nearest are {near[0]} and {near[1]}"
