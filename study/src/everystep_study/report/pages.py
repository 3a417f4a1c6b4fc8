"""The pages of both commands: what of the results is shown, in which order, and what is said of it.

``everystep bench`` shows the views of its suites, ``everystep study`` what the `SuiteReport` of
each suite makes of its entries.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from everystep_study import frameworks
from everystep_study.harness.results import BUSY_SHARE, Bar, Result
from everystep_study.harness.results_directory import FILE, Entry, ResultsDirectory
from everystep_study.harness.suite import Suite
from everystep_study.report.elements import (
    NOTHING,
    TIMES,
    Page,
    Section,
    Source,
    SuiteReport,
    Table,
    Words,
    name_of,
)

_BUSY_LOAD = 0.25
"""The share of the CPUs that others may use before the run, before the report warns."""
_STUDY_BUSY_SHARE = 0.25
_SENSES = {">=": "\N{GREATER-THAN OR EQUAL TO}", "<=": "\N{LESS-THAN OR EQUAL TO}"}
_TONES = {"PASS": "good", "FAIL": "bad", "within noise": "", "not measured": "unsure"}


def heading(result: Result) -> str:
    return (
        f"{result.subject}; {result.machine.filesystem}, {result.machine.cpu_count} CPUs, "
        f"medians of {result.rounds} interleaved rounds, {result.seconds / 60:.1f} minutes"
    )


def tables(suite: Suite, result: Result) -> list[Table]:
    made = [view.table(result) for view in suite.views(result) if view.rows(result)]
    return [*made, *([_promises(result.bars)] if result.bars else [])]


def benchmarks(parts: Sequence[tuple[Suite, Result]], command: str) -> Page:
    """What was measured, where, how, and all tables."""
    machine = parts[0][1].machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    said = [
        f"- Machine: {machine.cpu_count} CPUs, {machine.filesystem}, {machine.platform}. Measured on "
        f"{_day(parts[0][1].created)}.",
        f"- Versions: {versions}.",
        "- All systems of a table take turns in every round of one run. Numbers are medians of the rounds; "
        "the range goes from the lowest to the highest. A difference within the range is noise.",
        "- Every save is durable: its files, and every directory entry that leads to them, are synced.",
        "- Loads start with an empty page cache where the machine allows it; the table says which.",
        "- The raw device is measured in the same rounds, with as many bytes: a bare loop that writes one "
        "new file, or reads it.",
    ]
    sections = [
        Section(
            suite.name.replace(" ", "-"),
            f"{suite.name[0].upper()}{suite.name[1:]}",
            [f"{heading(result)}."],
            [("", tables(suite, result))],
            remarks=notes(suite, result),
        )
        for suite, result in parts
    ]
    generated = f"This page is generated: `{command}` measures again and overwrites it."
    return Page("Benchmarks", [generated, "\n".join(said)], sections)


def notes(suite: Suite, result: Result) -> list[str]:
    """What a reader must know to read the tables."""
    machine = result.machine
    found = []
    if machine.load_before > _BUSY_LOAD * machine.cpu_count:
        found.append(
            f"Others kept {machine.load_before:.1f} of {machine.cpu_count} CPUs busy before this run began: "
            "measure again when the machine is quiet."
        )
    if machine.others_share is not None and machine.others_share > BUSY_SHARE:
        found.append(f"Others used {100 * machine.others_share:.0f} % of the CPUs while this was measured.")
    reasons = [f"{row.title}: {row.status}. {row.reason}" for row in result.rows if row.status != "measured"]
    return [*found, *dict.fromkeys(reasons), *result.problems, *suite.notes(result)]


def has_problem(suite: Suite, result: Result) -> bool:
    """Whether Everystep itself failed, or fell short of a promise."""
    failed = any(row.status == "failed" and row.case in suite.ours for row in result.rows)
    return failed or any(bar.verdict == "FAIL" for bar in result.bars)


def _promises(bars: Sequence[Bar]) -> Table:
    """What was promised, what was measured with its 95 % interval, and whether that is enough."""
    rows = []
    for bar in bars:
        limit = f"{_SENSES[bar.sense]} {_amount(bar.limit, bar)}"
        measured = NOTHING
        if bar.measured is not None:
            measured, low, high = (
                _amount(value, bar) for value in (bar.measured.value, bar.measured.low, bar.measured.high)
            )
            measured += f" ({low} to {high})" if bar.measured.low != bar.measured.high else ""
        name = f"{bar.promise}\n{bar.detail}" if bar.detail else bar.promise
        rows.append((name, (Words(bar.verdict, _TONES[bar.verdict]), Words(limit), Words(measured)), False))
    return Table("promises", ("", "promised", "this run (95 % interval)"), tuple(rows))


def _amount(value: float, bar: Bar) -> str:
    digits = 0 if bar.unit in ("ms", "MiB", "") else 2
    unit = {"x": TIMES, "": ""}.get(bar.unit, f" {bar.unit}")
    return f"{value:.{digits}f}{unit}"


_METHOD = (
    "All mechanisms of one framework and model take turns in every round; frameworks follow one another. A "
    "first round warms up and is thrown away; but a turn of the costs that takes longer than "
    "{slow:.0f} seconds counts from the first on, because it saves before its clock starts, "
    "too. Numbers are medians, with the lowest and the highest in parentheses; a difference within these is "
    "noise. Numbers without parentheses were measured once."
)


def study(found: ResultsDirectory) -> Page:
    """The suites that were measured."""
    from everystep_study.suites.cost import SLOW_TURN_SECONDS

    end = f"{_METHOD.format(slow=SLOW_TURN_SECONDS)} Raw results: {FILE}."
    return Page("What checkpoints cost: a study", _introduction(found), _sections(found), end)


def _sections(found: ResultsDirectory) -> list[Section]:
    from everystep_study.campaign import SUITES

    made = []
    for name in frameworks.SUITES:
        entries = [entry for entry in found.entries if entry.part.suite == name]
        if not entries:
            continue
        report: SuiteReport = SUITES[name].report
        parts = [(name_of(entry), list(report.items(Source(entry)))) for entry in entries]
        if overview := report.overview(entries):
            parts.insert(0, ("At a glance", [overview]))
        made.append(Section(name, report.title, report.prose, parts, _not_measured(entries)))
    return made


def _not_measured(entries: Sequence[Entry]) -> list[str]:
    """What was not measured, and why."""
    found: list[str] = []
    for entry in entries:
        name, rows = name_of(entry), entry.result.rows
        found += [f"{name}: {r.title}: {r.status}. {r.reason}" for r in rows if r.status != "measured"]
        found += [f"{name}: {problem}" for problem in entry.result.problems]
    return list(dict.fromkeys(found))


def _introduction(found: ResultsDirectory) -> list[str]:
    header, machine = found.header, found.header.machine
    versions: dict[str, str] = {"Everystep": header.everystep, "Python": machine.versions.get("python", "")}
    for entry in found.entries:
        versions.update(entry.versions)
    quick = "A quick study, with small models and few rounds: for a first look."
    said = [
        f"{quick if header.quick else 'A full study.'} Measured on {_day(header.created)}, with seed "
        f"{header.seed}, on {machine.cpu_count} CPUs, {machine.filesystem}, {machine.platform}.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.",
    ]
    counts = sorted({len(row.values()) for entry in found.entries for row in entry.result.rows} - {0})
    if counts:
        shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        said.append(f"Counted rounds: {shown}.")
    machines = [entry.result.machine for entry in found.entries]
    if any((m.others_share or 0) > _STUDY_BUSY_SHARE or m.load_before > machine.cpu_count for m in machines):
        said.append("Other programs kept the machine busy during a part of it: read differences with care.")
    if missing := sorted({name_of(entry) for entry in found.entries if entry.missing}):
        said.append(f"Not installed, so not measured: {'; '.join(missing)}.")
    return said


def _day(created: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(created))
