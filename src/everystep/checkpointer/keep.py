"""Which checkpoints of a run stay: the rules (`Keep`), and their record in the run's directory.

A Checkpointer records its rules with its first save, and ``everystep prune`` follows them. Nothing syncs the
file, and no failure to write it fails a save: a file that is missing, torn or of a newer version is no rule,
and `prune` asks for one then.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Literal

import msgspec

from everystep.checkpointer.events import warn
from everystep.engine import fs
from everystep.engine.atomic_file import replace_file
from everystep.engine.fs import OpenDirectory
from everystep.store.names import RULES


@dataclass(frozen=True, slots=True)
class Kept:
    """What the rules look at: a committed checkpoint."""

    step: int
    created: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Keep:
    """The rules of a run. A checkpoint stays if any rule keeps it; the newest always stays.

    Args:
        last: How many of the newest stay.
        every: Checkpoints whose step is a multiple of this stay for good.
        best: ``("loss", "min", 2)`` keeps the two with the lowest ``loss`` among their metrics.
        seconds: Checkpoints that are at least this far apart in time stay for good. A clock that jumped and
            was set right again costs none: those behind the jump are that far from it, too.

    >>> history = [Kept(step, float(step), {}) for step in range(1, 8)]
    >>> sorted(Keep(last=2, every=3).chosen(history))
    [3, 6, 7]
    """

    last: int = 3
    every: int | None = None
    best: tuple[str, Literal["min", "max"], int] | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise ValueError(
                f"Keep(last=...) must be an int of at least 1, since the newest checkpoint always stays, "
                f"not {self.last!r}"
            )
        if self.every is not None and not _is_count(self.every):
            raise ValueError(f"Keep(every=...) must be an int of at least 1, not {self.every!r}")
        if self.best is not None and not _is_ranking(self.best):
            raise ValueError(
                f'Keep(best=...) wants (metric, "min" or "max", how many), such as ("loss", "min", 2), '
                f"not {self.best!r}"
            )
        if self.seconds is not None and not (_is_real(self.seconds) and self.seconds > 0):
            raise ValueError(f"Keep(seconds=...) must be a positive number, not {self.seconds!r}")

    def chosen(self, history: Sequence[Kept]) -> set[int]:
        """The steps that stay.

        Args:
            history: All checkpoints, in order of step.
        """
        stay = {item.step for item in history[-self.last :]}
        if self.every is not None:
            stay |= {item.step for item in history if item.step % self.every == 0}
        if self.best is not None:
            stay |= self._best(history, *self.best)
        if self.seconds is not None:
            stay |= self._apart(history, self.seconds)
        return stay

    @staticmethod
    def _best(history: Sequence[Kept], metric: str, direction: str, count: int) -> set[int]:
        sign = 1 if direction == "min" else -1
        # A NaN is no candidate: it compares with nothing.
        scored = [
            (sign * item.metrics[metric], -item.step)
            for item in history
            if metric in item.metrics and not math.isnan(item.metrics[metric])
        ]
        return {-step for _, step in sorted(scored)[:count]}

    @staticmethod
    def _apart(history: Sequence[Kept], seconds: float) -> set[int]:
        stay: set[int] = set()
        latest = -math.inf
        for item in history:
            if abs(item.created - latest) >= seconds:
                stay.add(item.step)
                latest = item.created
        return stay


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= 1


def _is_real(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_ranking(best: object) -> bool:
    if not isinstance(best, (tuple, list)) or len(best) != 3:
        return False
    metric, direction, count = best
    return isinstance(metric, str) and direction in ("min", "max") and _is_count(count)


_MAX_NBYTES = 64 << 10
_FIELDS = {field.name for field in fields(Keep)}


def record_rules(run: OpenDirectory, keep: Keep) -> None:
    """Called by the run's writer."""
    data = _encoded(keep)
    if _read(run.fileno()) == data:
        return
    try:
        replace_file(RULES, data, within=run, synced=False)
    except OSError as error:
        with contextlib.suppress(OSError):  # older rules must not pass for these
            fs.unlink(run.at(RULES))
        warn(f"the rules of {run.path} were not recorded, so `everystep prune` will ask for them: {error}")


def recorded_rules(run: str) -> Keep | None:
    """The rules by which the last training that saved into a run keeps its checkpoints; None if unknown."""
    try:
        directory = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = _read(directory)
    finally:
        os.close(directory)
    return None if data is None else _decoded(data)


def _read(directory: int) -> bytes | None:
    try:
        with open(fs.open_regular(RULES, directory), "rb") as opened:
            return opened.read(_MAX_NBYTES)
    except OSError:
        return None


def _encoded(keep: Keep) -> bytes:
    """Numbers of any library as those of Python. JSON has no infinity."""
    rules = asdict(keep)
    rules["last"] = int(keep.last)
    rules["every"] = None if keep.every is None else int(keep.every)
    if keep.best is not None:
        metric, direction, count = keep.best
        rules["best"] = (metric, direction, int(count))
    if keep.seconds is not None:
        rules["seconds"] = "inf" if math.isinf(keep.seconds) else float(keep.seconds)
    return msgspec.json.encode(rules) + b"\n"


def _decoded(data: bytes) -> Keep | None:
    try:
        rules = msgspec.json.decode(data, type=dict[str, object])
        if rules.keys() != _FIELDS:  # a rule of a newer version: without it, too much would go
            return None
        if rules["seconds"] == "inf":
            rules["seconds"] = math.inf
        return msgspec.convert(rules, Keep)
    except (msgspec.MsgspecError, ValueError):
        return None
