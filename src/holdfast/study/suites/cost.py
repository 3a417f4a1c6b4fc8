"""The study's suite ``cost``: the time that a training loses to checkpoints, and where one save's time goes.

Each turn of a mechanism trains some steps without checkpoints and as many with them, for each frequency, and
splits one save into serialising, writing and syncing (`frameworks.worker.Worker.split`). Durable and not
durable are different cases; what is always durable has no other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.study.frameworks.process import FrameworkProcess, memory_folder
from holdfast.study.suite import Case, Group, Needs, Turn
from holdfast.study.suites.by_framework import FrameworkSuite, MechanismCase

STEPS = 4
EVERY = (1, STEPS)
_COPIES = 3
"""Two checkpoints in turns, and the one in memory."""


class Cost(MechanismCase):
    """`split` False: of a trainer that owns its loop, one save cannot be had alone."""

    def __init__(
        self, process: FrameworkProcess, mechanism: dict[str, Any], durable: bool, memory: str, split: bool
    ) -> None:
        kind = "durable" if durable else "not durable"
        trained = tuple(f"{kind} every {every}" for every in EVERY)
        super().__init__(process, mechanism, (*trained, f"{kind} split") if split else trained)
        self.key = f"{mechanism['key']}, {kind}"
        self._durable, self._memory = durable, memory

    def measure(self, turn: Turn) -> None:
        name = self.mechanism["key"]
        common = {"mechanism": name, "durable": self._durable}
        for every, section in zip((*EVERY, None), self.sections, strict=False):
            directory = str(turn.directory / section.replace(" ", "-"))
            with turn.settled():
                if every is not None:
                    order: dict[str, Any] = {"do": "train", "every": every, "steps": STEPS}
                else:
                    order = {"do": "split", "memory": f"{self._memory}/{name}" if self._memory else ""}
                found = self.process.ask(directory=directory, **common, **order)
            turn.record(section, found)


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
                    cases.append(Cost(process, mechanism, False, memory, not hello["loop"]))
                cases.append(Cost(process, mechanism, True, memory, not hello["loop"]))
            yield self.group(f"{self.framework}, {self.model}", cases)

    def needs(self) -> Needs:
        return Needs(disk_nbytes=(1 << 30) if self.quick else (8 << 30))
