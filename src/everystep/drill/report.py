"""What a drill found, as records. Printing them is the command's part."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from everystep.drill.activity import PHASES, Phase
from everystep.drill.comparison import Agreement, Final
from everystep.drill.kill_times import Kind


@dataclass(frozen=True, slots=True)
class Killed:
    """One kill, and its outcome.

    `step`: what training had completed. `due`: the step that must survive, since it was durable or its save
    had been followed by another. `resumed`: where the next start went on; None if no start got that far.
    Times are from the start of the next process; None if that one was killed first.
    """

    number: int
    aim: Kind
    phase: Phase
    step: int | None
    due: int
    resumed: int | None = None
    lost: int | None = None
    restored_seconds: float | None = None
    durable_seconds: float | None = None

    @property
    def kept(self) -> bool:
        """Whether everything that had to survive did."""
        return self.resumed is None or self.resumed >= self.due


@dataclass(frozen=True, slots=True)
class DrillProblem:
    """Why the drill was not passed, in words; `details` is what the script itself said."""

    kind: str
    message: str
    details: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the start of a process: the middle one and the longest."""

    median: float
    longest: float


@dataclass(frozen=True, slots=True)
class DrillReport:
    command: tuple[str, ...]
    seed: int
    times: int
    steps: int
    rounds: int
    kills: tuple[Killed, ...]
    agreement: Agreement
    finals: tuple[Final, ...]
    undisturbed: Agreement | None
    causes: tuple[str, ...]
    problems: tuple[DrillProblem, ...]
    notes: tuple[str, ...]
    reference_seconds: float
    reference_start_seconds: float
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def phases(self) -> dict[Phase, int]:
        return {phase: sum(kill.phase == phase for kill in self.kills) for phase in PHASES}

    @property
    def lost(self) -> list[int]:
        return [kill.lost for kill in self.kills if kill.lost is not None]

    @property
    def restored_seconds(self) -> Times | None:
        return _times([kill.restored_seconds for kill in self.kills])

    @property
    def durable_seconds(self) -> Times | None:
        return _times([kill.durable_seconds for kill in self.kills])

    def document(self) -> dict[str, object]:
        """Plain data, with what a reader would otherwise have to count."""
        return {
            "ok": self.ok,
            "command": self.command,
            "seed": self.seed,
            "times": self.times,
            "steps": self.steps,
            "rounds": self.rounds,
            "kills": {"count": len(self.kills), "by_phase": self.phases, "each": self.kills},
            "steps_lost": {"total": sum(self.lost), "most": max(self.lost, default=0)},
            "resume_seconds": {"restored": self.restored_seconds, "first_save": self.durable_seconds},
            "identical": not self.agreement.differing and all(final.equal for final in self.finals),
            "agreement": self.agreement,
            "final": self.finals,
            "undisturbed": self.undisturbed,
            "causes": self.causes,
            "problems": self.problems,
            "notes": self.notes,
            "reference_seconds": self.reference_seconds,
            "reference_start_seconds": self.reference_start_seconds,
            "seconds": self.seconds,
        }


def _times(found: list[float | None]) -> Times | None:
    known = [seconds for seconds in found if seconds is not None]
    return Times(statistics.median(known), max(known)) if known else None
