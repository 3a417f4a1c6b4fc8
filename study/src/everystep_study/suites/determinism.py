"""The study's suite ``determinism``: does a resumed training equal one that was never stopped?

2N steps are compared with N steps, a restore into a new training of another seed, and N more steps. Once with
everything restored, once without each ingredient, and once with each checkpoint that the framework's
documentation shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everystep_study.frameworks.api import Probe
from everystep_study.harness.results import Row
from everystep_study.harness.suite import Case, Group, Turn
from everystep_study.report.elements import (
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
from everystep_study.suites.by_framework import FrameworkSuite
from everystep_study.workers.orders import Context
from everystep_study.workers.processes import FrameworkProcess

STEPS = 8
"""N. The scheduler of a probe changes the learning rate in both halves."""


def _probe(context: Context, seed: int) -> Probe:
    make = context.framework.probe
    if make is None:
        raise NotImplementedError("this framework has no probe for determinism")
    return make(seed)


def ingredients(context: Context) -> dict[str, Any]:
    return dict(_probe(context, 0).ingredients)


def resume(
    context: Context, steps: int, seed: int, without: str, default: str, directory: str
) -> dict[str, Any]:
    """2N steps against N steps, a restore into a new training of another seed, and N more.

    `without` is the ingredient that is left out; `default` the checkpoint that is used instead of a full
    one.
    """
    whole = _probe(context, seed)
    losses = [whole.step() for _ in range(2 * steps)]
    expected = whole.weights()
    first = _probe(context, seed)
    early = [first.step() for _ in range(steps)]
    saved = first.capture()
    restored: dict[str, float] = {}
    if default:
        checkpoint = next(each for each in context.framework.defaults if each.key == default)()
        checkpoint.save(first, Path(directory))
        resumed = _probe(context, seed + 1)
        checkpoint.load(resumed, Path(directory))
        loaded = resumed.capture()
        restored = {f"restored, {key}": float(same(saved[key], loaded[key])) for key in saved}
    else:
        resumed = _probe(context, seed + 1)
        resumed.restore({key: value for key, value in saved.items() if key != without})
    resumed_losses = early + [resumed.step() for _ in range(steps)]
    differing = [
        step
        for step, (loss, other) in enumerate(zip(losses, resumed_losses, strict=True), 1)
        if loss != other
    ]
    found = resumed.weights()
    return {
        **restored,
        "steps": 2.0 * steps,
        "repeatable": float(losses[:steps] == early),
        "first_differing_step": float(differing[0]) if differing else 0.0,
        "largest_loss_difference": _largest(losses, resumed_losses),
        "largest_weight_difference": max(
            _largest(expected[name].ravel(), found[name].ravel()) for name in expected
        ),
        "equal": float(
            not differing and all(np.array_equal(expected[name], found[name]) for name in expected)
        ),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two trees of containers, arrays and plain values are equal."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__array__"):
        first, second = (each.detach() if hasattr(each, "detach") else each for each in (one, other))
        return bool(np.array_equal(np.asarray(first), np.asarray(second)))
    return bool(one == other)


def _largest(expected: Any, found: Any) -> float:
    with np.errstate(all="ignore"):
        apart = np.abs(np.asarray(expected, np.float64) - np.asarray(found, np.float64))
    return float(np.nan_to_num(apart, nan=1e308, posinf=1e308).max(initial=0.0))


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
        found = self._process.ask(resume, directory=str(turn.directory), **self._order)
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

    def measured(self, process: FrameworkProcess) -> Iterator[Group]:
        cases: list[Case] = [Resume(process, "nothing", "nothing left out", self.seed)]
        for key, title in process.ask(ingredients).items():
            cases.append(Resume(process, key, title, self.seed, without=key))
        for default in process.hello["defaults"]:
            case = Resume(process, default["key"], default["title"], self.seed, default=default["key"])
            case.absent = default["missing"]
            cases.append(case)
        yield Group(self.framework, cases, 1, warm_up=0)
