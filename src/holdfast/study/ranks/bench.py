"""``holdfast bench --ranks 1,2,4``: what several ranks gain by saving together, from options to a result.

The order of things: look whether there is room, measure world after world, judge. Nothing is left on the
disk, also after Ctrl-C.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.study import states
from holdfast.study.bench import progress_bar
from holdfast.study.peers import missing_holdfast, missing_modules
from holdfast.study.picture import check_suffix
from holdfast.study.ranks import bars
from holdfast.study.ranks import plot as ranks_plot
from holdfast.study.ranks.measure import Meter
from holdfast.study.ranks.results import RanksResult, summarise
from holdfast.study.ranks.systems import SYSTEMS
from holdfast.study.report import size
from holdfast.study.room import look_for_room, machine_facts

DEFAULT_NBYTES = 1 << 30
MOST_RANKS = 64
_OTHER_DISK_COPIES = 8
"""Beside two of every `Checkpointer` (one per number of writers): a new one, and what is loaded later."""
_OTHER_MEMORY_COPIES = 2
"""Beside the replicas of all ranks: the page cache's and the ballast's."""


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """What to measure; `systems` empty is all of them. `timeout` is for each single operation."""

    ranks: tuple[int, ...]
    directory: Path = field(default_factory=Path.cwd)
    nbytes: int = DEFAULT_NBYTES
    rounds: int = 3
    systems: tuple[str, ...] = ()
    timeout: float = 300.0
    plot: Path | None = None


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks from ``"1,2,4"``, ascending."""
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) is None:
        raise ValueError(f"not numbers of ranks: {text!r}; write them like 1,2,4")
    ranks = sorted({int(word) for word in text.split(",")})
    if not 1 <= ranks[0] <= ranks[-1] <= MOST_RANKS:
        raise ValueError(f"numbers of ranks are from 1 to {MOST_RANKS}, not {text}")
    return tuple(ranks)


def check(options: RanksOptions) -> None:
    """Raises ValueError for options that make no sense, before anything is started."""
    if options.rounds < 1:
        raise ValueError(f"a benchmark has at least one round, not {options.rounds}")
    unknown = sorted(set(options.systems) - set(SYSTEMS))
    if unknown:
        raise ValueError(f"unknown system {', '.join(unknown)}; with --ranks there are: {', '.join(SYSTEMS)}")
    if options.plot is not None:
        check_suffix(options.plot)
    states.shapes_of("gpt2", options.nbytes)


def run(options: RanksOptions, console: Console) -> RanksResult:
    """Measure, and return what was found; progress goes to `console`, the report is left to the caller."""
    check(options)
    absent = missing_modules("torch") or missing_holdfast()
    if absent is not None:
        raise RuntimeError(f"several ranks need torch and Holdfast's engine: {absent}")
    shapes = states.shapes_of("gpt2", options.nbytes)
    nbytes = sum(4 * math.prod(dims) for dims in shapes.values())
    most = max(options.ranks)
    look_for_room(
        options.directory,
        f"a benchmark of {most} ranks with {size(nbytes)} each",
        (2 * (most + 1) + _OTHER_DISK_COPIES) * nbytes,
        (most + _OTHER_MEMORY_COPIES) * nbytes,
    )

    created, begin = time.time(), time.monotonic()
    load_before = os.getloadavg()[0]
    room = Path(tempfile.mkdtemp(prefix=".holdfast-bench-", dir=options.directory))
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("starting ranks", total=None)

            def on_progress(said: str) -> None:
                progress.update(task, advance=1, description=said)

            meter = Meter(
                options.nbytes,
                room,
                ranks=options.ranks,
                rounds=options.rounds,
                systems=options.systems,
                timeout=options.timeout,
                progress=on_progress,
            )
            progress.update(task, total=meter.operations)
            rows = meter.run()
    finally:
        shutil.rmtree(room, ignore_errors=True)
    result = RanksResult(
        created=created,
        seconds=time.monotonic() - begin,
        directory=str(options.directory),
        ranks=options.ranks,
        state_nbytes=nbytes,
        state_leaves=len(shapes),
        rounds=options.rounds,
        temperature=meter.temperature,
        cache_method=meter.cache_method,
        machine=machine_facts(options.directory, load_before),
        rows=summarise(rows, nbytes),
        problems=tuple(meter.problems),
    )
    result = msgspec.structs.replace(result, bars=bars.judge(result))
    if options.plot is not None:
        ranks_plot.draw(result, options.plot)
    return result
