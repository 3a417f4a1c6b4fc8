"""When to save: every so many steps, every so many seconds, or as often as a budget of overhead allows.

Pure policy. The clock comes in as numbers, so that the same code runs in a training and in a simulation;
nothing here saves, waits, or looks at the time. The Checkpointer reports what happened and asks one
question. At each call of its `save`: first `stepped`, then `due`, and where that says so `started`;
`finished` comes when the save is durable, from any thread, and `resumed` when a checkpoint was restored.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([smhd])\s*")

WARM_UP_STEPS = 2
"""Intervals at the start that say nothing about the others: compilation, first allocations, cold caches."""
MIN_ALONE, MAX_ALONE = 4, 33
"""Undisturbed steps that the step time is the median of: so many to begin with, so many at most."""
SETTLED_SAVES, MAX_SAVES = 3, 9
"""Saves that the cost is the median of. The first one also creates files, and soon counts no more."""
STALE_CALLS = 400
"""Undisturbed steps older than this are forgotten: a training gets slower or faster on its way."""
FIRST_PROBES_CALLS, PROBE_CALLS = 8, 50
"""When saves leave no step undisturbed for so long, one is left alone, to know what it takes by itself."""
CALM_SAVES = 5
"""A shorter interval has to be the answer for so many saves in a row before it is taken."""
_MAX_BESIDE, _MAX_INTERVAL = 65, 10**9


@dataclass(frozen=True, slots=True)
class Cost:
    """What one save took: `stall_seconds` that training waited, `busy_seconds` from its start to durable."""

    step: int
    stall_seconds: float
    busy_seconds: float
    nbytes: int = 0


class Schedule:
    """Decides at which calls of `Checkpointer.save` the state is saved."""

    def due(self, step: int, now: float) -> bool:
        """Whether the state after `step` should be saved. The call changes nothing."""
        raise NotImplementedError

    def resumed(self, step: int) -> None:
        """Training goes on from that step, which is saved."""

    def stepped(self, step: int, now: float, stalled_seconds: float, saving: bool) -> None:
        """Once per step: how long training stalled since the last call, and whether a save was in flight."""

    def started(self, step: int, now: float) -> None:
        """A save of that step begins."""

    def finished(self, cost: Cost) -> None:
        """A save became durable. One that failed is never reported here."""

    def explain(self) -> str:
        """The chosen interval, and why."""
        raise NotImplementedError


def make_schedule(every: int | str, *, budget: float = 0.03, mtbf: float | str | None = None) -> Schedule:
    """The schedule for the arguments of a `Checkpointer`.

    >>> make_schedule(10).due(20, now=0.0)
    True
    >>> make_schedule("1.5h").explain()
    'every 1.5 h: at the first step after that time'
    """
    if not _between(0, budget, 1):
        raise ValueError(f"budget is the share of time that saves may cost, between 0 and 1, not {budget!r}")
    if every == "auto":
        return Auto(budget, None if mtbf is None else _mtbf_seconds(mtbf))
    if mtbf is not None:
        raise ValueError(f'mtbf chooses the interval, so it goes with every="auto", not with every={every!r}')
    if isinstance(every, str):
        seconds = _parse_seconds(every)
        if seconds is not None and seconds > 0:
            return EverySeconds(seconds)
    elif not isinstance(every, bool) and hasattr(every, "__index__") and operator.index(every) >= 1:
        return EverySteps(operator.index(every))
    raise ValueError(
        'every must be a number of steps (1 or more), a time such as "30s", "5m" or "1.5h", or "auto", '
        f"not {every!r}"
    )


class EverySteps(Schedule):
    """At multiples of a number of steps. If a loop skips one of them, at its next call."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._before = self._last = 0

    def due(self, step: int, now: float) -> bool:
        return step // self.steps > self._before // self.steps or step % self.steps == 0

    def resumed(self, step: int) -> None:
        self._last = step

    def stepped(self, step: int, now: float, stalled_seconds: float, saving: bool) -> None:
        self._before, self._last = self._last, step

    def explain(self) -> str:
        return _every(self.steps)


class EverySeconds(Schedule):
    """At the first call after so many seconds, counted from the last save, or else from the first call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None

    def due(self, step: int, now: float) -> bool:
        return self._since is not None and now - self._since >= self.seconds

    def stepped(self, step: int, now: float, stalled_seconds: float, saving: bool) -> None:
        if self._since is None:
            self._since = now

    def started(self, step: int, now: float) -> None:
        self._since = now

    def explain(self) -> str:
        return f"every {_say(self.seconds)}: at the first step after that time"


def young_interval(cost: float, mtbf: float) -> float:
    """Seconds of work between saves by Young's first-order formula, sqrt(2 C M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * cost * mtbf)


def daly_interval(cost: float, mtbf: float) -> float:
    """Seconds of work between saves by Daly's higher-order formula, good also where C is not small beside M.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C  for C < 2M, else M; for C << M it is Young's.
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young_interval(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@dataclass(slots=True)
class _Save:
    """One save, what training stalled since, and the steps beside it (seconds per step, the latest)."""

    step: int
    began: float
    stalled: float = 0.0
    cost: Cost | None = None
    beside: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_BESIDE))
    beside_steps: int = 0
    slowdown: float | None = None

    def stall(self) -> float:
        # The steps may have counted more than was known when it became durable: the last wait comes last.
        return max(self.stalled, self.cost.stall_seconds if self.cost is not None else 0.0)

    def slowdown_against(self, alone: float) -> float:
        if self.slowdown is not None or not self.beside:
            return self.slowdown or 0.0
        # The median step times their number, not their sum: an evaluation that fell beside is not its fault.
        return max(0.0, self.beside_steps * (median(self.beside) - alone))


@dataclass(frozen=True, slots=True)
class Measured:
    """What `Auto` goes by, in seconds. `alone`: a step with no save in flight."""

    alone: float
    stall: float
    slowdown: float
    busy: float

    @property
    def cost(self) -> float:
        """What a save costs the training: the time it waited, and the slowness of the steps beside it."""
        return self.stall + self.slowdown

    @property
    def durable_steps(self) -> int:
        """Steps until a save is durable and the next may begin, without the time that the save costs."""
        return max(1, math.ceil((self.busy - self.cost) / self.alone - 1e-6))


class Auto(Schedule):
    """The shortest interval whose overhead stays within a budget, or the best one for a failure rate.

    Without `mtbf`: the smallest k with cost / (k x step) <= budget. With `mtbf` (seconds between failures):
    Daly's optimum for that cost, which weighs the work lost since the last durable save against the saves.
    (That an overlapped save is durable only some time after its start adds the same loss for every interval,
    so it does not move the optimum.) Either way at least the steps that a save takes to become durable.

    The first call saves, so that a cost is known; until a few undisturbed steps are measured too, a save is
    taken to have stopped training altogether. A longer interval is taken at once, a shorter one when it has
    been the answer for some saves, or is far shorter.
    """

    def __init__(self, budget: float, mtbf: float | None = None) -> None:
        self.budget = budget
        self.mtbf = mtbf
        self._lock = threading.Lock()  # finished() may come from the thread that wrote
        self._last: tuple[int, float] | None = None
        self._intervals = 0
        self._alone: deque[tuple[int, float]] = deque(maxlen=MAX_ALONE)
        self._since_alone = 0
        self._saves: deque[_Save] = deque(maxlen=MAX_SAVES + 1)
        self._finished = 0
        self._in_flight = self._fresh = False  # fresh: the next call reports what its start took
        self._targets: deque[int] = deque(maxlen=CALM_SAVES)
        self._interval: int | None = None

    @property
    def interval(self) -> int | None:
        """Steps between saves, None while there is nothing to choose by."""
        return self._interval

    @property
    def measuring(self) -> bool:
        """Whether there is too little to rely on the choice."""
        return self._interval is None or self._finished < SETTLED_SAVES

    def due(self, step: int, now: float) -> bool:
        with self._lock:
            if self._in_flight or not self._saves:
                return not self._in_flight
            last = self._saves[-1]
            if (
                step <= last.step
            ):  # training went back, where a save of its own is due; or the same step again
                return step < last.step
            if self._interval is not None:
                return step - last.step >= self._interval and self._since_alone < PROBE_CALLS
            if last.cost is None:  # it failed, and nothing is known yet
                return step - last.step > MIN_ALONE
            worst = max(last.stall(), last.cost.busy_seconds)
            work = now - last.began - worst
            return self._since_alone < FIRST_PROBES_CALLS and self.budget * work >= worst

    def stepped(self, step: int, now: float, stalled_seconds: float, saving: bool) -> None:
        with self._lock:
            last, self._last = self._last, (step, now)
            if self._saves and (saving or self._fresh):
                self._saves[-1].stalled += stalled_seconds
            self._fresh = False
            if not saving:
                self._in_flight = False  # also when it failed, and so was never reported as finished
            if last is None or step <= last[0] or now < last[1]:
                return
            steps = step - last[0]
            self._intervals += 1
            if self._intervals <= WARM_UP_STEPS:
                return
            seconds = max(now - last[1] - stalled_seconds, 0.0) / steps
            if not saving:
                self._alone.append((self._intervals, seconds))
                self._since_alone = 0
                while len(self._alone) > MIN_ALONE and self._alone[0][0] < self._intervals - STALE_CALLS:
                    self._alone.popleft()
            else:
                self._since_alone += 1
                if self._saves:
                    self._saves[-1].beside.append(seconds)
                    self._saves[-1].beside_steps += steps
            self._choose()

    def started(self, step: int, now: float) -> None:
        with self._lock:
            alone = self._step_seconds()
            if self._saves and alone is not None:
                # What ran beside it is complete, and is held against the steps of its own time.
                self._saves[-1].slowdown = self._saves[-1].slowdown_against(alone)
                found = self._measure()
                if found is not None:
                    self._targets.append(self._target(found))
            if self._saves and self._saves[-1].cost is None:
                self._saves.pop()  # it failed
            self._saves.append(_Save(step, now))
            self._in_flight = self._fresh = True

    def finished(self, cost: Cost) -> None:
        with self._lock:
            for save in self._saves:
                if save.step == cost.step and save.cost is None:
                    save.cost = cost
                    self._finished += 1
            if self._saves and self._saves[-1].step == cost.step:
                self._in_flight = False
            self._choose()

    def explain(self) -> str:
        with self._lock:
            return self._explanation()

    def measured(self) -> Measured | None:
        """The inputs of the choice, as far as known."""
        with self._lock:
            return self._measure()

    def _step_seconds(self) -> float | None:
        if len(self._alone) < MIN_ALONE:
            return None
        return max(median(seconds for _, seconds in self._alone), 1e-9)

    def _costed(self) -> list[_Save]:
        known = [save for save in self._saves if save.cost is not None]
        return known[1:] if self._finished == len(known) > 1 else known[-MAX_SAVES:]

    def _measure(self) -> Measured | None:
        alone = self._step_seconds()
        known = self._costed()
        if alone is None or not known:
            return None
        return Measured(
            alone,
            median(save.stall() for save in known),
            median(save.slowdown_against(alone) for save in known),
            median(save.cost.busy_seconds for save in known if save.cost is not None),
        )

    def _target(self, found: Measured) -> int:
        if self.mtbf is not None:
            wanted = round(min(daly_interval(found.cost, self.mtbf) / found.alone, _MAX_INTERVAL))
        else:
            # The smallest number is meant; rounding in the division must not make it one more.
            wanted = math.ceil(min(found.cost / (self.budget * found.alone), _MAX_INTERVAL) - 1e-9)
        return max(wanted, found.durable_steps)

    def _choose(self) -> None:
        found = self._measure()
        if found is not None:
            target = self._target(found)
            near = max(2 * target, target + 3)
            self._interval = max([target, *(old for old in self._targets if old <= near)])

    def _explanation(self) -> str:
        goal = f"budget {100 * self.budget:.3g}%"
        if self.mtbf is not None:
            goal = f"a failure every {_say(self.mtbf)}, {goal}"
        found, chosen = self._measure(), self._interval
        if found is None or chosen is None:
            return (
                f"auto ({goal}): measuring. {_count(self._finished, 'save')} and "
                f"{_count(len(self._alone), 'undisturbed step')} of {MIN_ALONE} so far"
            )
        overhead = found.cost / (chosen * found.alone)
        lines = [
            f"auto ({goal}): {'measuring, for now ' if self.measuring else ''}{_every(chosen)}",
            f"  that is about {_say(chosen * found.alone)}, at an overhead of {100 * overhead:.3g}%",
            f"  a step takes {_say(found.alone)} (median of {len(self._alone)} with no save in flight)",
            f"  a save costs {_say(found.cost)}: {_say(found.stall)} stall, {_say(found.slowdown)} slowdown "
            f"of steps beside it (medians of {_count(len(self._costed()), 'save')})",
            f"  it is durable after {_say(found.busy)}: at least {_count(found.durable_steps, 'step')} apart",
        ]
        if self.mtbf is not None:
            best = _say(daly_interval(found.cost, self.mtbf))
            lines.append(f"  the optimum for this failure rate (Daly) is {best}")
            if overhead > self.budget:
                lines.append(
                    "  over the budget, taken all the same: saving less often loses more to failures"
                )
        return "\n".join(lines)


def _mtbf_seconds(mtbf: float | str) -> float:
    seconds = _parse_seconds(mtbf) if isinstance(mtbf, str) else mtbf
    if seconds is None or isinstance(mtbf, bool) or not _between(0, seconds, math.inf):
        raise ValueError(
            f'mtbf, the mean time between failures, is seconds or a time such as "6h" or "2d", not {mtbf!r}'
        )
    return float(seconds)


def _between(low: float, number: float, high: float) -> bool:
    try:
        return low < number < high
    except TypeError:  # it is none
        return False


def _parse_seconds(text: str) -> float | None:
    match = _TIME.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def _say(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit in "dhm":
        if seconds >= 1.5 * _UNITS[unit] or seconds == _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.3g} {'min' if unit == 'm' else unit}"
    return f"{seconds:.3g} s"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
