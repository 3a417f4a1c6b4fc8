"""What the suites of the study share: one framework and model at a time, in the framework's own process."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from everystep_study.frameworks import FrameworkEntry
from everystep_study.frameworks.models import TITLES
from everystep_study.harness.results import Result
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.report.elements import SuiteReport, View
from everystep_study.workers import orders
from everystep_study.workers.processes import FrameworkMissing, FrameworkProcess, TimeUp, WorkerFailed

ORDER_SECONDS = 300.0
QUICK_ORDER_SECONDS = 45.0
PREPARE_SECONDS = 900.0
"""How long one order may take; then the process is killed, and the row is reported as failed."""


class Absent(Case):
    """A framework that is not there, or whose process could not be started."""

    sections = ("framework",)

    def __init__(self, key: str, title: str, missing: str | None, failure: str = "") -> None:
        self.key, self.title = key, title
        self._missing, self._failure = missing, failure

    def missing(self) -> str | None:
        return self._missing

    def measure(self, turn: Turn) -> None:
        raise WorkerFailed(self._failure)


class MechanismCase(Case):
    """One mechanism of one framework."""

    def __init__(
        self, process: FrameworkProcess, mechanism: dict[str, Any], sections: tuple[str, ...]
    ) -> None:
        self.process, self.mechanism = process, mechanism
        self.key, self.title, self.sections = mechanism["key"], mechanism["title"], sections

    def missing(self) -> str | None:
        found: str | None = self.mechanism["missing"]
        return found

    def setup(self, directory: Path) -> None:
        self.process.ask(orders.prepare, PREPARE_SECONDS, mechanism=self.mechanism["key"])


@dataclass
class FrameworkSuite(Suite):
    """One part of the study. `seconds` is the time that is planned for it: no round begins that would take
    longer. At `end` (of `time.monotonic`) it is cut off: what is not measured by then is reported as failed.
    """

    report: ClassVar[SuiteReport]
    framework: str
    entry: FrameworkEntry
    model: str
    quick: bool = False
    seed: int = 0
    seconds: float | None = None
    rounds: int = 3
    versions: dict[str, str] = field(default_factory=dict)
    built: dict[str, float] = field(default_factory=dict)
    end: float = math.inf

    def needs(self) -> Needs:
        return Needs()

    @property
    def order_seconds(self) -> float:
        return QUICK_ORDER_SECONDS if self.quick else ORDER_SECONDS

    def groups(self, folder: Path) -> Iterator[Group]:
        with FrameworkProcess(self.framework, self.entry, folder, self.order_seconds, self.end) as process:
            try:
                process.look_at_clock()
                process.start()
                self.versions = process.hello["versions"]
                yield from self.measured(process)
            except FrameworkMissing as error:
                yield self._absent(str(error))
            except (WorkerFailed, TimeUp) as error:  # of a model that cannot be built, or of the clock
                yield self._absent(None, str(error))

    @abstractmethod
    def measured(self, process: FrameworkProcess) -> Iterator[Group]:
        """The groups, of a framework that is there."""

    def group(self, name: str, cases: list[Case], share: float = 1.0, **options: Any) -> Group:
        """Cases that take turns within `share` of this suite's time."""
        seconds = None if self.seconds is None else self.seconds * share
        return Group(name, cases, options.pop("rounds", self.rounds), seconds=seconds, **options)

    def build(self, process: FrameworkProcess) -> None:
        self.built = process.ask(orders.build, model=self.model, quick=self.quick, seed=self.seed)

    def subject(self) -> str:
        return (
            f"{self.entry.title}, {TITLES.get(self.model, self.model)}{' (quick size)' if self.quick else ''}"
        )

    def facts(self) -> dict[str, float]:
        return self.built

    def views(self, result: Result) -> list[View]:
        return []

    def _absent(self, missing: str | None, failure: str = "") -> Group:
        return Group("framework", [Absent(self.framework, self.entry.title, missing, failure)], 1, warm_up=0)
