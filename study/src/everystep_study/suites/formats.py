"""The study's suite ``formats``: bytes, times and memory of each format, and what each does in trouble.

Trouble (`damage`) is tried with small models of fixed size, so that many attempts take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everystep_study.harness.costs import cost_of
from everystep_study.harness.files import files_below
from everystep_study.harness.results import PEAK_NBYTES, SECONDS, Row
from everystep_study.harness.suite import Case, Group, Needs, Turn
from everystep_study.report.elements import (
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
from everystep_study.suites.by_framework import FrameworkSuite, MechanismCase
from everystep_study.suites.damage import Flips, Kills, Planted
from everystep_study.workers.orders import Context, build, load, save
from everystep_study.workers.processes import FrameworkProcess

FLIPS, QUICK_FLIPS = 50, 10
KILLS, QUICK_KILLS = 3, 1


def part(context: Context, mechanism: str, directory: str, weights_only: bool = False) -> dict[str, Any]:
    """Reads one weight of middling size, if the mechanism has a way."""
    by_size = sorted(context.training.weights().items(), key=lambda item: item[1].nbytes)
    name, array = by_size[len(by_size) // 2]
    with context.opened(mechanism, directory, durable=False, weights_only=weights_only) as opened:
        try:
            got, readings = cost_of(lambda: opened.read_part(name))
        except NotImplementedError:
            return {"possible": 0.0}
    same = got.shape == array.shape and np.array_equal(got, array)
    return {
        "possible": float(same),
        "part_seconds": readings[SECONDS],
        "part_nbytes": float(array.nbytes),
        "part_peak_nbytes": readings.get(PEAK_NBYTES, 0.0),
    }


class Format(MechanismCase):
    """Saves, empties the page cache, loads into another training, and reads one weight alone."""

    def __init__(self, process: FrameworkProcess, mechanism: dict[str, Any], weights_only: bool) -> None:
        content = "weights" if weights_only else "weights and optimizer"
        super().__init__(process, mechanism, (f"save {content}", f"load {content}", f"part of {content}"))
        self.key = f"{mechanism['key']}, {content}"
        self._weights_only = weights_only

    def measure(self, turn: Turn) -> None:
        where: dict[str, Any] = {"mechanism": self.mechanism["key"], "directory": str(turn.directory)}
        with turn.settled():
            saved = self.process.ask(save, weights_only=self._weights_only, **where)
        turn.record(self.sections[0], saved["readings"])
        turn.empty_cache(files_below(Path(saved["path"])))
        found = self.process.ask(load, weights_only=self._weights_only, **where)
        if not found["readings"]["equal"]:
            raise RuntimeError("loaded something else than was saved")
        turn.record(self.sections[1], found["readings"])
        turn.empty_cache(files_below(Path(saved["path"])))
        turn.record(self.sections[2], self.process.ask(part, weights_only=self._weights_only, **where))


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


@dataclass
class FormatsSuite(FrameworkSuite):
    name = "formats"
    report = REPORT

    def measured(self, process: FrameworkProcess) -> Iterator[Group]:
        self.build(process)
        cases: list[Case] = []
        for mechanism in process.hello["mechanisms"]:
            if mechanism["optimizer_possible"]:
                cases.append(Format(process, mechanism, False))
            if mechanism["weights_only_possible"]:
                cases.append(Format(process, mechanism, True))
        yield self.group(f"{self.framework}, {self.model}", cases, share=0.4)
        small: dict[str, Any] = {"model": "mlp", "quick": True, "seed": self.seed}
        process.ask(build, **small)
        flips = [
            Flips(process, each, QUICK_FLIPS if self.quick else FLIPS, self.seed)
            for each in process.hello["mechanisms"]
        ]
        planted = [Planted(process, each) for each in process.hello["mechanisms"]]
        yield Group("flipped bits", flips, 1, warm_up=0)
        yield Group("planted code", planted, 1, warm_up=0)
        larger = {**small, "quick": False}  # its save takes long enough to be killed in the middle
        process.ask(build, **larger)
        count = QUICK_KILLS if self.quick else KILLS
        kills = [Kills(self.entry, process, each, larger, count) for each in process.hello["mechanisms"]]
        yield Group("killed while overwriting", kills, 1, warm_up=0)

    def needs(self) -> Needs:
        return Needs(disk_nbytes=(1 << 30) if self.quick else (8 << 30))
