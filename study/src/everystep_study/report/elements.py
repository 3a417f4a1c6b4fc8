"""What a report is made of: tables, charts and strips of squares, in sections, on a page.

`writers` turns a page into Markdown, HTML or the tables of a terminal, and `plot` draws its charts.
Each suite says in its own file what is shown of it: a suite of ``everystep bench`` by `View`s, one of
``everystep study`` by a `SuiteReport`, whose numbers name the row and reading that they come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everystep_study import frameworks
from everystep_study.frameworks.models import TITLES
from everystep_study.harness.results import Result, Row, Spread
from everystep_study.harness.results_directory import Entry

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
ARROW = "\N{RIGHTWARDS ARROW}"

Show = Callable[[float], str]
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "low": min,
    "high": max,
}


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:,.0f}" if abs(seconds) >= 0.01 else f"{1000 * seconds:.1f}"


def mebibytes(nbytes: float) -> str:
    value = nbytes / (1 << 20)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def small(value: float) -> str:
    """Of any size: three digits."""
    return f"{value:.3g}"


def two_digits(value: float) -> str:
    """Small tensors take some systems to hundredths of a GB/s, where two digits would hide the rest."""
    return f"{value:,.2f}" if value >= 0.095 or value == 0 else f"{value:.3f}"


@dataclass(frozen=True, slots=True)
class Number:
    """A value, how it is shown, and where it comes from: part, section, case, reading, statistic."""

    value: float
    text: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """`tone` is "good", "bad", "unsure" or ""."""

    text: str
    tone: str = ""


Cell = Number | Words | tuple[Number | Words, ...]


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    headings: tuple[str, ...]
    """Of the cells: the column of names has none."""
    rows: tuple[tuple[str, tuple[Cell, ...], bool], ...]
    """Name, cells, and whether it is Everystep."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of one bar, one behind the other, by the names of the chart's legend.

    A `reference` is what the others are compared with; a picture has a line at `mark`. `status` says why
    there is no number.
    """

    label: str
    parts: tuple[Number | None, ...]
    ours: bool = False
    low: Number | None = None
    high: Number | None = None
    reference: bool = False
    mark: float | None = None
    status: str = "not measured"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    legend: tuple[str, ...]
    bars: tuple[Bar, ...]
    show: Show = milliseconds


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of small squares, one per bit: a colour by tone, and the number behind it, if there is one."""

    title: str
    legend: tuple[tuple[str, str], ...]
    """Tone and meaning."""
    rows: tuple[tuple[str, tuple[tuple[str, Number | None], ...], bool], ...]
    below: tuple[str, ...] = ()
    """What stands below the squares, spread over their width."""


Item = Table | Chart | Strip


@dataclass(frozen=True, slots=True)
class Section:
    """Prose, then tables and charts below headings, then what was not measured, then remarks."""

    key: str
    title: str
    prose: Sequence[str]
    parts: Sequence[tuple[str, Sequence[Item]]]
    """Headings ("" for none), and what stands below them."""
    not_measured: Sequence[str] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    introduction: Sequence[str]
    sections: Sequence[Section]
    end: str = ""


Shown = str | float | None
"""What a column of a `View` says of a row."""
Columns = dict[str, Callable[[Row], Shown]]


@dataclass(frozen=True, slots=True)
class View:
    """The rows of one section: a value with its range, which is also drawn, and further columns.

    `cases` shows only these; `ours` stand out; `named_by` says what the first column shows. `reference`
    is the case that others are compared with; `mark` is shown as a mark at one bar.
    """

    section: str
    title: str
    unit: str = "s"
    value: Callable[[Row], Spread | None] = Row.spread
    show: Show = two_digits
    columns: Columns = field(default_factory=dict)
    ours: tuple[str, ...] = ("everystep",)
    cases: tuple[str, ...] = ()
    named_by: Callable[[Row], str] = lambda row: row.title
    reference: str = ""
    mark: Callable[[Row], float | None] = lambda row: None

    def rows(self, result: Result) -> list[Row]:
        return [row for row in result.section(self.section) if not self.cases or row.case in self.cases]

    def table(self, result: Result) -> Table:
        rows = [(self.named_by(row), self._cells(row), row.case in self.ours) for row in self.rows(result)]
        return Table(self.title, (self.unit, "range", *self.columns), tuple(rows))

    def _cells(self, row: Row) -> tuple[Cell, ...]:
        found = self.value(row) if row.samples else None
        if found is None:  # why is said below the tables
            return (Words(NOTHING), Words(row.status), *[Words(NOTHING)] * len(self.columns))
        shown = [cell(row) for cell in self.columns.values()]
        return (
            Number(found.median, self.show(found.median)),
            Words(f"{self.show(found.low)}-{self.show(found.high)}"),
            *(Words(NOTHING if c is None else c if isinstance(c, str) else f"{c:,.2f}") for c in shown),
        )

    def chart(self, result: Result) -> Chart:
        """The reference comes first."""
        rows = [row for row in result.section(self.section) if row.case == self.reference]
        rows += [row for row in self.rows(result) if row.case != self.reference]
        return Chart(self.title, self.unit, (), tuple(map(self._bar, rows)), self.show)

    def _bar(self, row: Row) -> Bar:
        found = self.value(row) if row.samples else None
        ours, compared = row.case in self.ours, row.case == self.reference
        if found is None:
            return Bar(self.named_by(row), (None,), ours, reference=compared, status=row.status)
        median, low, high = (Number(v, self.show(v)) for v in (found.median, found.low, found.high))
        return Bar(self.named_by(row), (median,), ours, low, high, compared, self.mark(row))


class Source:
    """The numbers of one entry of a study."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._rows = {(row.section, row.case): row for row in entry.result.rows}

    def rows(self, section: str) -> list[Row]:
        return [row for row in self.entry.result.rows if row.section == section]

    def row(self, section: str, case: str) -> Row | None:
        return self._rows.get((section, case))

    def number(
        self, row: Row | None, reading: str, show: Show = milliseconds, statistic: str = "median"
    ) -> Number | None:
        """None where there is no such reading. Warm-up rounds do not count, except for memory."""
        values = [] if row is None else row.values(reading)
        if row is None or not values:
            return None
        found = float(STATISTICS[statistic](values))
        part = self.entry.part
        where = "|".join((part.suite, part.framework, part.model, row.section, row.case, reading, statistic))
        return Number(found, show(found), where)

    def cell(self, row: Row | None, reading: str, show: Show = milliseconds, *, spread: bool = True) -> Cell:
        """The median, with its range behind it; why there is none if there is none."""
        median = self.number(row, reading, show)
        if median is None:
            return Words(NOTHING if row is None or row.status == "measured" else row.status)
        low, high = self.number(row, reading, show, "low"), self.number(row, reading, show, "high")
        if not spread or low is None or high is None or low.text == high.text:
            return (median,)
        return median, Words(" ("), low, Words(NOTHING), high, Words(")")

    def table(
        self,
        title: str,
        section: str,
        columns: Mapping[str, str],
        show: Show = milliseconds,
        spread: int | None = None,
    ) -> Table:
        """One line for each row of the section. `columns` are headings and readings; with `spread`, only so
        many of them, the first ones, have their range.
        """

        def cells(row: Row) -> list[Cell]:
            ranges = [spread is None or number < spread for number in range(len(columns))]
            readings = zip(columns.values(), ranges, strict=True)
            return [self.cell(row, reading, show, spread=shown) for reading, shown in readings]

        return table(title, list(columns), self.rows(section), cells)


def ratio(one: Number | None, other: Number | None) -> Number | None:
    """Two numbers divided; its source names both."""
    if one is None or other is None or not other.value > 0 or not one.value > 0:
        return None
    found = one.value / other.value
    return Number(found, f"{found:.2f}", f"{one.source} / {other.source}")


def table(
    title: str, headings: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[Cell]]
) -> Table:
    """One line for each row."""
    return Table(title, tuple(headings), tuple((row.title, tuple(cells(row)), is_ours(row)) for row in rows))


def is_ours(row: Row) -> bool:
    return row.case.startswith("everystep")


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """`prose` explains a suite, `items` shows one of its entries, and `overview` compares all of them."""

    title: str
    prose: tuple[str, ...]
    items: Callable[[Source], Iterator[Item]]
    overview: Callable[[Sequence[Entry]], Item | None] = lambda entries: None


def name_of(entry: Entry) -> str:
    known = frameworks.FRAMEWORKS.get(entry.part.framework)
    title = known.title if known is not None else entry.part.framework
    model = TITLES.get(entry.part.model, entry.part.model)
    return f"{title}, {model}" if model else title
