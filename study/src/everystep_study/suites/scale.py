"""The study's suite ``scale``: 1, 2 and 4 ranks save one replicated state; how long does each write, and
wait?

A rank waits inside of messages and collectives (`rank_orders`), and from its own end until the last rank's:
a training goes on when all have saved. All else is writing. Beyond this machine, a line is fitted to the
medians and stored as a projection.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everystep_study.harness.files import missing_everystep, missing_modules, remove
from everystep_study.harness.results import SECONDS, size
from everystep_study.harness.suite import Case, Group, Needs, Turn
from everystep_study.mechanisms.competitors import STORING
from everystep_study.report.elements import (
    NOTHING,
    Bar,
    Chart,
    Item,
    Source,
    SuiteReport,
    is_ours,
)
from everystep_study.suites.by_framework import FrameworkSuite
from everystep_study.suites.ranks import saved_together
from everystep_study.workers.processes import FrameworkProcess, Ranks
from everystep_study.workers.rank_orders import seconds_of

WORLDS = (1, 2, 4)
PROJECTED = (8, 16, 32, 64)
SYSTEMS = ("torch", "dcp", "everystep-recycled")
NBYTES, QUICK_NBYTES = 256 << 20, 32 << 20


class RankedSave(Case):
    def __init__(self, ranks: Ranks, key: str, found: dict[str, dict[int, list[float]]]) -> None:
        self.key, self.title = key, STORING[key].title
        self.sections = (f"{ranks.size} ranks",)
        self._ranks, self._found = ranks, found

    def missing(self) -> str | None:
        return missing_modules("torch") or missing_everystep()

    def measure(self, turn: Turn) -> None:
        readings = split(saved_together(self._ranks, self.key, turn))
        turn.record(self.sections[0], readings)
        if turn.round > 0:
            self._found.setdefault(self.key, {}).setdefault(self._ranks.size, []).append(readings[SECONDS])


def split(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Of all ranks the slowest, and of each rank what it wrote and waited."""
    last = max(answer["ended"] for answer in answers)
    waited = [answer["waiting_seconds"] + last - answer["ended"] for answer in answers]
    wrote = [answer["ended"] - answer["began"] - answer["waiting_seconds"] for answer in answers]
    readings = {
        SECONDS: seconds_of(answers),
        "writing_seconds": statistics.mean(wrote),
        "waiting_seconds": statistics.mean(waited),
    }
    for rank, (writing, waiting) in enumerate(zip(wrote, waited, strict=True)):
        readings |= {f"writing, rank {rank}": writing, f"waiting, rank {rank}": waiting}
    return readings


class Projection(Case):
    """A line through the medians of the worlds that were measured, and what it says of larger ones."""

    sections = ("projection",)

    def __init__(self, key: str, measured: Mapping[int, Sequence[float]]) -> None:
        self.key, self.title = key, STORING[key].title
        self._measured = measured

    def measure(self, turn: Turn) -> None:
        turn.record("projection", project({n: statistics.median(v) for n, v in self._measured.items()}))


def project(medians: Mapping[int, float]) -> dict[str, float]:
    """Least squares of seconds over ranks; one that becomes faster with ranks here is taken as constant."""
    slope, intercept = (float(value) for value in np.polyfit(list(medians), list(medians.values()), 1))
    if slope < 0:
        slope, intercept = 0.0, min(medians.values())
    readings = {"seconds_per_rank": slope, "seconds_fixed": intercept}
    return readings | {f"seconds, {world} ranks": intercept + slope * world for world in PROJECTED}


def _items(source: Source) -> Iterator[Item]:
    for number in WORLDS:
        section = f"{number} ranks"
        rows = source.rows(section)
        if not any(row.samples for row in rows):
            continue
        names = ("writing_seconds", "waiting_seconds")
        bars = tuple(
            Bar(row.title, tuple(source.number(row, name) for name in names), is_ours(row)) for row in rows
        )
        ranks = "1 rank" if number == 1 else section
        yield Chart(f"{ranks}, mean of the ranks, medians", "ms", ("writing", "waiting"), bars)
        spent = [(rank, what) for rank in range(number) for what in ("writing", "waiting")]
        headings = {f"rank {rank}: {what}, ms": f"{what}, rank {rank}" for rank, what in spent}
        headings = {"until the last has ended, ms": SECONDS, **headings}
        yield source.table(f"{ranks}: medians (lowest{NOTHING}highest)", section, headings, spread=1)
    if source.rows("projection"):
        headings = {"fixed, ms": "seconds_fixed", "per rank, ms": "seconds_per_rank"}
        headings |= {f"{number} ranks, ms": f"seconds, {number} ranks" for number in PROJECTED}
        yield source.table("Projection, not measured", "projection", headings)


REPORT = SuiteReport(
    "Several ranks on this machine",
    (
        "All ranks hold the same state, as in data-parallel training, and save it together, durably. A "
        "rank waits inside of messages and collectives, and from its own end until that of the last "
        "rank; all else is writing. With torch.save, rank 0 writes everything and the others wait.",
        "The projection is no measurement: it is a straight line through the medians, and it assumes "
        "that the storage stays the same however many ranks there are.",
    ),
    _items,
)


@dataclass
class ScaleSuite(FrameworkSuite):
    name = "scale"
    report = REPORT
    _found: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return QUICK_NBYTES if self.quick else NBYTES

    def needs(self) -> Needs:
        copies = max(WORLDS) + 2
        return Needs(disk_nbytes=4 * copies * self.nbytes, memory_nbytes=copies * self.nbytes)

    def measured(self, process: FrameworkProcess) -> Iterator[Group]:
        for number in WORLDS:
            process.look_at_clock()
            own = process.folder / f"world-{number}"
            own.mkdir()
            world = Ranks(number, self.nbytes, own, self.order_seconds, self.end)
            try:
                cases = [RankedSave(world, key, self._found) for key in SYSTEMS]
                yield self.group(f"{number} ranks", [*cases], share=1 / len(WORLDS))
            finally:
                world.kill()
                remove(own)
        fitted = [Projection(key, found) for key, found in self._found.items() if len(found) == len(WORLDS)]
        if fitted:
            yield Group("projection", [*fitted], 1, warm_up=0)

    def subject(self) -> str:
        return f"{size(self.nbytes)} of a GPT-2 with Adam on every rank"

    def facts(self) -> dict[str, float]:
        return {"state_nbytes": float(self.nbytes)}
