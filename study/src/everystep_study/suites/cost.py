"""The study's suite ``cost``: the time that a training loses to checkpoints, and where one save's time goes.

Each turn of a mechanism trains some steps without checkpoints and as many with them, for each frequency.
Durable and not durable are different cases; what is always durable has no other one. The durable one also
splits one save into serialising, writing and syncing (`frameworks.orders.cost.split`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep_study.frameworks.process import FrameworkProcess, memory_folder
from everystep_study.peers.base import remove
from everystep_study.suite import Case, Group, Needs, Turn
from everystep_study.suites.by_framework import FrameworkSuite, MechanismCase

STEPS = 4
EVERY = (1, STEPS)
SLOW_TURN_SECONDS = 20.0
"""A turn that takes longer is not made for warming up alone: it saves before its clock starts, too."""
_COPIES = 3
"""Two checkpoints in turns, and the one in memory."""


class Cost(MechanismCase):
    """`split` False: of a trainer that owns its loop, one save cannot be had alone; and one that is not
    durable is serialised and written as the durable one is."""

    def __init__(
        self, process: FrameworkProcess, mechanism: dict[str, Any], durable: bool, memory: str, split: bool
    ) -> None:
        kind = "durable" if durable else "not durable"
        trained = tuple(f"{kind} every {every}" for every in EVERY)
        super().__init__(process, mechanism, (*trained, f"{kind} split") if split else trained)
        self.key = f"{mechanism['key']}, {kind}"
        self._durable, self._memory, self._split = durable, memory, split

    def measure(self, turn: Turn) -> None:
        common = {"mechanism": self.mechanism["key"], "durable": self._durable}
        place = turn.directory / "saved"
        with turn.settled():
            found = self.process.ask("train", every=list(EVERY), steps=STEPS, directory=str(place), **common)
        for every, section in zip(EVERY, self.sections, strict=False):
            turn.record(section, found[str(every)])
        remove(place)
        if self._split:
            memory = f"{self._memory}/{self.mechanism['key']}" if self._memory else ""
            with turn.settled():
                found = self.process.ask(
                    "split", mechanism=self.mechanism["key"], memory=memory, directory=str(place)
                )
            turn.record(self.sections[-1], found)


@dataclass
class CostSuite(FrameworkSuite):
    name = "cost"

    def measured(self, process: FrameworkProcess, hello: dict[str, Any], folder: Path) -> Iterator[Group]:
        self.build(process)
        nbytes = int(self.built["weights_nbytes"] + self.built["optimizer_nbytes"])
        with memory_folder(_COPIES * nbytes) as memory:
            cases: list[Case] = []
            for mechanism in hello["mechanisms"]:
                if not mechanism["always_durable"]:
                    cases.append(Cost(process, mechanism, False, memory, split=False))
                cases.append(Cost(process, mechanism, True, memory, split=not hello["loop"]))
            yield self.group(f"{self.framework}, {self.model}", cases, slow_seconds=SLOW_TURN_SECONDS)

    def needs(self) -> Needs:
        return Needs(disk_nbytes=(1 << 30) if self.quick else (8 << 30))
