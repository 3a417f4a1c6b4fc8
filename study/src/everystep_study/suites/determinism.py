"""The study's suite ``determinism``: does a resumed training equal one that was never stopped?

2N steps are compared with N steps, a restore into a new training of another seed, and N more steps. Once with
everything restored, once without each ingredient, and once with each checkpoint that the framework's
documentation shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep_study.frameworks.process import FrameworkProcess
from everystep_study.suite import Case, Group, Turn
from everystep_study.suites.by_framework import FrameworkSuite

STEPS = 8
"""N. The scheduler of a probe changes the learning rate in both halves."""


class Resume(Case):
    """One resume; `without` an ingredient, or from a `default` checkpoint."""

    def __init__(
        self, process: FrameworkProcess, key: str, title: str, seed: int, without: str = "", default: str = ""
    ) -> None:
        self.key, self.title, self.sections = key, title, ("default" if default else "left out",)
        self._process = process
        self._order: dict[str, Any] = {"steps": STEPS, "seed": seed, "without": without, "default": default}
        self.absent: str | None = None

    def missing(self) -> str | None:
        return self.absent

    def measure(self, turn: Turn) -> None:
        found = self._process.ask("determinism", directory=str(turn.directory), **self._order)
        turn.record(self.sections[0], found)


@dataclass
class DeterminismSuite(FrameworkSuite):
    name = "determinism"

    def measured(self, process: FrameworkProcess, hello: dict[str, Any], folder: Path) -> Iterator[Group]:
        cases: list[Case] = [Resume(process, "nothing", "nothing left out", self.seed)]
        for key, title in process.ask("ingredients").items():
            cases.append(Resume(process, key, title, self.seed, without=key))
        for default in hello["defaults"]:
            case = Resume(process, default["key"], default["title"], self.seed, default=default["key"])
            case.absent = default["missing"]
            cases.append(case)
        yield Group(self.framework, cases, 1, warm_up=0)
