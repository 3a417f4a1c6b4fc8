"""How rows are shown: a suite declares views, and tables, markdown and pictures follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import rich.table
from rich import box

from everystep_study.results import Result, Row, Spread

NOTHING = "-"
TIMES = "\N{MULTIPLICATION SIGN}"
ARROW = "\N{RIGHTWARDS ARROW}"

Cell = str | float | None
Columns = dict[str, Callable[[Row], Cell]]


def two_digits(value: float) -> str:
    """Small tensors take some systems to hundredths of a GB/s, where two digits would hide the rest."""
    return f"{value:,.2f}" if value >= 0.095 or value == 0 else f"{value:.3f}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:,.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"


@dataclass(frozen=True, slots=True)
class View:
    """The rows of one section: a value with its range, which is also drawn, and further columns.

    `cases` shows only these; `ours` stand out; `named_by` says what the first column shows. `reference`
    is the case that others are compared with, which a picture shows as an outline; `mark` is shown as a mark
    at one bar.
    """

    section: str
    title: str
    unit: str = "s"
    value: Callable[[Row], Spread | None] = Row.spread
    show: Callable[[float], str] = two_digits
    columns: Columns = field(default_factory=dict)
    ours: tuple[str, ...] = ("everystep",)
    cases: tuple[str, ...] = ()
    named_by: Callable[[Row], str] = lambda row: row.title
    reference: str = ""
    mark: Callable[[Row], float | None] = lambda row: None

    def rows(self, result: Result) -> list[Row]:
        return [row for row in result.section(self.section) if not self.cases or row.case in self.cases]

    def headings(self) -> list[str]:
        return [self.unit, "range", *self.columns]

    def cells(self, row: Row) -> list[str]:
        found = self.value(row) if row.samples else None
        if found is None:  # why is said below the tables
            return [NOTHING, row.status, *[NOTHING] * len(self.columns)]
        shown = [cell(row) for cell in self.columns.values()]
        return [
            self.show(found.median),
            f"{self.show(found.low)}-{self.show(found.high)}",
            *(NOTHING if c is None else c if isinstance(c, str) else f"{c:,.2f}" for c in shown),
        ]

    def table(self, result: Result) -> rich.table.Table:
        """For a terminal, in which all columns fit in a width of 80 or a little more."""
        made = plain_table(self.title, self.headings())
        for row in self.rows(result):
            style = "dim" if not row.samples else "bold green" if row.case in self.ours else ""
            made.add_row(self.named_by(row), *self.cells(row), style=style)
        return made

    def markdown(self, result: Result) -> str:
        def cells(row: Row) -> list[str]:
            found = [self.named_by(row), *self.cells(row)]
            if row.case not in self.ours:
                return found
            return [cell if cell == NOTHING else f"**{cell}**" for cell in found]

        return markdown_table(self.title, self.headings(), map(cells, self.rows(result)))


def markdown_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column has no heading."""
    lines = [f"**{title}**", "", f"| | {' | '.join(headings)} |", f"|---|{'---:|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def plain_table(title: str, headings: list[str]) -> rich.table.Table:
    """Without vertical lines; the first column has no heading."""
    made = rich.table.Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    made.add_column("", no_wrap=True)
    for name in headings:
        made.add_column(name, justify="right", no_wrap=True, style="dim" if name == "range" else "")
    return made
