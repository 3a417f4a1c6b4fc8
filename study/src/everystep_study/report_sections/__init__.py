"""What the study's report says of each suite: one file per suite, with the suite's name.

Each chooses which readings become which columns, bars and squares, and has the prose above them. Numbers come
from `report_parts`; `report_page` writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from everystep_study.report_parts import Part, Section, Source, SuiteReport, name_of
from everystep_study.report_sections import bitflips, cost, determinism, formats, scale
from everystep_study.results_directory import Entry, ResultsDirectory

_REPORTS: dict[str, SuiteReport] = {
    "cost": cost.REPORT,
    "formats": formats.REPORT,
    "scale": scale.REPORT,
    "determinism": determinism.REPORT,
    "bitflips": bitflips.REPORT,
}


def sections(found: ResultsDirectory) -> list[Section]:
    """Those suites that were measured, in their order."""
    made = []
    for key, report in _REPORTS.items():
        entries = [entry for entry in found.entries if entry.part.suite == key]
        if not entries:
            continue
        parts = [Part(name_of(entry), tuple(report.items(Source(entry)))) for entry in entries]
        if overview := report.overview(entries):
            parts.insert(0, Part("At a glance", (overview,)))
        made.append(Section(key, report.title, report.prose, parts, _notes(entries)))
    return made


def _notes(entries: Sequence[Entry]) -> list[str]:
    """What was not measured, and why."""
    found: dict[str, None] = {}
    for entry in entries:
        for row in entry.result.rows:
            if row.status != "measured":
                found[f"{name_of(entry)}: {row.title}: {row.status}. {row.reason}"] = None
        for problem in entry.result.problems:
            found[f"{name_of(entry)}: {problem}"] = None
    return list(found)
