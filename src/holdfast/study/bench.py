"""``holdfast bench``: from options to a result, with nothing left on the disk.

The order of things: look whether there is room, build the state once, measure all systems in interleaved
rounds, probe the small costs, judge. Each of these has its own module; this one only leads them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.study import bars, measure, plot, probes, report, states
from holdfast.study.limits import every_peer
from holdfast.study.peers import Peer, missing_holdfast
from holdfast.study.picture import check_suffix
from holdfast.study.results import WARM_UP, BenchResult, ImportCost, Latency, Operation, summarise
from holdfast.study.room import look_for_room, machine_facts

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DISK_COPIES = 4
"""At once on disk: one new checkpoint, and up to three of the recycling run while it is saving."""
_MEMORY_COPIES = 5
"""At once in memory: the state, what was loaded, what the greediest peer needs on the way, the ballast."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. `nbytes` None is the shape's own size; `systems` empty is all of them."""

    directory: Path = field(default_factory=Path.cwd)
    nbytes: int | None = None
    shape: states.Shape = "gpt2"
    rounds: int = 5
    systems: tuple[str, ...] = ()
    small_repetitions: int = 300  # a second; the ratio of medians of 50 strays by 5 %, of these by 1 %
    import_repetitions: int = 7
    seed: int = 0
    plot: Path | None = None


def run(options: BenchOptions, console: Console) -> BenchResult:
    """Measure, and return what was found; progress goes to `console`, the report is left to the caller."""
    chosen = choose(options.systems)
    if options.rounds < 1:
        raise ValueError(f"a benchmark has at least one round, not {options.rounds}")
    if options.plot is not None:
        check_suffix(options.plot)
    nbytes = sum(4 * _product(dims) for dims in states.shapes_of(options.shape, options.nbytes).values())
    look_for_room(options.directory, "the benchmark", _DISK_COPIES * nbytes, _MEMORY_COPIES * nbytes)

    load_before = os.getloadavg()[0]
    room = Path(tempfile.mkdtemp(prefix=".holdfast-bench-", dir=options.directory))
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("building the state", total=2 * len(chosen) * (options.rounds + 1))
            state = states.build(options.shape, options.nbytes, seed=options.seed)

            def on_progress(round_index: int, title: str, operation: Operation) -> None:
                when = "warm-up" if round_index == WARM_UP else f"round {round_index} of {options.rounds}"
                said = f"{when}: {title}, {operation}"
                progress.update(task, advance=1, description=said)

            # First: file systems are slower to make files while many have just been deleted.
            progress.update(task, description="small saves and import")
            latency, import_cost, problems = _probe(options, room)
            progress.update(task, description="getting ready")
            measured = measure.run_rounds(chosen, state, room, options.rounds, on_progress)
            progress.update(task, completed=progress.tasks[task].total)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    result = BenchResult(
        created=time.time(),
        directory=str(options.directory),
        shape=options.shape,
        state_nbytes=state.nbytes,
        state_leaves=len(state.arrays),
        rounds=options.rounds,
        temperature=measured.temperature,
        cache_method=measured.cache_method,
        machine=machine_facts(options.directory, load_before),
        rows=summarise(measured.rows, state.nbytes),
        latency=latency,
        import_cost=import_cost,
        bars=(),
        problems=problems,
    )
    result = msgspec.structs.replace(result, bars=bars.judge(result))
    if options.plot is not None:
        plot.draw(result, options.plot)
    return result


def choose(systems: Sequence[str]) -> tuple[Peer, ...]:
    """The systems by these keys, in the order of the table; all of them when none is named."""
    everyone = every_peer()
    unknown = sorted(set(systems) - {peer.key for peer in everyone})
    if unknown:
        known = ", ".join(peer.key for peer in everyone)
        raise ValueError(f"unknown system {', '.join(unknown)}; there are: {known}")
    return tuple(peer for peer in everyone if not systems or peer.key in systems)


def parse_size(text: str) -> int:
    """Bytes from ``"256M"``, ``"1.5GiB"``, ``"4096"``; units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"not a size: {text!r}; write it like 512M, 1G or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _probe(options: BenchOptions, room: Path) -> tuple[Latency | None, ImportCost | None, tuple[str, ...]]:
    """The small costs, and what kept them from being measured: minutes of rounds are not lost to that."""
    absent = missing_holdfast()
    if absent is not None:
        return None, None, (f"small saves and import were not measured: {absent}",)
    latency = import_cost = None
    problems = []
    try:
        latency = probes.latency(room, options.small_repetitions)
    except Exception as error:  # whatever a save can raise
        problems.append(f"small saves failed: {measure.reason(error)}")
    try:
        import_cost = probes.import_cost(options.import_repetitions)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        problems.append(measure.reason(error))
    return latency, import_cost, tuple(problems)


def progress_bar(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )


def _product(dims: Sequence[int]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m holdfast.study.bench``: returns 0 when no bar fails, 1 when one does, 2 for usage."""
    parser = argparse.ArgumentParser(prog="holdfast.study.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path.cwd(), help="on the device to measure"
    )
    parser.add_argument(
        "--size", type=parse_size, default=None, help="bytes of the state: 256M, 1G (default 1G)"
    )
    parser.add_argument("--shape", choices=states.SHAPES, default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--system", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--plot", type=Path, default=None, help="also draw a .png or .svg")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    given = parser.parse_args(arguments)
    options = BenchOptions(
        directory=given.directory,
        nbytes=given.size,
        shape=given.shape,
        rounds=given.rounds,
        systems=tuple(given.system),
        plot=given.plot,
    )
    try:
        result = run(options, Console(stderr=True))
    except (ValueError, OSError, MemoryError) as error:
        print(f"holdfast bench: {error}", file=sys.stderr)
        return 2
    if given.json:
        sys.stdout.write(report.to_json(result).decode())
    else:
        report.show(result, Console())
    return 1 if any(bar.verdict == "FAIL" for bar in result.bars) else 0


if __name__ == "__main__":
    sys.exit(main())
