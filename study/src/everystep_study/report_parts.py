"""What the study's report is made of: sections with prose, tables and charts. Every number has a source.

A `Number` is made by `Source` from the raw samples of one row, and remembers which. The page shows that
source with each number, and a test computes all of them again from the file of results. Each suite of the
study has a `SuiteReport`, and `report_page` writes them as a page or as Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from everystep_study import frameworks
from everystep_study.frameworks.models import TITLES
from everystep_study.results import Row
from everystep_study.results_directory import Entry

Show = Callable[[float], str]
NOTHING = "\N{EN DASH}"
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "low": min,
    "high": max,
    "sum": sum,
    "rounds": len,
}


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.1f}"


def mebibytes(nbytes: float) -> str:
    value = nbytes / (1 << 20)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def small(value: float) -> str:
    """Of any size: three digits."""
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Number:
    """A value, how it is shown, and where it comes from: part, section, case, reading, statistic."""

    value: float
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Words:
    text: str
    tone: str = ""
    """"good", "bad" or "" ."""


def ratio(one: Number | None, other: Number | None) -> Number | None:
    """Two numbers divided; its source names both."""
    if one is None or other is None or not other.value > 0 or not one.value > 0:
        return None
    found = one.value / other.value
    return Number(found, f"{found:.2f}", f"{one.source} / {other.source}")


Cell = Number | Words | tuple["Number | Words", ...]


class Source:
    """The numbers of one entry."""

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
        if row is None:
            return None
        values = row.values(reading)
        if not values:
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


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...], bool], ...]
    """Name, cells, and whether it is Everystep."""


def table(
    title: str, headings: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[Cell]]
) -> Table:
    """One line for each row."""
    return Table(title, tuple(headings), tuple((row.title, tuple(cells(row)), is_ours(row)) for row in rows))


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of one bar, one behind the other, by the names of the chart's legend."""

    label: str
    parts: tuple[Number | None, ...]
    ours: bool = False
    low: Number | None = None
    high: Number | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    legend: tuple[str, ...]
    bars: tuple[Bar, ...]


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
class Part:
    """Below one heading: tables and charts of one framework and model."""

    title: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    title: str
    prose: Sequence[str]
    parts: Sequence[Part]
    notes: Sequence[str]
    """What was not measured, and why."""


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


def is_ours(row: Row) -> bool:
    return row.case.startswith("everystep")
