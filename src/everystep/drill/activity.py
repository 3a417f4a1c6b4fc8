"""The log that a script's Checkpointer writes under a drill, followed while it grows.

Owns the reading. `everystep.checkpointer.drilling` writes the log, `procedure` decides what it means.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from everystep.checkpointer.drilling import Contents, Mark, Observed

Phase = Literal["starting", "restoring", "training", "saving"]
PHASES: tuple[Phase, ...] = ("starting", "restoring", "training", "saving")

_READ_NBYTES = 1 << 20
_PROMPT = ("sync", "overlap")


@dataclass(frozen=True, slots=True)
class SeenCheckpoint:
    """One checkpoint in the log. Its line, at `offset`, has the digest of every leaf."""

    run: str
    step: int
    digest: str
    log: Path
    offset: int
    nbytes: int

    def contents(self) -> Contents:
        with self.log.open("rb") as file:
            file.seek(self.offset)
            return msgspec.json.decode(file.read(self.nbytes), type=Observed).contents


@dataclass(slots=True)
class RunActivity:
    """One run in one start of the script.

    `restored` is where the start went on. If it restores again later, `gone_back` is the last of those.
    """

    run: str
    pid: int
    opened_at: float
    restoring_at: float | None = None
    restored_at: float | None = None
    restored: int | None = None
    restore_calls: int | None = None
    gone_back: int | None = None
    first: int | None = None
    completed: int | None = None
    completed_at: list[float] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    begun_at: float | None = None
    mode: str | None = None
    save_seconds: list[float] = field(default_factory=list)
    durable: int | None = None
    first_durable_at: float | None = None

    def note(self, mark: Mark) -> None:
        match mark.what:
            case "restoring":
                self.restoring_at = mark.at
            case "restored" if self.restored is None:
                self.restored_at, self.restored, self.restore_calls = mark.at, mark.step, mark.calls
            case "restored" if mark.step is not None:  # training goes back and gives up later saves
                self.gone_back = self.durable = mark.step
                self.begun = [step for step in self.begun if step <= mark.step]
            case "completed":
                self.first = mark.step if self.first is None else self.first
                self.completed = mark.step
                self.completed_at.append(mark.at)
            case "saving" if mark.step is not None:
                self.begun.append(mark.step)
                self.begun_at, self.mode = mark.at, mark.mode
            case "failed":
                self.begun = [step for step in self.begun if step != mark.step]
                self.begun_at = None
            case "durable":
                self.durable = mark.step
                self.first_durable_at = mark.at if self.first_durable_at is None else self.first_durable_at
                if self.begun_at is not None:
                    self.save_seconds.append(mark.at - self.begun_at)
                self.begun_at = None

    @property
    def phase(self) -> Phase:
        if self.begun_at is not None:
            return "saving"
        return "restoring" if self.position is None else "training"

    @property
    def position(self) -> int | None:
        """Steps that the script has completed; None before its state is restored."""
        return self.completed if self.completed is not None else self.restored

    @property
    def due(self) -> int:
        """The step that must survive a kill now.

        It is the newest that was reported durable, or that was begun before the last one: only one save is
        ever under way. With "overlap" and "sync", a step ends only when the save of the step before is
        durable, so with a checkpoint per step, at most one step is lost.
        """
        begun = self.begun
        if begun and self.mode in _PROMPT and self.completed is not None and self.completed > begun[-1]:
            before = begun[-1:]
        else:
            before = begun[-2:-1]
        restored = self.restored if self.gone_back is None else self.gone_back
        return max(self.durable or 0, restored or 0, *before, 0)


class ActivityLog:
    """The part of a log that one start of the script writes: everything after its present end.

    `follow` reads what has been added since the last time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, RunActivity] = {}
        self.checkpoints: list[SeenCheckpoint] = []
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def follow(self) -> None:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._offset + len(self._rest))
                while new := file.read(_READ_NBYTES):
                    self._take(new)
        except FileNotFoundError:
            return  # no Checkpointer yet

    def close(self) -> None:
        """After the last process has ended. A line that a kill cut short must not spoil the next start's."""
        self.follow()
        if self._rest:
            os.truncate(self.path, self._offset)
            self._rest = b""

    def _take(self, new: bytes) -> None:
        # The last line may be unfinished: it is still being written, or its writer was killed.
        *lines, rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._note(msgspec.json.decode(line, type=Mark), len(line))
            self._offset += len(line) + 1
        self._rest = rest

    def _note(self, mark: Mark, nbytes: int) -> None:
        activity = self.runs.get(mark.run)
        if activity is None:
            activity = self.runs[mark.run] = RunActivity(mark.run, mark.pid, mark.at)
        activity.note(mark)
        if mark.digest is not None and mark.step is not None:
            self.checkpoints.append(
                SeenCheckpoint(mark.run, mark.step, mark.digest, self.path, self._offset, nbytes)
            )

    @property
    def phase(self) -> Phase:
        """What the script is doing: saving, if any of its runs is."""
        phases = {activity.phase for activity in self.runs.values()}
        return next((phase for phase in reversed(PHASES) if phase in phases), "starting")
