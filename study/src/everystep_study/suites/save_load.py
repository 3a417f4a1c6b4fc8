"""``everystep bench``: a durable save and a cold load of one state, a tiny save, and the import."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from everystep_study.harness import results
from everystep_study.harness.files import files_below, missing_everystep, sync
from everystep_study.harness.results import (
    CPU_SECONDS,
    GB,
    MIB,
    PEAK_NBYTES,
    SECONDS,
    Bar,
    Result,
    Row,
    Spread,
    size,
)
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.mechanisms import states
from everystep_study.mechanisms.competitors import STORING, choose
from everystep_study.mechanisms.mechanism import Mechanism
from everystep_study.report.elements import TIMES, Columns, View, milliseconds

TINY_NBYTES = 64 * 1024
CREDIBLE_TO_RAW = 1.10
"""Nothing that writes a new file is faster than the device at its best, from huge pages. A ratio to that
beyond this says that the two did not meet the same device (others used it meanwhile), and proves nothing."""

_DISK_COPIES = 4
"""At once on disk: one new checkpoint, and up to three of the recycling run while it is saving."""
_MEMORY_COPIES = 5
"""At once in memory: the state, what was loaded, what the greediest peer needs, the reserved memory."""
_RESERVED_COPIES = 2
"""Enough for those that go through the page cache: a copy there, and one of their own."""


class SaveAndLoad(Case):
    """One mechanism: saves a new file, loads it with an empty page cache, and deletes it."""

    sections = ("save", "load")

    def __init__(self, key: str, kind: type[Mechanism], state: states.State) -> None:
        self.key, self.title = key, kind.title
        self._kind, self._state = kind, state
        self._opened: Mechanism | None = None

    def missing(self) -> str | None:
        return self._kind.missing()

    def setup(self, directory: Path) -> None:
        self._kind.prepare()
        self._opened = self._kind(self._state, directory, durable=True, slots=1)

    def measure(self, turn: Turn) -> None:
        opened = self._opened
        assert opened is not None
        opened.directory = turn.directory
        _, cost = turn.time(opened.save_and_sync)
        turn.record("save", self._readings(opened, cost))
        turn.empty_cache(files_below(opened.path))
        self._state.loaded = None
        _, cost = turn.time(opened.load)
        turn.record("load", self._readings(opened, cost))

    def check(self) -> None:
        loaded = self._state.loaded
        wrong = None if loaded is None else states.difference(self._state.arrays, loaded)
        if wrong is not None:
            raise RuntimeError(f"loaded something else than was saved: {wrong}")

    def clean_up(self) -> None:
        self._state.loaded = None

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _readings(self, opened: Mechanism, cost: dict[str, float]) -> dict[str, float]:
        if not opened.cost_is_ours:
            del cost[CPU_SECONDS]
            cost.pop(PEAK_NBYTES, None)
        return cost if opened.own_seconds is None else {**cost, SECONDS: opened.own_seconds}


class SmallSave(Case):
    """A durable save of 64 KiB: by hand (write, fsync, rename, fsync), `everystep.save`, a `Checkpointer`."""

    sections = ("small save",)
    titles: ClassVar[dict[str, str]] = {
        "by-hand": "write, fsync, rename, fsync",
        "save": "everystep.save",
        "checkpointer": "Checkpointer.save",
    }

    def __init__(self, key: str) -> None:
        self.key, self.title = key, self.titles[key]
        self._weights = np.random.default_rng(0).integers(0, 256, TINY_NBYTES, dtype=np.uint8)
        self._checkpointer: Any = None

    def missing(self) -> str | None:
        return missing_everystep()

    def setup(self, directory: Path) -> None:
        import everystep

        if self.key == "checkpointer":
            self._checkpointer = everystep.Checkpointer(
                directory / "run", {"weights": self._weights}, mode="sync", keep=everystep.Keep(last=1)
            )

    def measure(self, turn: Turn) -> None:
        import everystep

        # Nothing is deleted before the end: file systems make files slowly after many have been deleted.
        data, name = self._weights.tobytes(), f"saved{turn.round}"
        calls: dict[str, Callable[[], object]] = {
            "by-hand": lambda: save_by_hand(turn.directory, name, data),
            "save": lambda: everystep.save(turn.directory / name, {"weights": self._weights}),
            "checkpointer": lambda: self._checkpointer.save(turn.round + 100),
        }
        turn.record("small save", turn.time(calls[self.key])[1])

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


class Import(Case):
    """``import everystep`` in a new interpreter: only there is it a first import."""

    key = "import"
    title = "import everystep"
    sections = ("import",)
    _PROGRAM = """
import sys, time
start = time.perf_counter()
import everystep
imported = time.perf_counter() - start
everystep.save
ready = time.perf_counter() - start
heavy = sum(name in sys.modules for name in ("torch", "jax", "tensorflow", "sklearn"))
print('{"seconds": %r, "ready_seconds": %r, "heavy_modules": %r}' % (imported, ready, float(heavy)))
"""

    def measure(self, turn: Turn) -> None:
        done = subprocess.run(
            [sys.executable, "-c", self._PROGRAM], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"import everystep failed in a new interpreter: {done.stderr.strip()}")
        turn.record("import", msgspec.json.decode(done.stdout, type=dict[str, float]))


@dataclass
class SaveLoadSuite(Suite):
    """`nbytes` None is the shape's own size; `systems` empty is all of them."""

    name = "saving and loading"
    nbytes: int | None = None
    shape: states.Shape = "gpt2"
    rounds: int = 5
    systems: tuple[str, ...] = ()
    small_rounds: int = 300  # a second; the ratio of medians of 50 strays by 5 %, of these by 1 %
    import_rounds: int = 7

    @classmethod
    def quick(cls) -> SaveLoadSuite:
        return cls(nbytes=states.QUICK_NBYTES, rounds=3, small_rounds=100)

    def needs(self) -> Needs:
        choose(self.systems, STORING)
        self._shapes = states.shapes_of(self.shape, self.nbytes)
        self._total = sum(4 * math.prod(dims) for dims in self._shapes.values())
        return Needs(_DISK_COPIES * self._total, _MEMORY_COPIES * self._total, _RESERVED_COPIES * self._total)

    def groups(self, folder: Path) -> Iterator[Group]:
        # Small files first: file systems are slower to make files while many have just been deleted.
        small = [SmallSave(key) for key in SmallSave.titles]
        yield Group("small saves", small, self.small_rounds, warm_up=3, settle=False)
        yield Group("import", [Import()], self.import_rounds)
        state = states.build(self.shape, self.nbytes)
        chosen = choose(self.systems, STORING)
        yield Group(
            "save and load", [SaveAndLoad(key, kind, state) for key, kind in chosen.items()], self.rounds
        )

    def subject(self) -> str:
        return f"{size(self._total)} in {len(self._shapes):,} tensors ({self.shape})"

    def facts(self) -> dict[str, float]:
        return {"state_nbytes": self._total, "state_leaves": len(self._shapes)}

    def views(self, result: Result) -> list[View]:
        gigabytes = result.facts["state_nbytes"] / GB
        common: Columns = {
            "of raw": lambda row: results.faster(row, result.beside(row, "raw")),
            "CPU s/GB": lambda row: row.median(CPU_SECONDS, 1 / gigabytes),
            "peak MiB": lambda row: None if (peak := row.peak()) is None else f"{peak / MIB:,.0f}",
            f"{TIMES}Everystep": lambda row: results.faster(result.beside(row, "everystep"), row),
        }
        by_hand = result.row("small save", "by-hand")
        small: Columns = {f"{TIMES}by hand": lambda row: results.ratio(row, by_hand)}
        return [
            *(
                View(
                    section,
                    title,
                    "GB/s",
                    lambda row: rates(row, gigabytes),
                    columns=common,
                    ours=("everystep", "everystep-recycled"),
                    reference="raw",
                )
                for section, title in (("save", "durable save"), ("load", f"load, {result.page_cache}"))
            ),
            View("small save", "durable save of 64 KiB", "ms", show=milliseconds, columns=small),
            View("import", "import everystep", "ms", show=milliseconds),
        ]

    def notes(self, result: Result) -> list[str]:
        notes = [
            f"GB is 10^9 bytes. 'of raw' compares with the raw device; '{TIMES}Everystep' says how "
            "many times as fast as that row Everystep is; 'peak MiB' is the growth of resident memory in the "
            "worst round, where a load's includes the loaded state. safetensors maps its file, and is timed "
            "until every page is in memory. The raw device is a bare loop over a new file; huge "
            "pages, and recycling, which writes over an old file, can be faster."
        ]
        if result.temperature == "warm":
            notes.append("The page cache could not be emptied: peers read from memory.")
        return notes

    def bars(self, result: Result) -> list[Bar]:
        many_small = self.shape == "many-small"
        promises = _PROMISES_FOR_MANY_SMALL if many_small else _PROMISES
        found = [_faster(result, *promise) for promise in promises]
        return [
            *found,
            *([] if many_small else [_cpu(result)]),
            _memory(result),
            *_import(result),
            _latency(result),
        ]


_PROMISES = (
    ("save", "raw", 0.90, "save, of the raw direct write"),
    ("save", "torch", 2.5, "save, against torch.save + fsync"),
    ("save", "dcp", 2.5, "save, against torch DCP + fsync"),
    ("save", "safetensors", 1.4, "save, against safetensors + fsync"),
    ("save", "torch-no-crc", 1.4, "save, against torch.save, no CRC + fsync"),
    ("load", "raw", 0.85, "cold load, of the raw direct read"),
    ("load", "torch", 1.3, "cold load, against torch.load"),
)
_PROMISES_FOR_MANY_SMALL = (("save", "safetensors", 1.0, "many small tensors, against safetensors"),)


def rates(row: Row, gigabytes: float) -> Spread | None:
    """Speeds in GB/s, of the median time: ratios of times then agree with the speeds beside them."""
    found = row.spread()
    return found and Spread(*(gigabytes / seconds for seconds in (found.median, found.high, found.low)))


def save_by_hand(directory: Path, name: str, data: bytes) -> None:
    """The shortest sequence that makes a file durable and atomic."""
    temporary = directory / f"{name}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, directory / name)
    sync(directory)


def _faster(result: Result, section: str, other: str, limit: float, promise: str) -> Bar:
    ours, theirs = result.row(section, "everystep"), result.row(section, other)
    why = ""
    beyond = results.faster(ours, result.row(section, "raw-huge")) if other == "raw" else None
    if beyond is not None and beyond > CREDIBLE_TO_RAW:
        why = f"{beyond:.2f} times raw, huge pages: not possible; measure again, quietly, with more rounds"
    if section == "load" and result.temperature == "warm":
        why = "the page cache could not be emptied"  # the promise is about a restart
    return results.promised(f"{section}-vs-{other}", promise, ">=", limit, theirs, ours, why=why)


def _cpu(result: Result) -> Bar:
    row = result.row("save", "everystep")
    measured = None if row is None else results.interval(row, CPU_SECONDS)
    per_gb = results.scaled(measured, GB / result.facts["state_nbytes"])
    promise = "CPU of a save, checksums on"
    return results.judge("save-cpu", promise, "<=", 0.12, "s/GB", per_gb, results.why_not(row))


def _memory(result: Result) -> Bar:
    """Both ways of saving must keep to it; the worst round of the worse one counts."""
    peaks = [row.peak() for case in SaveLoadSuite.ours if (row := result.row("save", case)) is not None]
    known = [peak / MIB for peak in peaks if peak is not None]
    measured, promise = results.exactly(max(known, default=None)), "growth of peak memory in a save"
    why = results.why_not(result.row("save", "everystep"))
    return results.judge("save-memory", promise, "<=", 256.0, "MiB", measured, why)


def _import(result: Result) -> list[Bar]:
    row = result.row("import", "import")
    known = None if row is None or not row.samples else row
    seconds = None if known is None else results.scaled(results.interval(known), 1000)
    ready = known and f"ready to save after {milliseconds(known.median('ready_seconds'))} ms"
    heavy = results.exactly(None if known is None else known.peak("heavy_modules"))
    detail = ready or results.why_not(row)
    return [
        results.judge("import-time", "import everystep", "<=", 150.0, "ms", seconds, detail),
        results.judge("import-light", "frameworks that this pulls in", "<=", 0.0, "", heavy),
    ]


def _latency(result: Result) -> Bar:
    by_hand, ours = result.row("small save", "by-hand"), result.row("small save", "save")
    return results.promised("latency", "save of 64 KiB, against doing it by hand", "<=", 1.5, ours, by_hand)
