"""The report on the suite ``formats``: sizes, times and memory, and what trouble did."""

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
    mebibytes,
    table,
    whole,
)
from everystep_study.results import PEAK_NBYTES, SECONDS, Row

_CONTENTS = ("weights and optimizer", "weights")


def _items(source: Source) -> Iterator[Item]:
    for content in _CONTENTS:
        if saved := source.rows(f"save {content}"):
            yield _sizes(source, content, saved)
    if flips := source.rows("flipped bits"):
        yield _trouble(source, flips)


def _sizes(source: Source, content: str, saved: Sequence[Row]) -> Table:
    def cells(row: Row) -> list[Cell]:
        load = source.row(f"load {content}", row.case)
        part = source.row(f"part of {content}", row.case)
        possible = source.number(part, "possible", whole)
        return [
            source.cell(row, "arrays_nbytes", whole, spread=False),
            source.cell(row, "stored_nbytes", whole, spread=False),
            source.cell(row, SECONDS),
            source.cell(row, PEAK_NBYTES, mebibytes, spread=False),
            source.cell(load, SECONDS),
            source.cell(load, PEAK_NBYTES, mebibytes, spread=False),
            source.cell(part, "part_seconds", spread=False) if possible and possible.value else Words("no"),
        ]

    headings = (
        "arrays, bytes",
        "on disk, bytes",
        "save, ms",
        "save, MiB of memory",
        "load, ms",
        "load, MiB of memory",
        "one array alone, ms",
    )
    return table(f"{content.capitalize()}: medians (lowest{NOTHING}highest)", headings, saved, cells)


def _trouble(source: Source, rows: Sequence[Row]) -> Table:
    def count(row: Row | None, reading: str, tone: str) -> Cell:
        number = source.number(row, reading, whole)
        if number is None:
            return source.cell(row, reading)
        return number, Words("", tone if number.value else "")

    def cells(flips: Row) -> list[Cell]:
        killed = source.row("killed while overwriting", flips.case)
        return [
            source.cell(flips, "flips", whole),
            count(flips, "refused", "good"),
            count(flips, "silent", "bad"),
            count(flips, "harmless", "good"),
            _planted(source, source.row("planted code", flips.case)),
            source.cell(killed, "kills", whole),
            count(killed, "old kept", "good"),
            count(killed, "new complete", "good"),
            count(killed, "lost", "bad"),
        ]

    headings = (
        "flipped bits",
        "refused",
        "loaded other values",
        "harmless",
        "planted code that ran",
        "kills while overwriting",
        "old one kept",
        "new one complete",
        "both lost",
    )
    return table("Trouble", headings, rows, cells)


def _planted(source: Source, row: Row | None) -> Cell:
    ran, attacks = source.number(row, "ran", whole), source.number(row, "attacks", whole)
    if row is None or ran is None or attacks is None:
        return source.cell(row, "ran")
    places = sorted(
        name.removeprefix("ran from ")
        for sample in row.samples
        for name in sample.readings
        if name.startswith("ran from ")
    )
    where = f": {', '.join(places)}" if places else ""
    return ran, Words(" of "), attacks, Words(where, "bad" if ran.value else "good")


REPORT = SuiteReport(
    "What is on the disk, and what it withstands",
    (
        "Loads start with an empty page cache where the machine allows it, and go into a training that "
        "was built from another seed; every load that is shown brought back every bit. Memory is how far "
        "the resident memory of the process grew. Save times are not durable ones, except for Everystep: "
        "for a comparison of saves, read the table of costs.",
        "Trouble was made, not looked up. Flipped bits: one at a time, anywhere in the files; a loader "
        "either refuses the checkpoint, or loads other values without a word, or the bit does not "
        "matter. Planted code: a pickle in place of each file and of each member of an archive, and what "
        "else the format offers. Killed: the process was killed in the middle of overwriting a "
        "checkpoint by the next one at the same place.",
    ),
    _items,
)
