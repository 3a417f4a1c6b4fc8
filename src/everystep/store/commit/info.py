"""What a save reports: which checkpoint it made, how large it is, where the time went."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import SupportsIndex

from msgspec import Struct


class Seconds(Struct, frozen=True):
    """Where the time of a commit went: bytes to the device, syncs of the files, and all the rest."""

    write: float
    sync: float
    commit: float


class CheckpointInfo(Struct, frozen=True):
    """What a save did.

    Attributes:
        path: The checkpoint.
        step: Its step.
        id: A random name of this save.
        created: Unix time of the save.
        metrics: The metrics that were given to the save.
        leaves: How many leaves it has.
        nbytes: The size of the leaves.
        stored_nbytes: The size of the files.
        seconds: How long the save took.
        phases: The same, phase by phase.
    """

    path: str
    step: int
    id: str
    created: float
    metrics: Mapping[str, float]
    leaves: int
    nbytes: int
    stored_nbytes: int
    seconds: float
    phases: Seconds


def check_step(step: SupportsIndex) -> int:
    """The step as an int, whatever library counted it. Steps are what directory names can hold, 12 digits."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 10**12 or isinstance(step, bool):
        raise ValueError(f"step must be an int from 0 to 10**12 - 1, not {step!r}")
    return number
