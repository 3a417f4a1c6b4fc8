"""What the events of a run add up to: how often it saved, how fast, at what cost to the training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TypeVar

from everystep.checkpointer.events import (
    EVENTS_NAME,
    Event,
    Failed,
    Opened,
    PassedOver,
    Preempted,
    Restored,
    Saved,
    read_events,
)
from everystep.errors import EverystepError
from everystep.store import is_checkpoint, list_steps, locate
from everystep.store.read.listing import inner_checkpoints, runs_in

_S = TypeVar("_S", bound=Saved | Failed)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some measurements.

    Attributes:
        median: The middle one.
        low: The lowest.
        p95: The 95th percentile.
        high: The highest.
        total: Their sum.
    """

    median: float
    low: float
    p95: float
    high: float
    total: float


@dataclass(frozen=True, slots=True)
class PhaseDistributions:
    """Seconds of the saves, phase by phase.

    Attributes:
        stage: Copying what training may change.
        write: Writing.
        sync: Making it durable.
        commit: The rename, and what belongs to it.
        total: All phases of each save together.
    """

    stage: Distribution
    write: Distribution
    sync: Distribution
    commit: Distribution
    total: Distribution


@dataclass(frozen=True, slots=True)
class Saves:
    """The saves that became durable.

    Attributes:
        count: How many.
        first_step: The lowest step.
        last_step: The step of the last one.
        leaves: How many leaves the last one has.
        state_nbytes: The size of the leaves of the last one.
        nbytes: The size of the leaves of all saves.
        stored_nbytes: The size of their files.
        in_place_nbytes: How much of that was read in place from the training's memory.
        copied_nbytes: How much was copied first.
        gb_per_second: Speed.
        seconds: How long they took.
        between_seconds: From one save to the next of the same training; None if there are too few.
        between_steps: The same in steps.
    """

    count: int
    first_step: int
    last_step: int
    leaves: int
    state_nbytes: int
    nbytes: int
    stored_nbytes: int
    in_place_nbytes: int
    copied_nbytes: int
    gb_per_second: Distribution
    seconds: PhaseDistributions
    between_seconds: Distribution | None
    between_steps: Distribution | None


@dataclass(frozen=True, slots=True)
class Restores:
    """The restores of a run.

    Attributes:
        count: How many.
        nbytes: Bytes that they read.
        seconds: How long they took.
    """

    count: int
    nbytes: int
    seconds: Distribution


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The metrics of one step, whether or not its checkpoint still exists.

    Attributes:
        step: The step.
        time: Unix time of the save.
        values: The metrics by name.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric, over the steps that saved it. NaN counts for `first` and `last` only.

    Attributes:
        count: How many steps.
        first: Its first value.
        last: Its last value.
        low: Its lowest value.
        low_step: Where that was.
        high: Its highest value.
        high_step: Where that was.
    """

    count: int
    first: float
    last: float
    low: float | None
    low_step: int | None
    high: float | None
    high_step: int | None


@dataclass(frozen=True, slots=True)
class EventSummary:
    """What the events of a run add up to.

    Attributes:
        events: How many events.
        trainings: How many trainings opened the run.
        first_time: Unix time of the first event.
        last_time: Unix time of the last.
        saves: The saves that became durable; None if there are none.
        failed: How many saves failed.
        stall_seconds: How long training waited for a save.
        stall_share: Which part of the time between saves training waited for them, failed ones too.
        restores: The restores; None if there are none.
        passed_over: How many damaged checkpoints were passed over.
        preempted: How many trainings were asked to end.
        metrics: The metrics by name.
    """

    events: int
    trainings: int
    first_time: float
    last_time: float
    saves: Saves | None
    failed: int
    stall_seconds: Distribution | None
    stall_share: float | None
    restores: Restores | None
    passed_over: int
    preempted: int
    metrics: Mapping[str, MetricSummary] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of a run.

    Attributes:
        path: The run.
        events: Its events, oldest first.
        skipped_lines: Lines that a crash has torn, or another version has written.
        summary: What the events add up to.
    """

    path: str
    events: tuple[Event, ...]
    skipped_lines: int
    summary: EventSummary

    @property
    def metrics(self) -> tuple[MetricPoint, ...]:
        """The metrics of all steps, pruned ones included, in order of step."""
        return metric_points(self.events)


class NoEvents(EverystepError, FileNotFoundError):
    """The directory has no events: it is not a run, or no Checkpointer has saved there. Check the path."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[type[NoEvents], tuple[str, str]]:
        return type(self), (str(self), self.path)


def summarize(run: str | os.PathLike[str]) -> RunEvents:
    """Read the events of a run and sum them up. A training may be writing to it.

    Raises `NoEvents` if there are none, and `everystep.CheckpointNotFound` if there is no such directory.

    Args:
        run: The run.
    """
    where = locate(run)
    events, skipped = read_events(where)
    if not events:
        raise NoEvents(_why_none(where, skipped), where)
    return RunEvents(where, tuple(events), skipped, summarize_events(events))


def _why_none(where: str, skipped: int) -> str:
    if is_checkpoint(where):
        return f"{where} is a checkpoint; events belong to a run: everystep stats {os.path.dirname(where)}"
    if skipped:
        lines = "1 line" if skipped == 1 else f"{skipped:,} lines"
        return f"{where}: {EVENTS_NAME} has {lines}, and none that this version knows"
    if list_steps(where):
        return (
            f"{where} has checkpoints but no {EVENTS_NAME}: a Checkpointer writes it from its first save on. "
            "`everystep ls` lists the checkpoints"
        )
    if inner_checkpoints(where):
        return (
            f"{where} holds checkpoints that no Checkpointer made, so there is no {EVENTS_NAME}. "
            "`everystep ls` lists them"
        )
    runs = runs_in(where)
    if runs:
        return f"{where} is not a run, but holds runs: everystep stats {os.path.join(where, runs[0])}"
    return f"{where} is not a run: it holds neither checkpoints nor {EVENTS_NAME}"


def summarize_events(events: Sequence[Event]) -> EventSummary:
    """At least one event, in the order in which they were written."""
    saved = [event for event in events if isinstance(event, Saved)]
    trainings = _trainings(events)
    return EventSummary(
        events=len(events),
        trainings=_count(events, Opened),
        first_time=events[0].time,
        last_time=events[-1].time,
        saves=_saves(saved, trainings) if saved else None,
        failed=_count(events, Failed),
        stall_seconds=distribution(event.stall_seconds for training in trainings for event in training),
        stall_share=_stall_share(trainings),
        restores=_restores([event for event in events if isinstance(event, Restored)]),
        passed_over=_count(events, PassedOver),
        preempted=_count(events, Preempted),
        metrics=_metric_summaries(metric_points(events)),
    )


def metric_points(events: Iterable[Event]) -> tuple[MetricPoint, ...]:
    """The metrics of each step, in order of step.

    A training that goes back to an earlier step, or starts over, makes what came after that step obsolete.
    """
    points: dict[int, MetricPoint] = {}
    begins = False
    for event in events:
        if isinstance(event, Opened):
            begins = True
        elif isinstance(event, Restored):
            begins = False
            points = {step: point for step, point in points.items() if step <= event.step}
        elif isinstance(event, Saved):
            if begins:
                points = {step: point for step, point in points.items() if step < event.step}
                begins = False
            if event.metrics:
                points[event.step] = MetricPoint(event.step, event.time, event.metrics)
    return tuple(points[step] for step in sorted(points))


def _metric_summaries(points: Sequence[MetricPoint]) -> dict[str, MetricSummary]:
    found: dict[str, list[tuple[float, int]]] = {}
    for point in points:
        for name, value in point.values.items():
            found.setdefault(name, []).append((value, point.step))
    return {name: _metric_summary(values) for name, values in found.items()}


def _metric_summary(values: Sequence[tuple[float, int]]) -> MetricSummary:
    numbers = [pair for pair in values if not math.isnan(pair[0])]
    low = min(numbers, default=None)
    high = max(numbers, key=lambda pair: (pair[0], -pair[1]), default=None)
    return MetricSummary(
        count=len(values),
        first=values[0][0],
        last=values[-1][0],
        low=None if low is None else low[0],
        low_step=None if low is None else low[1],
        high=None if high is None else high[0],
        high_step=None if high is None else high[1],
    )


def distribution(values: Iterable[float]) -> Distribution | None:
    """None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = max(math.ceil(0.95 * len(ordered)) - 1, 0)
    return Distribution(median(ordered), ordered[0], ordered[rank], ordered[-1], math.fsum(ordered))


def _saves(saved: list[Saved], trainings: list[list[Saved | Failed]]) -> Saves:
    durable = [[event for event in training if isinstance(event, Saved)] for training in trainings]
    pairs = [pair for training in durable for pair in _onward(training)]

    def over(value: Callable[[Saved], float]) -> Distribution:
        found = distribution(map(value, saved))
        assert found is not None  # there is at least one save
        return found

    return Saves(
        count=len(saved),
        first_step=min(event.step for event in saved),
        last_step=saved[-1].step,
        leaves=saved[-1].leaves,
        state_nbytes=saved[-1].nbytes,
        nbytes=sum(event.nbytes for event in saved),
        stored_nbytes=sum(event.stored_nbytes for event in saved),
        in_place_nbytes=sum(event.in_place_nbytes for event in saved),
        copied_nbytes=sum(event.copied_nbytes for event in saved),
        gb_per_second=over(lambda event: event.gb_per_second),
        seconds=PhaseDistributions(
            stage=over(lambda event: event.seconds.stage),
            write=over(lambda event: event.seconds.write),
            sync=over(lambda event: event.seconds.sync),
            commit=over(lambda event: event.seconds.commit),
            total=over(lambda event: event.seconds.total),
        ),
        between_seconds=distribution(after.time - before.time for before, after in pairs),
        between_steps=distribution(
            after.step - before.step for before, after in pairs if after.step > before.step
        ),
    )


def _restores(restored: list[Restored]) -> Restores | None:
    seconds = distribution(event.seconds for event in restored)
    if seconds is None:
        return None
    return Restores(len(restored), sum(event.nbytes for event in restored), seconds)


def _stall_share(trainings: list[list[Saved | Failed]]) -> float | None:
    pairs = [pair for training in trainings for pair in _onward(training)]
    passed = sum(after.time - before.time for before, after in pairs)
    return sum(after.stall_seconds for _, after in pairs) / passed if passed > 0 else None


def _trainings(events: Sequence[Event]) -> list[list[Saved | Failed]]:
    """The saves of each training separately: the time between two trainings does not count."""
    found: list[list[Saved | Failed]] = [[]]
    for event in events:
        if isinstance(event, Opened | Restored):
            found.append([])
        elif isinstance(event, Saved | Failed):
            found[-1].append(event)
    return found


def _onward(saves: Sequence[_S]) -> Iterator[tuple[_S, _S]]:
    """Each save and the next one, unless the clock was set back in between."""
    return ((before, after) for before, after in pairwise(saves) if after.time >= before.time)


def _count(events: Sequence[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)
