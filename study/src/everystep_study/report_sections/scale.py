"""The report on the suite ``scale``: how long ranks write and wait, and the projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everystep_study.report_parts import (
    NOTHING,
    Bar,
    Cell,
    Chart,
    Item,
    Source,
    SuiteReport,
    Table,
    is_ours,
    table,
)
from everystep_study.results import SECONDS, Row
from everystep_study.suites.rank_waiting import PROJECTED, WORLDS


def _items(source: Source) -> Iterator[Item]:
    for number in WORLDS:
        rows = source.rows(f"{number} ranks")
        if not any(row.samples for row in rows):
            continue
        names = ("writing_seconds", "waiting_seconds")
        bars = tuple(
            Bar(row.title, tuple(source.number(row, name) for name in names), is_ours(row)) for row in rows
        )
        ranks = "1 rank" if number == 1 else f"{number} ranks"
        yield Chart(f"{ranks}, mean of the ranks, medians", "ms", ("writing", "waiting"), bars)
        yield _ranks(source, rows, number, ranks)
    if projected := source.rows("projection"):
        yield _projection(source, projected)


def _ranks(source: Source, rows: Sequence[Row], number: int, ranks: str) -> Table:
    spent = [(rank, what) for rank in range(number) for what in ("writing", "waiting")]

    def cells(row: Row) -> list[Cell]:
        by_rank = [source.cell(row, f"{what}, rank {rank}", spread=False) for rank, what in spent]
        return [source.cell(row, SECONDS), *by_rank]

    headings = ["until the last has ended, ms", *(f"rank {rank}: {what}, ms" for rank, what in spent)]
    return table(f"{ranks}: medians (lowest{NOTHING}highest)", headings, rows, cells)


def _projection(source: Source, rows: Sequence[Row]) -> Table:
    names = ["seconds_fixed", "seconds_per_rank", *(f"seconds, {number} ranks" for number in PROJECTED)]
    headings = ["fixed, ms", "per rank, ms", *(f"{number} ranks, ms" for number in PROJECTED)]
    title = "Projection, not measured"
    return table(title, headings, rows, lambda row: [source.cell(row, name) for name in names])


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
