"""The study's suite ``formats``: bytes, times and memory of each format, and what each does in trouble.

Trouble (`damage`) is tried with small models of fixed size, so that many attempts take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep_study.frameworks.process import FrameworkProcess
from everystep_study.peers.base import files_below
from everystep_study.suite import Case, Group, Needs, Turn
from everystep_study.suites.by_framework import FrameworkSuite, MechanismCase
from everystep_study.suites.damage import Flips, Kills, Planted

FLIPS, QUICK_FLIPS = 50, 10
KILLS, QUICK_KILLS = 3, 1


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
            saved = self.process.ask("save", weights_only=self._weights_only, **where)
        turn.record(self.sections[0], saved["readings"])
        turn.empty_cache(files_below(Path(saved["path"])))
        found = self.process.ask("load", weights_only=self._weights_only, **where)
        if not found["readings"]["equal"]:
            raise RuntimeError("loaded something else than was saved")
        turn.record(self.sections[1], found["readings"])
        turn.empty_cache(files_below(Path(saved["path"])))
        turn.record(self.sections[2], self.process.ask("part", weights_only=self._weights_only, **where))


@dataclass
class FormatsSuite(FrameworkSuite):
    name = "formats"

    def measured(self, process: FrameworkProcess, hello: dict[str, Any], folder: Path) -> Iterator[Group]:
        self.build(process)
        cases: list[Case] = []
        for mechanism in hello["mechanisms"]:
            if mechanism["optimizer_possible"]:
                cases.append(Format(process, mechanism, False))
            if mechanism["weights_only_possible"]:
                cases.append(Format(process, mechanism, True))
        yield self.group(f"{self.framework}, {self.model}", cases, share=0.4)
        small: dict[str, Any] = {"model": "mlp", "quick": True, "seed": self.seed}
        process.ask("build", **small)
        flips = [
            Flips(process, each, QUICK_FLIPS if self.quick else FLIPS, self.seed)
            for each in hello["mechanisms"]
        ]
        planted = [Planted(process, each) for each in hello["mechanisms"]]
        yield Group("flipped bits", flips, 1, warm_up=0)
        yield Group("planted code", planted, 1, warm_up=0)
        larger = {**small, "quick": False}  # its save takes long enough to be killed in the middle
        process.ask("build", **larger)
        count = QUICK_KILLS if self.quick else KILLS
        kills = [Kills(self.entry, process, each, larger, count) for each in hello["mechanisms"]]
        yield Group("killed while overwriting", kills, 1, warm_up=0)

    def needs(self) -> Needs:
        return Needs(disk_nbytes=(1 << 30) if self.quick else (8 << 30))
