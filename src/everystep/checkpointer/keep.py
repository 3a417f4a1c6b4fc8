"""Which checkpoints of a run stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal


@dataclass(frozen=True, slots=True)
class Kept:
    """What the policy looks at: a committed checkpoint."""

    step: int
    created: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Keep:
    """A checkpoint stays if any rule wants it; the newest always does.

    - `last`: the newest so many.
    - `every`: those whose step is a multiple of it, for good.
    - `best`: ``("loss", "min", 2)`` keeps the two with the lowest ``loss`` among their metrics.
    - `seconds`: at least that far apart in time, for good. A clock that jumped and was set right again costs
      none: those behind the jump are that far from it, too.

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
        """The steps that stay, of checkpoints given in order of step."""
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
