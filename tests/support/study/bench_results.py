"""Made-up results with known numbers, and cases that do what a test tells them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from everystep_study.harness.results import Machine, Result, Row, Sample
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.report import pages, writers
from everystep_study.report.elements import View


def quiet() -> Console:
    return Console(file=StringIO())


def row(section: str, case: str, group: str = "", /, **readings: Sequence[float] | float) -> Row:
    """A row whose n-th round has the n-th of each reading; one number stands for three equal rounds."""
    many = {name: value if isinstance(value, Sequence) else (value,) * 3 for name, value in readings.items()}
    count = max(map(len, many.values()))
    samples = [Sample(0, 0, {name: 10 * values[0] for name, values in many.items() if name != "peak_nbytes"})]
    samples += [Sample(n + 1, 0, {name: values[n] for name, values in many.items()}) for n in range(count)]
    return Row(section, group, case, f"the {case}", "measured", samples=tuple(samples))


def result(*rows: Row, facts: Mapping[str, float] | None = None, others: float | None = None) -> Result:
    return Result(
        suite="a suite",
        subject="made up",
        created=0.0,
        seconds=60.0,
        directory="/somewhere",
        rounds=3,
        machine=Machine("somewhere", 2, 0.0, "ext4", {"python": "3"}, others),
        facts=dict(facts or {"state_nbytes": 1e9}),
        rows=rows,
        temperature="cold",
        cache_method="drop_caches",
    )


def text_of(suite: Suite, found: Result) -> str:
    """The report as words with single spaces."""
    stream = StringIO()
    Console(file=stream, width=160).print(
        pages.heading(found),
        *map(writers.terminal, pages.tables(suite, found)),
        *pages.notes(suite, found),
        sep="\n",
    )
    return " ".join(stream.getvalue().split())


def answer(began: float, ended: float, *, waited: float = 0.0, own: float | None = None) -> dict[str, Any]:
    """What a rank says of a save."""
    spent = {"began": began, "ended": ended, "cpu_seconds": 0.0, "waiting_seconds": waited}
    return {**spent, "path": "/saved", "own": own}


class Scripted(Case):
    """Records what is called; raises in `fail_in`."""

    sections = ("save",)

    def __init__(self, key: str, calls: list[str], fail_in: str = "", absent: str | None = None) -> None:
        self.key = key
        self.title = f"the {key}"
        self.calls, self.fail_in, self.absent = calls, fail_in, absent
        self.work: Callable[[], object] = lambda: None

    def missing(self) -> str | None:
        return self.absent

    def _do(self, what: str) -> None:
        self.calls.append(f"{what} {self.key}")
        if what == self.fail_in:
            raise OSError(f"cannot {what}")

    def setup(self, directory: Path) -> None:
        assert directory.is_dir()
        self._do("setup")

    def measure(self, turn: Turn) -> None:
        (turn.directory / "file").write_bytes(b"x")
        _, readings = turn.time(self.work)
        self._do("measure")
        turn.record("save", readings)

    def check(self) -> None:
        self._do("check")

    def clean_up(self) -> None:
        self._do("clean_up")

    def close(self) -> None:
        self._do("close")


@dataclass
class ScriptedSuite(Suite):
    name = "scripted"
    cases: list[Scripted] = field(default_factory=list)
    rounds: int = 2
    settle: bool = True
    slow_seconds: float = math.inf

    def needs(self) -> Needs:
        return Needs()

    def groups(self, folder: Path) -> Iterator[Group]:
        yield Group("all", self.cases, self.rounds, settle=self.settle, slow_seconds=self.slow_seconds)

    def subject(self) -> str:
        return "nothing"

    def views(self, result: Result) -> list[View]:
        return [
            View(
                "save",
                "durable save",
                columns={"half": lambda row: row.median("seconds", 0.5)},
                reference="raw",
            )
        ]
