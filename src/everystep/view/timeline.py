"""The events of a run as columns to draw: its saves, what a crash would have lost, and everything else.

Each entry follows from earlier events alone, so a reader that has the first entries only needs the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from everystep.checkpointer.events import (
    Event,
    Failed,
    Opened,
    PassedOver,
    Preempted,
    RemovedEarly,
    Restored,
    Saved,
    ShortOfSpace,
)

MAX_SAVES = 20_000
"""More are thinned out: no screen has that many columns."""
MAX_HAPPENINGS = 5_000
_MAX_TEXT = 2_000
_MAX_NAMED_STEPS = 20

Tone = Literal["bad", "warn", "note"]
Kind = Literal["opened", "failed", "restored", "passed_over", "preempted", "short_of_room", "gave_up"]


@dataclass(frozen=True, slots=True)
class SaveColumns:
    """The durable saves of a run, oldest first: one entry per save in every column.

    `event`: its place among all events. `training`: how many trainings had begun. `captured`: about when the
    state was captured. `lost_seconds` and `lost_steps`: the most that a crash would have lost
    just before this save was durable, counted from what was durable then; None where the clock was set back.
    Steps that a training completes while a snapshot is written are not in `lost_steps`.
    """

    event: list[int] = field(default_factory=list)
    training: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    mode: list[str] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    stored_nbytes: list[int] = field(default_factory=list)
    copied_nbytes: list[int] = field(default_factory=list)
    stage: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    lost_seconds: list[float | None] = field(default_factory=list)
    lost_steps: list[int | None] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.event)

    def add(self, number: int, training: int, event: Saved, base: _Base) -> None:
        seconds = event.seconds
        captured = event.time - seconds.total
        onward = event.time >= base.time
        self.event.append(number)
        self.training.append(training)
        self.step.append(event.step)
        self.time.append(event.time)
        self.captured.append(captured)
        self.mode.append(event.mode)
        self.nbytes.append(event.nbytes)
        self.stored_nbytes.append(event.stored_nbytes)
        self.copied_nbytes.append(event.copied_nbytes)
        self.stage.append(seconds.stage)
        self.write.append(seconds.write)
        self.sync.append(seconds.sync)
        self.commit.append(seconds.commit)
        self.stall.append(event.stall_seconds)
        self.lost_seconds.append(event.time - base.time if onward else None)
        self.lost_steps.append(event.step - base.step if event.step >= base.step else None)
        self.metrics.append(event.metrics)

    def chosen(self, places: Sequence[int]) -> SaveColumns:
        """These saves only."""
        columns = {name: getattr(self, name) for name in self.__slots__}
        return SaveColumns(**{name: [column[at] for at in places] for name, column in columns.items()})


@dataclass(frozen=True, slots=True)
class Happening:
    """An event other than a durable save. `event` and `training` as in `SaveColumns`.

    `lost_seconds` and `lost_steps`: of a failed save, what a crash would have lost then. None where that is
    not known, and for other events.
    """

    event: int
    training: int
    time: float
    step: int | None
    kind: Kind
    tone: Tone
    text: str
    lost_seconds: float | None = None
    lost_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened in a run. `all_saves` and `all_happenings` count those that were left out, too.

    `began`: when the newest training did, and `host` and `pid` say where; None if no training was noted.
    """

    events: int
    trainings: int
    saves: SaveColumns
    all_saves: int
    happenings: tuple[Happening, ...]
    all_happenings: int
    began: float | None = None
    host: str | None = None
    pid: int | None = None

    def since(self, events: int) -> Timeline:
        """The same without its first `events` events, for a reader that has them."""
        saves = self.saves
        later = [at for at, number in enumerate(saves.event) if number >= events]
        return Timeline(
            self.events,
            self.trainings,
            saves.chosen(later),
            self.all_saves,
            tuple(item for item in self.happenings if item.event >= events),
            self.all_happenings,
            self.began,
            self.host,
            self.pid,
        )


@dataclass(slots=True)
class _Base:
    """What a crash falls back to: the state at `time`, of `step`."""

    time: float
    step: int


def timeline(events: Iterable[Event], *, most_saves: int = MAX_SAVES) -> Timeline:
    """Of all events of a run, in the order in which they were written."""
    saves, happenings = SaveColumns(), []
    base, newest = _Base(math.inf, 0), 0
    number, training = -1, 0
    opened: Opened | None = None
    for number, event in enumerate(events):
        if isinstance(event, Saved):
            if not training and not len(saves):
                base = _Base(
                    event.time - event.seconds.total, event.step
                )  # the log begins later than the run
            saves.add(number, training, event, base)
            base = _Base(event.time - event.seconds.total, event.step)
            newest = event.step
            continue
        if isinstance(event, Opened):
            training, opened, base = training + 1, event, _Base(event.time, 0)
        elif isinstance(event, Restored):
            base = _Base(event.time, event.step)
        happenings.append(_happening(number, training, event, newest, base))
    shown = saves if len(saves) <= most_saves else saves.chosen(thinned(saves, most_saves))
    return Timeline(
        events=number + 1,
        trainings=training,
        saves=shown,
        all_saves=len(saves),
        happenings=tuple(happenings[-MAX_HAPPENINGS:]),
        all_happenings=len(happenings),
        began=None if opened is None else opened.time,
        host=None if opened is None else opened.host,
        pid=None if opened is None else opened.pid,
    )


def thinned(saves: SaveColumns, most: int) -> list[int]:
    """Places of at most `most` saves: of each section the slowest and the one with the longest stall."""
    count = len(saves)
    sections = max((most - 2) // 2, 1)
    chosen = {0, count - 1}
    for number in range(sections):
        places = range(number * count // sections, (number + 1) * count // sections)
        if places:
            chosen.add(max(places, key=lambda at: saves.time[at] - saves.captured[at]))
            chosen.add(max(places, key=lambda at: saves.stall[at]))
    return sorted(chosen)


def _happening(number: int, training: int, event: Event, newest: int, base: _Base) -> Happening:
    kind, tone, text = _told(event, newest)
    step = None if isinstance(event, Opened) else event.step
    seconds = steps = None
    if isinstance(event, Failed) and event.time >= base.time:
        seconds, steps = event.time - base.time, max(event.step - base.step, 0)
    return Happening(number, training, event.time, step, kind, tone, text[:_MAX_TEXT], seconds, steps)


def _told(event: Event, newest: int) -> tuple[Kind, Tone, str]:
    """What happened. `newest` is the last step that was durable before."""
    if isinstance(event, Opened):
        every = f"every {event.every} steps" if isinstance(event.every, int) else f"every {event.every}"
        where = f"process {event.pid} on {event.host}"
        return "opened", "note", f"A training opened the run: {where}, mode {event.mode}, {every}."
    if isinstance(event, Failed):
        return "failed", "bad", f"{event.error}: {event.message}"
    if isinstance(event, Restored):
        behind = newest - event.step
        back = f", {behind:,} before the newest one" if behind > 0 else ""
        return "restored", "note", f"Training resumed from step {event.step:,}{back}."
    if isinstance(event, PassedOver):
        return "passed_over", "bad", f"A damaged checkpoint was passed over: {event.reason}"
    if isinstance(event, Preempted):
        return "preempted", "warn", f"{event.signal} asked the training to end; this step was saved first."
    if isinstance(event, ShortOfSpace):
        room = f"The device has space for {event.fit} of {event.wanted} checkpoints"
        return "short_of_room", "warn", f"{room} that the rules keep."
    assert isinstance(event, RemovedEarly)
    steps = ", ".join(f"{step:,}" for step in event.steps[:_MAX_NAMED_STEPS])
    more = f" and {len(event.steps) - _MAX_NAMED_STEPS} more" if len(event.steps) > _MAX_NAMED_STEPS else ""
    return "gave_up", "warn", f"Removed early, to make space: step {steps}{more}."
