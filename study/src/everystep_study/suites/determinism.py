"""The study's suite ``determinism``: does a resumed training equal one that was never stopped?

2N steps are compared with N steps, a restore into a new training of another seed, and N more steps. Once with
everything restored, once without each ingredient, and once with each checkpoint that the framework's
documentation shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep_study.frameworks.process import FrameworkProcess
from everystep_study.report import (
    NOTHING,
    Cell,
    Item,
    Source,
    SuiteReport,
    Table,
    Words,
    small,
    table,
    whole,
)
from everystep_study.results import Row
from everystep_study.suite import Case, Group, Turn
from everystep_study.suites.by_framework import FrameworkSuite

STEPS = 8
"""N. The scheduler of a probe changes the learning rate in both halves."""


class Resume(Case):
    """One resume; `without` an ingredient, or from a `default` checkpoint."""

    def __init__(
        self, process: FrameworkProcess, key: str, title: str, seed: int, without: str = "", default: str = ""
    ) -> None:
        self.key, self.title, self.sections = key, title, ("default" if default else "left out",)
        self._process = process
        self._order: dict[str, Any] = {"steps": STEPS, "seed": seed, "without": without, "default": default}
        self.absent: str | None = None

    def missing(self) -> str | None:
        return self.absent

    def measure(self, turn: Turn) -> None:
        found = self._process.ask("determinism", directory=str(turn.directory), **self._order)
        turn.record(self.sections[0], found)


def _items(source: Source) -> Iterator[Item]:
    made = (("left out", "Restored, but for this"), ("default", "Restored from the usual checkpoint"))
    for section, title in made:
        if rows := source.rows(section):
            yield _resumes(source, section, title, rows)


def _resumes(source: Source, section: str, title: str, rows: Sequence[Row]) -> Table:
    def cells(row: Row) -> list[Cell]:
        equal = source.number(row, "equal", whole)
        first = source.number(row, "first_differing_step", whole)
        verdict = Words(NOTHING if row.samples else row.status)
        if equal is not None:
            verdict = Words("the same bits", "good") if equal.value else Words("differs", "bad")
        return [
            verdict,
            Words(NOTHING) if first is None or not first.value else (first,),
            source.cell(row, "steps", whole),
            source.cell(row, "largest_loss_difference", small),
            source.cell(row, "largest_weight_difference", small),
            *([_forgotten(source, row)] if section == "default" else []),
        ]

    headings = ["result", "first differing step", "of steps", "largest difference of a loss", "of a weight"]
    headings += ["not restored"] if section == "default" else []
    return table(title, headings, rows, cells)


def _forgotten(source: Source, row: Row) -> Cell:
    titles = {other.case: other.title for other in source.rows("left out")}
    found = [
        titles.get(name.removeprefix("restored, "), "weights")
        for sample in row.samples
        for name, value in sample.readings.items()
        if name.startswith("restored, ") and not value
    ]
    return Words("; ".join(found), "bad") if found else Words("nothing" if row.samples else NOTHING)


REPORT = SuiteReport(
    "Is a resumed training the same training?",
    (
        "A training of 2N steps is compared with N steps, a restore into a new training with "
        "another seed, and N more steps. The probe has dropout, noise and mirroring of its images, "
        "momentum, a scheduler, shuffled data and BatchNorm. First everything is restored; then all but "
        "one ingredient; then what the framework's documentation shows as its checkpoint.",
    ),
    _items,
)


@dataclass
class DeterminismSuite(FrameworkSuite):
    name = "determinism"
    report = REPORT

    def measured(self, process: FrameworkProcess, hello: dict[str, Any], folder: Path) -> Iterator[Group]:
        cases: list[Case] = [Resume(process, "nothing", "nothing left out", self.seed)]
        for key, title in process.ask("ingredients").items():
            cases.append(Resume(process, key, title, self.seed, without=key))
        for default in hello["defaults"]:
            case = Resume(process, default["key"], default["title"], self.seed, default=default["key"])
            case.absent = default["missing"]
            cases.append(case)
        yield Group(self.framework, cases, 1, warm_up=0)
