"""What a save or a load costs, and in which order the systems take their turns.

Knows nothing of what a system does; reads the wall clock, the CPU clock and the peak of resident memory
around it, checks once per run that what came back is what was saved, and cleans up.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from holdfast.study import cache
from holdfast.study.ballast import Ballast
from holdfast.study.peers import Done, Peer, difference, files_below, remove
from holdfast.study.results import WARM_UP, Operation, Row, Sample, Temperature
from holdfast.study.states import State

T = TypeVar("T")
Progress = Callable[[int, str, Operation], None]
"""Called before each operation with the round, the title of the system, and what it is about to do."""


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    cpu_seconds: float
    peak_growth_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    rows: tuple[Row, ...]
    temperature: Temperature
    cache_method: str


@dataclass(slots=True)
class _Log:
    """What is known of one system so far. A system that failed once is out: its numbers would mislead."""

    peer: Peer
    absent: str | None = None
    failure: str | None = None
    started: bool = False
    verified: bool = False
    samples: dict[Operation, list[Sample]] = field(default_factory=lambda: {"save": [], "load": []})

    @property
    def running(self) -> bool:
        return self.absent is None and self.failure is None

    def row(self, operation: Operation) -> Row:
        key, title = self.peer.key, self.peer.title
        if self.absent is not None:
            return Row(key, title, operation, "not installed", self.absent)
        if self.failure is not None:
            return Row(key, title, operation, "failed", self.failure)
        return Row(key, title, operation, "measured", samples=tuple(self.samples[operation]))


def cost_of(action: Callable[[], T]) -> tuple[T, Cost]:
    """Run `action`; its result and what it cost this process.

    CPU time is user plus system of all our threads. The workers that io_uring starts in the kernel are
    threads of this process and are counted; the kernel's own flusher threads, which write back what
    buffered peers leave dirty, are not: that error is in favour of the peers.

    Peak memory is the kernel's high-water mark of resident memory (VmHWM). It only ever rises, so it is set
    back to the present value first (writing 5 to clear_refs); the growth is the mark after minus the mark
    before. Memory that an earlier system freed but the allocator kept would be used again unseen, so it is
    returned first. The kernel keeps these counters per CPU and may be some hundred KiB behind.
    """
    gc.collect()
    return_free_memory()
    before = reset_peak()
    cpu = cpu_seconds()
    clock = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - clock
    cpu = cpu_seconds() - cpu
    after = None if before is None else peak_nbytes()
    growth = None if before is None or after is None else max(0, after - before)
    return result, Cost(seconds, cpu, growth)


def turns(count: int, round_index: int) -> list[int]:
    """Who goes when in one round, as indices.

    The start moves on by one each round and every other round runs backwards: nobody always goes first, or
    always after the same neighbour, while those next to each other stay next to each other.
    """
    step = -1 if round_index % 2 else 1
    return [(round_index + step * i) % count for i in range(count)]


def run_rounds(
    peers: Sequence[Peer],
    state: State,
    directory: Path,
    rounds: int,
    progress: Progress = lambda round_index, title, operation: None,
) -> Measured:
    """Measure all systems, interleaved: each round, each saves a new file, loads it cold, and deletes it.

    One more round than `rounds` is run: the first (`WARM_UP`) finds caches cold and lazy imports undone.
    What it loads is compared with the state.
    """
    logs = [_Log(peer) for peer in peers]
    temperatures: set[Temperature] = set()
    methods: list[str] = []
    ballast = Ballast(_BALLAST_COPIES * state.nbytes)
    try:
        for round_index in range(WARM_UP, rounds + 1):
            for position, which in enumerate(turns(len(logs), round_index)):
                log = logs[which]
                if round_index == WARM_UP:
                    # Not all of them beforehand: what one keeps in memory from its preparations (a buffer of
                    # the engine, say) must not be there already when another that uses it is measured.
                    _start(log, directory, state)
                if not log.running:
                    continue
                try:
                    temperature, method = _turn(
                        log, state, directory, round_index, position, progress, ballast
                    )
                except Exception as error:
                    # Any system may fail in its own way: it is shown as failed, and the others go on.
                    log.failure = reason(error)
                else:
                    temperatures.add(temperature)
                    methods.append(method)
    finally:
        ballast.close()
        for log in logs:
            if log.started:
                log.peer.stop()
    rows = tuple(log.row(operation) for operation in _OPERATIONS for log in logs)
    # One warm load among cold ones spoils the comparison.
    temperature = "cold" if temperatures == {"cold"} else "warm"
    return Measured(rows, temperature, methods[-1] if methods else "nothing was loaded")


_OPERATIONS: tuple[Operation, ...] = ("save", "load")
_BALLAST_COPIES = 2
"""Enough for those that go through the page cache: a copy there, and one of their own."""


def _start(log: _Log, directory: Path, state: State) -> None:
    log.absent = log.peer.missing()
    if log.absent is not None:
        return
    own = directory / log.peer.key
    own.mkdir()
    log.started = True
    try:
        log.peer.start(own, state)
    except Exception as error:  # as above
        log.failure = reason(error)


def _turn(
    log: _Log,
    state: State,
    directory: Path,
    round_index: int,
    position: int,
    progress: Progress,
    ballast: Ballast,
) -> tuple[Temperature, str]:
    peer = log.peer
    # A new directory for each: filesystems place files by their directory, and some systems make one anyway.
    room = directory / peer.key / f"round-{round_index}"
    room.mkdir()
    # What others left behind (dirty pages, blocks to discard) is finished before the clock starts.
    os.sync()
    progress(round_index, peer.title, "save")
    try:
        with ballast.let_go():
            saved, cost = cost_of(lambda: peer.save(room / "saved", state))
    except Exception:
        remove(room)  # half a file may be as large as a whole one
        raise
    try:
        log.samples["save"].append(_sample(peer, saved, cost, round_index, position, None))
        temperature, method = cache.chill(files_below(saved.path))
        progress(round_index, peer.title, "load")
        with ballast.let_go():
            loaded, cost = cost_of(lambda: peer.load(saved))
        log.samples["load"].append(_sample(peer, loaded, cost, round_index, position, temperature))
        if loaded.leaves is not None and not log.verified:
            wrong = difference(state, loaded.leaves)
            if wrong is not None:
                raise RuntimeError(f"loaded something else than was saved: {wrong}")
            log.verified = True
    finally:
        peer.remove(saved)
        remove(room)
    return temperature, method


def _sample(
    peer: Peer, done: Done, cost: Cost, round_index: int, position: int, temperature: Temperature | None
) -> Sample:
    return Sample(
        round=round_index,
        position=position,
        seconds=cost.seconds if done.seconds is None else done.seconds,
        cpu_seconds=cost.cpu_seconds if peer.cost_is_ours else done.cpu_seconds,
        peak_growth_nbytes=cost.peak_growth_nbytes if peer.cost_is_ours else None,
        temperature=temperature,
    )


def reason(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def reset_peak() -> int | None:
    """Set the high-water mark back; None where the kernel offers no way (then memory is not reported)."""
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return None
    return peak_nbytes()


def peak_nbytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def return_free_memory() -> None:
    # glibc only; other C libraries either lack it or give memory back by themselves.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
