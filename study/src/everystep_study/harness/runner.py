"""The one runner of everything that is measured: interleaved rounds of cases, and what they found.

All cases of a group take turns in every round, so that a machine that becomes slower does so for all of them.
A case that fails is reported as failed with its reason, and the others go on. The runner owns warm-up, order,
cleaning up, and the facts of the machine; what is measured is declared in `suite`.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from everystep_study.harness.costs import ReservedMemory
from everystep_study.harness.machine import cpu_count, look_for_room, machine_facts
from everystep_study.harness.results import OTHERS_SECONDS, SECONDS, Result, Row, Sample, Status, Temperature
from everystep_study.harness.suite import Case, Group, Suite, Turn

FOLDER_PREFIX = ".everystep-bench-"
"""Of the folder in which everything is measured; only a kill leaves one behind."""
LINE_SECONDS = 1.0
"""Between two lines of progress where there is no terminal."""


@dataclass(slots=True)
class _Log:
    """What is known of one case so far. One that failed once is out: its numbers would mislead."""

    case: Case
    directory: Path
    status: Status | None = None
    reason: str = ""
    started: bool = False
    ahead: bool = False
    """Whether its warm-up counted as its first turn."""
    checked: bool = False
    samples: list[tuple[str, Sample]] = field(default_factory=list)

    def count_warm_up(self) -> None:
        self.ahead = True
        self.samples = [(name, msgspec.structs.replace(sample, round=1)) for name, sample in self.samples]

    def rows(self, group: str) -> Iterator[Row]:
        for section in self.case.sections:
            found = tuple(sample for name, sample in self.samples if name == section and not self.status)
            status: Status = self.status or "measured"
            yield Row(section, group, self.case.key, self.case.title, status, self.reason, found)


class _Run:
    """What one run keeps from turn to turn."""

    def __init__(self, reserved: ReservedMemory, say: Callable[[str], None]) -> None:
        self.reserved = reserved
        self.caches: list[tuple[Temperature, str]] = []
        self._say = say

    @property
    def temperature(self) -> Temperature:
        """One warm load among cold ones spoils the comparison."""
        return "cold" if {found for found, _ in self.caches} == {"cold"} else "warm"

    @property
    def cache_method(self) -> str:
        return self.caches[-1][1] if self.caches else "nothing was loaded"

    def group(self, group: Group, folder: Path) -> list[Row]:
        logs = [_Log(case, folder / case.key) for case in group.cases]
        folder.mkdir()
        began = time.monotonic()
        longest = 0.0
        try:
            for round_index in range(1 - group.warm_up, group.rounds + 1):
                now = time.monotonic()
                if group.seconds is not None and round_index > 1 and now - began + longest > group.seconds:
                    break
                when = f"round {round_index} of {group.rounds}" if round_index > 0 else "warm-up"
                if round_index > 1:
                    each = (now - began) / (round_index - 1 + group.warm_up)
                    when += f" (about {roughly(each * (group.rounds - round_index + 1))} left)"
                for position, which in enumerate(turns(len(logs), round_index)):
                    log = logs[which]
                    if log.status or (log.ahead and round_index == 1):
                        continue
                    self._say(f"{group.name}, {when}: {log.case.title}")
                    try:
                        # Not all of them are set up beforehand: what one keeps in memory must not be there
                        # already when another that uses it is measured.
                        if self._start(log):
                            turn_began = time.monotonic()
                            self._turn(log, round_index, position, group.settle)
                            if round_index < 1 and time.monotonic() - turn_began > group.slow_seconds:
                                log.count_warm_up()
                    except Exception as error:
                        # Any system may fail in its own way: it is shown as failed, and the others go on.
                        log.status, log.reason = "failed", reason(error)
                longest = max(longest, time.monotonic() - now)
        finally:
            for log in logs:
                if log.started:
                    log.case.close()
            shutil.rmtree(folder, ignore_errors=True)
        return [row for log in logs for row in log.rows(group.name)]

    def _start(self, log: _Log) -> bool:
        if not log.started:
            absent = log.case.missing()
            if absent is not None:
                log.status, log.reason = "not installed", absent
                return False
            log.directory.mkdir()
            log.started = True
            log.case.setup(log.directory)
        return True

    def _turn(self, log: _Log, round_index: int, position: int, settle: bool) -> None:
        directory = log.directory
        if settle:
            # A new directory for each turn: filesystems place files by their directory.
            directory = log.directory / f"round{round_index}"
            directory.mkdir()
        turn = Turn(directory, round_index, position, settle, self.reserved)
        try:
            log.case.measure(turn)
            if not log.checked:
                log.case.check()
                log.checked = True
        finally:
            log.case.clean_up()
            if settle:
                shutil.rmtree(directory)
        log.samples += turn.samples
        self.caches += turn.caches


def run(
    suite: Suite,
    directory: Path,
    console: Console,
    *,
    check: bool = False,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Measures; progress goes to `say`, or `console`. Nothing is left on the disk, also after Ctrl-C."""
    if suite.rounds < 1:
        raise ValueError(f"a benchmark has at least one round, not {suite.rounds}")
    needs = suite.needs()
    look_for_room(directory, needs.disk_nbytes, needs.memory_nbytes)
    created, begin, load_before = time.time(), time.monotonic(), os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=directory))
    rows: list[Row] = []
    problems: list[str] = []
    reserved = ReservedMemory(needs.reserved_nbytes)
    try:
        with _quiet_torch(), _saying(console, suite) if say is None else nullcontext(say) as tell:
            run = _Run(reserved, tell)
            try:
                for number, group in enumerate(suite.groups(folder)):
                    rows += run.group(group, folder / f"group{number}")
            except Exception as error:
                if not rows:
                    raise
                problems.append(f"stopped early: {reason(error)}")  # what was measured is not lost to that
    finally:
        reserved.close()
        shutil.rmtree(folder, ignore_errors=True)
    order = list(dict.fromkeys(row.section for row in rows))
    rows.sort(key=lambda row: order.index(row.section))
    result = Result(
        suite=suite.name,
        subject=suite.subject(),
        created=created,
        seconds=time.monotonic() - begin,
        directory=str(directory),
        rounds=suite.rounds,
        machine=machine_facts(directory, load_before, _others_share(rows)),
        facts=suite.facts(),
        rows=tuple(rows),
        temperature=run.temperature,
        cache_method=run.cache_method,
        problems=(*problems, *suite.problems()),
    )
    return msgspec.structs.replace(result, bars=tuple(suite.bars(result))) if check else result


def turns(count: int, round_index: int) -> list[int]:
    """Who goes when in one round, as indices.

    The start moves on by one each round and every other round runs backwards: no case always goes first, or
    always after the same neighbour, while those next to each other stay next to each other.
    """
    step = -1 if round_index % 2 else 1
    return [(round_index + step * i) % count for i in range(count)]


def reason(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"


def _others_share(rows: Sequence[Row]) -> float | None:
    """The share of the CPUs that others used: that of the least disturbed row.

    All rows met the same others, and in some the kernel's own threads, which write back dirty pages, count
    as others as well.
    """
    shares = []
    for row in rows:
        pairs = [
            (s.readings[OTHERS_SECONDS], s.readings[SECONDS])
            for s in row.samples
            if s.readings.get(SECONDS, 0) > 0 and OTHERS_SECONDS in s.readings
        ]
        if pairs:
            shares.append(statistics.median(others / (seconds * cpu_count()) for others, seconds in pairs))
    return min(1.0, *shares) if shares else None


def roughly(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def _saying(console: Console, suite: Suite) -> Iterator[Callable[[str], None]]:
    """Says what is measured: on a terminal in one line that changes, to a file or pipe in a line each."""
    name, last = suite.name, -math.inf

    def line(said: str) -> None:
        """At most one in so many seconds, as some groups have hundreds of short turns."""
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            console.print(f"{name}: {said}", soft_wrap=True)

    if not console.is_terminal:
        yield line
        return
    spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
    columns = (spinner, TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("getting ready", total=None)
        yield lambda said: progress.update(task, description=f"{name}: {said}")


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """DCP warns on every save that there is no process group, and that it overwrites a checkpoint."""
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"torch\..*")
        yield
