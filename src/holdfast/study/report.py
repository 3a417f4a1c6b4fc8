"""A result for people (tables in a terminal) and for programs (JSON). Reads results, makes none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.study import results
from holdfast.study.bars import MIB
from holdfast.study.results import Bar, BenchResult, Operation, Row

NOTHING = "-"
TIMES = "\N{MULTIPLICATION SIGN}"
_SENSES = {">=": "\N{GREATER-THAN OR EQUAL TO}", "<=": "\N{LESS-THAN OR EQUAL TO}"}


BUSY = 0.25
"""The share of the CPUs that others may use before the report warns."""


def to_json(result: BenchResult) -> bytes:
    """The whole result, every sample included, as an indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def from_json(data: bytes) -> BenchResult:
    return msgspec.json.decode(data, type=BenchResult)


def render(result: BenchResult) -> RenderableType:
    """The two tables, the bars, and what a reader must know to read them."""
    return Group(
        _heading(result),
        Text(),
        _table(result, "save"),
        Text(),
        _table(result, "load"),
        Text(),
        bars_table(f"bars for {result.shape}", result.bars),
        Text(),
        _footnotes(result),
    )


def show(result: BenchResult, console: Console) -> None:
    console.print(render(result))


def _heading(result: BenchResult) -> Text:
    text = Text()
    text.append(f"{size(result.state_nbytes)} in {result.state_leaves:,} tensors", style="bold")
    text.append(f" ({result.shape}) on {result.machine.filesystem}, {result.machine.cpu_count} CPUs, ")
    text.append(f"medians of {result.rounds} interleaved rounds")
    return text


def _table(result: BenchResult, operation: Operation) -> Table:
    title = "durable save" if operation == "save" else f"load, {_temperature(result)}"
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True, style="dim")
    table.add_column("of raw", justify="right", no_wrap=True)
    table.add_column("CPU s/GB", justify="right", no_wrap=True)
    table.add_column("peak MiB", justify="right", no_wrap=True)
    table.add_column(f"{TIMES}Holdfast", justify="right", no_wrap=True)
    for row in result.rows:
        if row.operation == operation:
            style = "bold green" if row.system == results.HOLDFAST else ""
            style = "dim" if row.status != "measured" else style
            table.add_row(*_cells(row), style=style)
    return table


def plain_table(title: str) -> Table:
    """Without vertical lines: all columns fit a terminal of 80."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _cells(row: Row) -> tuple[str, ...]:
    if row.summary is None:
        # Why is said below the tables: a reason can be long.
        return row.title, NOTHING, row.status, *[NOTHING] * 4
    summary = row.summary
    speed = summary.gb_per_second
    return (
        row.title,
        _speed(speed.median),
        f"{_speed(speed.low)}-{_speed(speed.high)}",
        _number(summary.ratio_to_raw, ".2f"),
        NOTHING if summary.cpu_seconds_per_gb is None else f"{summary.cpu_seconds_per_gb.median:.2f}",
        NOTHING if summary.peak_growth_nbytes is None else f"{summary.peak_growth_nbytes / MIB:,.0f}",
        _number(None if row.system == results.HOLDFAST else summary.holdfast_is_faster_by, ".2f"),
    )


def _speed(gb_per_second: float) -> str:
    """Many small tensors take some systems to hundredths of a GB/s, where two digits would hide the rest."""
    return f"{gb_per_second:.2f}" if gb_per_second >= 0.095 else f"{gb_per_second:.3f}"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"


def bars_table(title: str, bars: Sequence[Bar]) -> Table:
    """What was promised, what was measured, and whether that will do."""
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    table.add_column("")
    table.add_column("promised", justify="right", no_wrap=True)
    table.add_column("this run", justify="right", no_wrap=True)
    for bar in bars:
        style = {"PASS": "green", "FAIL": "bold red", "not measured": "yellow"}[bar.verdict]
        promise = Text(bar.promise)
        if bar.detail:
            promise.append(f"\n{bar.detail}", style="dim")
        table.add_row(
            Text(bar.verdict, style=style),
            promise,
            f"{_SENSES[bar.sense]} {_amount(bar.limit, bar)}",
            NOTHING if bar.measured is None else _amount(bar.measured, bar),
        )
    return table


def _amount(value: float, bar: Bar) -> str:
    digits = 0 if bar.unit in ("ms", "MiB", "") else 2
    unit = {"x": TIMES, "": ""}.get(bar.unit, f" {bar.unit}")
    return f"{value:.{digits}f}{unit}"


def _footnotes(result: BenchResult) -> Text:
    reasons = {row.title: f"{row.title}: {row.status}. {row.reason}" for row in result.rows if row.reason}
    notes = [
        *reasons.values(),
        *result.problems,
        "GB is 10^9 bytes. Every save is synced, file and directory. 'of raw' is the share of the raw device "
        f"limit; '{TIMES}Holdfast' how many times as fast as that row it is; 'peak MiB' the growth of "
        "resident memory in the worst round, where a load's includes the loaded state. safetensors maps its "
        "file, and is timed until every page is in memory. The raw limit is that of a new file; recycling "
        "writes over an old one, which can be faster.",
    ]
    if result.machine.load_before > BUSY * result.machine.cpu_count:
        notes.insert(
            0,
            f"Others kept {result.machine.load_before:.1f} of {result.machine.cpu_count} CPUs busy before "
            "this run began: take these numbers with care, or again when the machine is quiet.",
        )
    if result.temperature == "warm":
        notes.append("The page cache could not be emptied: peers read from memory; load bars are not judged.")
    return Text("\n".join(notes), style="dim")


def _temperature(result: BenchResult) -> str:
    return f"cold page cache ({result.cache_method})" if result.temperature == "cold" else "warm page cache"


def size(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    return f"{nbytes / MIB:.1f} MiB"
