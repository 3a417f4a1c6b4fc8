"""A result for people (terminal, markdown page) and for programs (JSON). Reads results, makes none."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import rich.table
from rich.text import Text

from everystep_study.results import BUSY_SHARE, Bar, Interval, Result
from everystep_study.results import size as size
from everystep_study.suite import Suite
from everystep_study.views import NOTHING, TIMES, plain_table

BUSY_LOAD = 0.25
"""The share of the CPUs that others may use before the run, before the report warns."""
_SENSES = {">=": "\N{GREATER-THAN OR EQUAL TO}", "<=": "\N{LESS-THAN OR EQUAL TO}"}
_VERDICTS = {"PASS": "green", "FAIL": "bold red", "within noise": "cyan", "not measured": "yellow"}


def to_json(result: Result) -> bytes:
    """The whole result, every sample included, as an indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def from_json(data: bytes) -> Result:
    return msgspec.json.decode(data, type=Result)


def heading(result: Result) -> str:
    return (
        f"{result.subject}; {result.machine.filesystem}, {result.machine.cpu_count} CPUs, "
        f"medians of {result.rounds} interleaved rounds, {result.seconds / 60:.1f} minutes"
    )


def tables(suite: Suite, result: Result) -> list[rich.table.Table]:
    """For a terminal."""
    made = [view.table(result) for view in suite.views(result) if view.rows(result)]
    return [*made, *([_bars_table(result.bars)] if result.bars else [])]


def markdown(parts: Sequence[tuple[Suite, Result]], command: str) -> str:
    """The page of benchmarks: what was measured, where, how, and all tables."""
    machine = parts[0][1].machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    when = time.strftime("%Y-%m-%d", time.gmtime(parts[0][1].created))
    lines = [
        "# Benchmarks",
        "",
        f"This page is generated: `{command}` measures again and overwrites it.",
        "",
        f"- Machine: {machine.cpu_count} CPUs, {machine.filesystem}, {machine.platform}. Measured on {when}.",
        f"- Versions: {versions}.",
        "- All systems of a table take turns in every round of one run. Numbers are medians of the rounds; "
        "the range goes from the lowest to the highest. A difference within the range is noise.",
        "- Every save is durable: its files, and every directory entry that leads to them, are synced.",
        "- Loads start with an empty page cache where the machine allows it; the table says which.",
        "- The raw device is measured in the same rounds, with as many bytes: a bare loop that writes one "
        "new file, or reads it.",
    ]
    for suite, result in parts:
        lines += ["", f"## {suite.name[0].upper()}{suite.name[1:]}", "", f"{heading(result)}."]
        lines += [f"\n{view.markdown(result)}" for view in suite.views(result) if view.rows(result)]
        lines += ["", *(line for note in notes(suite, result) for line in (note, ""))]
        lines.pop()
    return "\n".join(lines) + "\n"


def has_problem(suite: Suite, result: Result) -> bool:
    """Whether Everystep itself failed, or fell short of a promise."""
    failed = any(row.status == "failed" and row.case in suite.ours for row in result.rows)
    return failed or any(bar.verdict == "FAIL" for bar in result.bars)


def notes(suite: Suite, result: Result) -> list[str]:
    """What a reader must know to read the tables."""
    machine = result.machine
    found = []
    if machine.load_before > BUSY_LOAD * machine.cpu_count:
        found.append(
            f"Others kept {machine.load_before:.1f} of {machine.cpu_count} CPUs busy before this run began: "
            "measure again when the machine is quiet."
        )
    if machine.others_share is not None and machine.others_share > BUSY_SHARE:
        found.append(f"Others used {100 * machine.others_share:.0f} % of the CPUs while this was measured.")
    reasons = {
        f"{row.title}: {row.status}. {row.reason}": None for row in result.rows if row.status != "measured"
    }
    return [*found, *reasons, *result.problems, *suite.notes(result)]


def _bars_table(bars: Sequence[Bar]) -> rich.table.Table:
    """What was promised, what was measured with its 95 % interval, and whether that is enough."""
    table = plain_table("promises", ["", "promised", "this run (95 % interval)"])
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for bar in bars:
        promise = Text(bar.promise)
        if bar.detail:
            promise.append(f"\n{bar.detail}", style="dim")
        limit = f"{_SENSES[bar.sense]} {_amount(bar.limit, bar)}"
        verdict = Text(bar.verdict, style=_VERDICTS[bar.verdict])
        table.add_row(
            verdict, promise, limit, NOTHING if bar.measured is None else _interval(bar.measured, bar)
        )
    return table


def _interval(found: Interval, bar: Bar) -> str:
    value = _amount(found.value, bar)
    if found.low == found.high:
        return value
    return f"{value} ({_amount(found.low, bar)} to {_amount(found.high, bar)})"


def _amount(value: float, bar: Bar) -> str:
    digits = 0 if bar.unit in ("ms", "MiB", "") else 2
    unit = {"x": TIMES, "": ""}.get(bar.unit, f" {bar.unit}")
    return f"{value:.{digits}f}{unit}"
