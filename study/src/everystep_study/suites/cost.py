"""The study's suite ``cost``: the time that a training loses to checkpoints, and where one save's time goes.

Each turn of a mechanism trains some steps without checkpoints and as many with them, for each frequency.
Durable and not durable are different cases; what is always durable has no other one. The durable one also
splits one save into serialising, writing and syncing. All clocks are in the framework's process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep_study import frameworks
from everystep_study.frameworks.api import Training
from everystep_study.frameworks.models import TITLES, size_of
from everystep_study.harness.costs import wall_seconds
from everystep_study.harness.files import remove
from everystep_study.harness.results import SECONDS, Row
from everystep_study.harness.results_directory import Entry
from everystep_study.harness.suite import Case, Group, Needs, Turn
from everystep_study.mechanisms.mechanism import Mechanism
from everystep_study.report.elements import (
    NOTHING,
    Bar,
    Cell,
    Chart,
    Item,
    Number,
    Source,
    SuiteReport,
    Table,
    Words,
    is_ours,
    milliseconds,
    name_of,
    ratio,
    table,
    whole,
)
from everystep_study.suites.by_framework import FrameworkSuite, MechanismCase
from everystep_study.workers.orders import Context
from everystep_study.workers.processes import FrameworkProcess

STEPS = 4
EVERY = (1, STEPS)
SLOW_TURN_SECONDS = 20.0
"""A turn that takes longer is not made for warming up alone: it saves before its clock starts, too."""
_COPIES = 3
"""Two checkpoints in turns, and the one in memory."""


LONG_SECONDS = 2.0
"""Saves that take longer are not repeated before the clock starts: what one of them finds out is the same."""
SLOW_SECONDS = 10.0
"""A save that takes longer is made once in a turn."""


def train(
    context: Context, mechanism: str, durable: bool, every: list[int], steps: int, directory: str
) -> dict[str, Any]:
    """So many steps without checkpoints; for each frequency as many with one after each `every` steps;
    as many without again. Answers readings by frequency.

    Some saves are made before the clock starts: what is measured is the middle of a training, in which
    every name has been written before, and a save that is due may have to wait for the one before it.
    """
    if context.framework.loop is not None:
        return _train_loop(context, mechanism, durable, every, steps, Path(directory))
    training = context.training

    def train_only() -> float:
        return wall_seconds(lambda: [training.step() for _ in range(steps)])

    before = train_only()
    with context.opened(mechanism, directory, durable=durable, slots=2) as opened:
        slow = settling = 0.0
        for _ in range(opened.slots + 1):
            slow = wall_seconds(opened.save_and_sync)
            settling += slow
            if settling > LONG_SECONDS:
                break
        if slow > SLOW_SECONDS and not opened.background:
            # Nothing overlaps with it, so it costs what it takes: once is enough.
            alone = {**_compared(before + slow, before, 1), "call_seconds": slow}
            return {
                str(each): {**alone, "lost_percent": 100 * slow / (before * each / steps)} for each in every
            }
        blocks = [_block(training, opened, each, steps) for each in every]
    base = (before + train_only()) / 2
    found = {}
    for each, (seconds, called, drained) in zip(every, blocks, strict=True):
        saves = steps // each
        found[str(each)] = {
            **_compared(seconds, base, saves),
            "call_seconds": called / saves,
            "drain_seconds": drained,
        }
    return found


def _block(training: Training, opened: Mechanism, every: int, steps: int) -> tuple[float, float, float]:
    """Steps with checkpoints: all seconds, those in saves, and those until the last was written."""
    called = 0.0
    began = time.perf_counter()
    for step in range(1, steps + 1):
        training.step()
        if step % every == 0:
            called += wall_seconds(opened.save_and_sync)
    return time.perf_counter() - began, called, wall_seconds(opened.wait)


def _train_loop(
    context: Context, mechanism: str, durable: bool, every: list[int], steps: int, directory: Path
) -> dict[str, Any]:
    loop, size = context.framework.loop, size_of(*context.built[:2])
    assert loop is not None

    def seconds_of(mechanism: str, every: int) -> float:
        directory.mkdir(parents=True)
        try:
            return loop(size, mechanism, durable, every, steps, directory)
        finally:
            remove(directory)

    before = seconds_of("", 1)
    blocks = [seconds_of(mechanism, each) for each in every]
    base = (before + seconds_of("", 1)) / 2
    return {
        str(each): _compared(seconds, base, steps // each)
        for each, seconds in zip(every, blocks, strict=True)
    }


def split(context: Context, mechanism: str, directory: str, memory: str) -> dict[str, float]:
    """Where the time of one durable save goes, found from outside, the same way for all.

    Serialising: all of a save into a filesystem in memory. Writing: how much longer the same takes on the
    disk. Syncing: what it then takes to make it durable. Each is timed at the second save in its
    directory; a long one at the first.
    """
    found = {}
    for name, place in (("memory", memory), ("disk", directory)):
        if not place:
            continue
        try:
            with context.opened(mechanism, place, durable=False, slots=2) as opened:
                for _ in range(2):
                    found[name] = wall_seconds(opened.save) + wall_seconds(opened.wait)
                    found[f"{name} sync"] = opened.own_sync_seconds()
                    if name == "disk" and not opened.always_durable:
                        found["disk sync"] = wall_seconds(opened.sync)
                    if found[name] > LONG_SECONDS:
                        break
        finally:
            remove(Path(place))
    inner = context.mechanisms[mechanism].always_durable
    save = found["disk"] - (found["disk sync"] if inner else 0.0)
    readings = {"save_seconds": found["disk"], "sync_seconds": found["disk sync"]}
    if "memory" in found:
        readings["serialise_seconds"] = min(found["memory"], save)
        readings["write_seconds"] = max(0.0, save - found["memory"])
    return readings


def _compared(seconds: float, base: float, saves: int) -> dict[str, float]:
    """A training with checkpoints, and the same one without."""
    return {
        SECONDS: seconds,
        "base_seconds": base,
        "saves": saves,
        "stall_seconds": (seconds - base) / saves,
        "lost_percent": 100 * (seconds - base) / base,
    }


class Cost(MechanismCase):
    """`split` False: of a trainer that owns its loop, one save cannot be had alone; and one that is not
    durable is serialised and written as the durable one is."""

    def __init__(
        self, process: FrameworkProcess, mechanism: dict[str, Any], durable: bool, memory: str, split: bool
    ) -> None:
        kind = "durable" if durable else "not durable"
        trained = tuple(f"{kind} every {every}" for every in EVERY)
        super().__init__(process, mechanism, (*trained, f"{kind} split") if split else trained)
        self.key = f"{mechanism['key']}, {kind}"
        self._durable, self._memory, self._split = durable, memory, split

    def measure(self, turn: Turn) -> None:
        common = {"mechanism": self.mechanism["key"], "durable": self._durable}
        place = turn.directory / "saved"
        with turn.settled():
            found = self.process.ask(train, every=list(EVERY), steps=STEPS, directory=str(place), **common)
        for every, section in zip(EVERY, self.sections, strict=False):
            turn.record(section, found[str(every)])
        remove(place)
        if self._split:
            memory = f"{self._memory}/{self.mechanism['key']}" if self._memory else ""
            with turn.settled():
                found = self.process.ask(
                    split, mechanism=self.mechanism["key"], memory=memory, directory=str(place)
                )
            turn.record(self.sections[-1], found)


_KINDS = ("durable", "not durable")


def _items(source: Source) -> Iterator[Item]:
    if split := source.rows("durable split"):
        yield _split_chart(source, split)
    if source.rows(f"durable every {EVERY[0]}"):
        yield _stall_chart(source)
        for kind in _KINDS:
            yield _stall_table(source, kind)


def _at_a_glance(entries: Sequence[Entry]) -> Table | None:
    """The first mechanism of each framework, which is its usual one, and the fastest of its others, beside
    Everystep's best.
    """
    section, reading = f"durable every {EVERY[0]}", "stall_seconds"
    rows = []
    for entry in sorted(entries, key=_by_model):
        source = Source(entry)
        found = [row for row in source.rows(section) if row.samples]
        by_stall = sorted(found, key=lambda row: row.median(reading) or 0)
        own = next((row for row in found if not is_ours(row)), None)
        best = next((row for row in by_stall if is_ours(row)), None)
        other = next((row for row in by_stall if not is_ours(row)), None)
        if own is None or best is None or other is None:
            continue

        def compared(row: Row, best: Row = best, source: Source = source) -> Cell:
            shown = ratio(source.number(best, reading), source.number(row, reading))
            return Words(NOTHING) if shown is None else (shown,)

        def stalled(row: Row, source: Source = source) -> Cell:
            shown = source.number(row, reading)
            title = row.title.rpartition(", ")[2] if is_ours(row) else row.title
            return Words(NOTHING) if shown is None else (shown, Words(f" {title}"))

        same = other is own
        cells = (
            stalled(own),
            Words(NOTHING) if same else stalled(other),
            stalled(best),
            compared(own),
            Words(NOTHING) if same else compared(other),
        )
        rows.append((name_of(entry), cells, False))
    headings = (
        "usual mechanism, ms",
        "its fastest other, ms",
        "Everystep, ms",
        "of the usual",
        "of the fastest",
    )
    return Table("A durable checkpoint after every step", headings, tuple(rows)) if rows else None


def _by_model(entry: Entry) -> tuple[int, int]:
    known, models = list(frameworks.FRAMEWORKS), list(TITLES)
    name, model = entry.part.framework, entry.part.model
    return (
        models.index(model) if model in models else len(models),
        known.index(name) if name in known else len(known),
    )


def _split_chart(source: Source, rows: Sequence[Row]) -> Chart:
    def parts(row: Row) -> tuple[Number | None, ...]:
        return tuple(source.number(row, f"{name}_seconds") for name in ("serialise", "write", "sync"))

    bars = tuple(Bar(row.title, parts(row), is_ours(row)) for row in rows)
    return Chart("One durable save, medians", "ms", ("serialising", "writing", "syncing"), bars)


def _stall_chart(source: Source) -> Chart:
    bars = []
    for kind in _KINDS:
        for row in source.rows(f"{kind} every 1"):
            number, low, high = (
                source.number(row, "stall_seconds", milliseconds, name) for name in ("median", "low", "high")
            )
            bars.append(Bar(f"{row.title}, {kind}", (number,), is_ours(row), low, high))
    return Chart("Stall per checkpoint, one after every step", "ms", (), tuple(bars))


def _stall_table(source: Source, kind: str) -> Table:
    parts = {"serialise": "serialising", "write": "writing", "sync": "syncing"} if kind == "durable" else {}

    def cells(row: Row) -> list[Cell]:
        split = source.row(f"{kind} split", row.case)
        stalls = [source.row(f"{kind} every {every}", row.case) for every in EVERY]
        return [
            *(source.cell(stall, "stall_seconds") for stall in stalls),
            source.cell(row, "lost_percent", whole),
            source.cell(row, "call_seconds", spread=False),
            *(source.cell(split, f"{name}_seconds", spread=False) for name in parts),
        ]

    headings = [
        *(f"stall, every {_steps(every)}, ms" for every in EVERY),
        "training slower by, every step, %",
        "in the call, ms",
        *(f"{title}, ms" for title in parts.values()),
    ]
    title = f"{kind.capitalize()}: medians (lowest{NOTHING}highest)"
    return table(title, headings, source.rows(f"{kind} every {EVERY[0]}"), cells)


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


REPORT = SuiteReport(
    "What a checkpoint costs a training",
    (
        "Stall: how much longer the training takes per checkpoint, all effects included: the call "
        "itself, waiting for the checkpoint before, and steps that are slower because something is "
        f"written beside them. It is measured as {STEPS} steps with checkpoints minus {STEPS} steps "
        "without, in the same turn.",
        "Serialising is the time of a save into memory (a tmpfs); writing is how much longer the same "
        "save takes on the disk; syncing is what it then takes until the files and their directories "
        "survive a power cut. Not durable means: the save returned, and a power cut may lose it. "
        "The two are never mixed: each column and bar says which it is. Everystep is always durable.",
    ),
    _items,
    _at_a_glance,
)


@contextlib.contextmanager
def memory_folder(nbytes: int, where: Path = Path("/dev/shm")) -> Iterator[str]:
    """A folder in memory with so much room, or "" where there is none; removed at the end."""
    room = os.statvfs(where) if where.is_dir() else None
    if room is None or room.f_bavail * room.f_frsize < nbytes:
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="everystep-study-", dir=where)
    try:
        yield folder
    finally:
        remove(Path(folder))


@dataclass
class CostSuite(FrameworkSuite):
    name = "cost"
    report = REPORT

    def measured(self, process: FrameworkProcess) -> Iterator[Group]:
        self.build(process)
        nbytes = int(self.built["weights_nbytes"] + self.built["optimizer_nbytes"])
        with memory_folder(_COPIES * nbytes) as memory:
            cases: list[Case] = []
            for mechanism in process.hello["mechanisms"]:
                if not mechanism["always_durable"]:
                    cases.append(Cost(process, mechanism, False, memory, split=False))
                cases.append(Cost(process, mechanism, True, memory, split=not process.hello["loop"]))
            yield self.group(f"{self.framework}, {self.model}", cases, slow_seconds=SLOW_TURN_SECONDS)

    def needs(self) -> Needs:
        return Needs(disk_nbytes=(1 << 30) if self.quick else (8 << 30))
