"""The report on the suite ``determinism``: which resumes were exact, and what each forgot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everystep_study.report_parts import (
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
