"""What a measurement declares: cases, groups of cases that take turns, and the suite that yields them.

The runner (`runner`) does everything else. A case gets a `Turn` in each round, with which it times its calls.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from everystep_study.harness import cache
from everystep_study.harness.costs import ReservedMemory, cost_of
from everystep_study.harness.machine import others_cpu_seconds
from everystep_study.harness.results import (
    OTHERS_SECONDS,
    SECONDS,
    Bar,
    Readings,
    Result,
    Sample,
    Temperature,
)
from everystep_study.report.elements import View

T = TypeVar("T")


class Turn:
    """One case's turn in one round: its directory, and the clocks."""

    def __init__(
        self,
        directory: Path,
        round_index: int,
        position: int = 0,
        settle: bool = True,
        reserved: ReservedMemory | None = None,
    ) -> None:
        self.directory = directory
        self.round = round_index
        self.samples: list[tuple[str, Sample]] = []
        self.caches: list[tuple[Temperature, str]] = []
        """How cold the page cache was whenever it was emptied, and how that was done."""
        self._position, self._settle = position, settle
        self._reserved = reserved or ReservedMemory(0)

    def time(self, call: Callable[[], T]) -> tuple[T, dict[str, float]]:
        """Calls; returns the result and the readings of what it cost."""
        if not self._settle:
            clock = time.perf_counter()
            result = call()
            return result, {SECONDS: time.perf_counter() - clock}
        with self.settled():
            others = others_cpu_seconds()
            result, readings = cost_of(call)
            after = others_cpu_seconds()
        if others is not None and after is not None:
            readings[OTHERS_SECONDS] = max(0.0, after - others)
        return result, readings

    def settled(self) -> AbstractContextManager[None]:
        """A context in which what others left dirty is on the disk, and reserved memory is free."""
        os.sync()
        return self._reserved.freed()

    def record(self, section: str, readings: Readings) -> None:
        self.samples.append((section, Sample(self.round, self._position, dict(readings))))

    def empty_cache(self, files: Sequence[Path]) -> None:
        """Removes the files from the page cache before they are read."""
        self.caches.append(cache.empty(files))


class Case(ABC):
    """One thing that is measured. `key` is unique in its group.

    The runner calls `missing` once, `setup` before the first turn, then in each round `measure` and
    `clean_up`; after the first `measure` also `check`; `close` at the end.
    """

    key: str
    title: str
    sections: tuple[str, ...]
    """The sections of the result to which `measure` records."""

    def missing(self) -> str | None:
        """What has to be installed before this can be measured, or None."""
        return None

    def setup(self, directory: Path) -> None:  # noqa: B027  (most have nothing to prepare)
        """Import and prepare, so that no round pays for it. The directory is the case's own."""

    @abstractmethod
    def measure(self, turn: Turn) -> None:
        """The measured calls of one round: `turn.time` them, and `turn.record` what was read."""

    def check(self) -> None:  # noqa: B027
        """Raises unless what was just measured did what it should have done."""

    def clean_up(self) -> None:  # noqa: B027
        """Lets go of what one turn took; `turn.directory` is removed by the runner."""

    def close(self) -> None:  # noqa: B027
        """Lets go of what `setup` took."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that take turns. `warm_up` rounds come before the counted ones.

    `settle` False leaves out what the runner does around each call to have it alone on the machine (sync,
    freeing memory, a directory per turn): for hundreds of tiny calls. With `seconds`, no round begins that
    would end later than that; the first counted one always does. A warm-up turn of more than `slow_seconds`
    counts as the case's first: warming up is a small part of it.
    """

    name: str
    cases: Sequence[Case]
    rounds: int
    warm_up: int = 1
    settle: bool = True
    seconds: float | None = None
    slow_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Needs:
    disk_nbytes: int = 0
    memory_nbytes: int = 0
    reserved_nbytes: int = 0
    """Held in memory between measurements, and free while something is measured."""


class Suite(ABC):
    """What is measured, what of it is shown, and what was promised. Everything else is the runner's."""

    name: ClassVar[str]
    ours: ClassVar[tuple[str, ...]] = ("everystep", "everystep-recycled")
    """The cases that are Everystep itself."""
    rounds: int

    @abstractmethod
    def needs(self) -> Needs:
        """Raises ValueError for options that make no sense; nothing has been built yet."""

    @abstractmethod
    def groups(self, folder: Path) -> Iterator[Group]:
        """The groups in their order; code between two yields runs between them, unmeasured."""

    @abstractmethod
    def subject(self) -> str:
        """One line about what was measured. Called at the end, as `facts`."""

    def facts(self) -> dict[str, float]:
        return {}

    @abstractmethod
    def views(self, result: Result) -> list[View]:
        """What tables and pictures show."""

    def notes(self, result: Result) -> list[str]:
        """What a reader must know to read the tables."""
        return []

    def problems(self) -> list[str]:
        """What went wrong beside the cases; all that was measured stands."""
        return []

    def bars(self, result: Result) -> list[Bar]:
        """The promises, compared with this run."""
        return []
