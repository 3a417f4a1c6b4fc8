"""``everystep bench --ranks 1,2,4``: what several ranks gain by saving one replicated state together.

Worlds come one after the other, since each rank holds the whole state. Inside a world all systems take turns
in every round, and in the largest world also `Checkpointer`s in which 1, 2, ... ranks write. What the largest
world saved is loaded by every other one and by itself, and what the smallest saved by the largest. So the
smallest comes first, then the largest, then those between, and the smallest again. A rank that fails ends
its world; the system that was measured is out, and a new world goes on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from everystep_study.harness import results
from everystep_study.harness.files import files_below, missing_everystep, missing_modules, remove
from everystep_study.harness.results import CPU_SECONDS, GB, SECONDS, Bar, Result, Row, size
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.mechanisms import states
from everystep_study.mechanisms.competitors import STORING, WRITERS, choose
from everystep_study.report.elements import ARROW, TIMES, Columns, Shown, View
from everystep_study.suites.save_load import rates
from everystep_study.workers import rank_orders
from everystep_study.workers.processes import Ranks, WorkerEnded

SYSTEMS = {key: STORING[key] for key in ("raw", "everystep-recycled", "everystep", "dcp", "torch")}
LOADING = ("raw", "everystep", "dcp")
MOST_RANKS = 64

SHARES_PERCENT = 1.0
COPIES = 1.01
"""Names, places and checksums come on top of the state's own bytes."""
LEAST_SHARE_NBYTES = 100 * (64 << 10)
"""Cuts between shares move by up to a block of 64 KiB: too much for smaller shares."""

_OTHER_DISK_COPIES = 8
"""Beside two of every `Checkpointer` (one per number of writers): a new one, and what is loaded later."""
_OTHER_MEMORY_COPIES = 2
"""Beside the replicas of all ranks: the page cache's and the reserved memory."""
_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_SHARD = re.compile(r"r(\d+)\.v\d+\.safetensors")
_EVERYSTEP_INDEX = re.compile(r"manifest\.json|r\d+\.json")


class RankSave(Case):
    """All ranks save together."""

    def __init__(self, ranks: Ranks, key: str, nbytes: int) -> None:
        self.key = key
        self._ranks, self._nbytes = ranks, nbytes
        if key.startswith(WRITERS):
            writers = int(key.removeprefix(WRITERS))
            self.sections: tuple[str, ...] = ("writers",)
            self.title = f"{writers} {'writer' if writers == 1 else 'writers'} of {ranks.size}"
        else:
            self.sections = ("save",)
            self.title = SYSTEMS[key].title

    def measure(self, turn: Turn) -> None:
        answers = saved_together(self._ranks, self.key, turn)
        readings = _readings(answers, self.key)
        if self.key != "raw":
            written, stored = written_at(Path(answers[0]["path"]), self._ranks.size)
            share = sum(written) / self._ranks.size
            readings |= {
                "writing_ranks": float(sum(1 for nbytes in written if nbytes)),
                "shares_percent": 100 * (max(written) - min(written)) / share if share else 0.0,
                "nbytes_off": float(abs(sum(written) - self._nbytes)),
                "copies": stored / self._nbytes,
            }
        turn.record(self.sections[0], readings)


def saved_together(ranks: Ranks, key: str, turn: Turn) -> list[dict[str, Any]]:
    ranks.open(key)
    with turn.settled():
        return ranks.tell(rank_orders.save, mechanism=key, directory=str(turn.directory))


class RankLoad(Case):
    """All ranks load what a world of some size saved, in place."""

    sections = ("load",)

    def __init__(self, ranks: Ranks, key: str, saved: Path) -> None:
        self.key, self.title = key, SYSTEMS[key].title
        self._ranks, self._saved = ranks, saved

    def setup(self, directory: Path) -> None:
        if not self._saved.exists():
            raise RuntimeError("there is nothing to load: it could not be saved")

    def measure(self, turn: Turn) -> None:
        self._ranks.open(self.key)
        turn.empty_cache(files_below(self._saved))
        verify = turn.round < 1 and self.key != "raw"
        where: dict[str, Any] = {"mechanism": self.key, "directory": str(self._saved)}
        with turn.settled():
            answers = self._ranks.tell(rank_orders.load, verify=verify, **where)
        turn.record("load", _readings(answers, self.key))


def _readings(answers: list[dict[str, Any]], key: str) -> dict[str, float]:
    readings = {SECONDS: rank_orders.seconds_of(answers)}
    if key != "raw":
        readings[CPU_SECONDS] = sum(answer["cpu_seconds"] for answer in answers)
    return readings


@dataclass(frozen=True, slots=True)
class Visit:
    """One world: whether it measures saves, and whose checkpoints it loads."""

    world: int
    saves: bool
    loads: tuple[int, ...]


def visits(ranks: Sequence[int]) -> list[Visit]:
    """The worlds in their order."""
    least, most = min(ranks), max(ranks)
    if least == most:
        return [Visit(most, True, (most,))]
    return [
        Visit(least, True, ()),
        Visit(most, True, (most, least)),
        *(Visit(world, True, (most,)) for world in sorted(ranks) if least < world < most),
        Visit(least, False, (most,)),
    ]


@dataclass
class RanksSuite(Suite):
    """`systems` empty is all of them; `timeout` is for each single operation."""

    name = "several ranks"
    ranks: tuple[int, ...] = (1, 2, 4)
    nbytes: int = 1 << 30
    rounds: int = 3
    systems: tuple[str, ...] = ()
    timeout: float = 300.0
    _problems: list[str] = field(default_factory=list)

    @classmethod
    def quick(cls) -> RanksSuite:
        return cls((1, 2), states.QUICK_NBYTES)

    def needs(self) -> Needs:
        if not self.ranks or not 1 <= min(self.ranks) <= max(self.ranks) <= MOST_RANKS:
            raise ValueError(f"numbers of ranks are from 1 to {MOST_RANKS}, not {self.ranks}")
        choose(self.systems, SYSTEMS)
        self._shapes = states.shapes_of("gpt2", self.nbytes)
        self._total = sum(4 * math.prod(dims) for dims in self._shapes.values())
        absent = missing_modules("torch") or missing_everystep()
        if absent is not None:
            raise RuntimeError(f"several ranks need torch and Everystep's engine: {absent}")
        most = max(self.ranks)
        disk = (2 * (most + 1) + _OTHER_DISK_COPIES) * self._total
        return Needs(disk, (most + _OTHER_MEMORY_COPIES) * self._total, self._total)

    def groups(self, folder: Path) -> Iterator[Group]:
        chosen = choose(self.systems, SYSTEMS)
        for number_, visit in enumerate(visits(self.ranks)):
            own = folder / f"world{number_}"
            own.mkdir()
            world = Ranks(visit.world, self.nbytes, own, self.timeout)
            done = False
            try:
                if visit.saves:
                    keys = [*chosen]
                    if visit.world == max(self.ranks) > 1 and "everystep-recycled" in chosen:
                        keys += [f"{WRITERS}{count}" for count in range(1, visit.world + 1)]
                    cases = [RankSave(world, key, self._total) for key in keys]
                    yield Group(f"{visit.world}", cases, self.rounds)
                    if visit.world in (min(self.ranks), max(self.ranks)):
                        self._save_for_loads(world, folder, [key for key in LOADING if key in chosen])
                for source in visit.loads:
                    saved = {key: _saved(folder, key, source) for key in LOADING if key in chosen}
                    loads = [RankLoad(world, key, path) for key, path in saved.items()]
                    yield Group(f"{source} {ARROW} {visit.world}", loads, self.rounds)
                done = True
            finally:
                try:
                    world.close() if done else world.kill()
                except WorkerEnded as error:  # all has been measured, and is not lost to that
                    self._problems.append(f"{visit.world} ranks: {error}")
                remove(own)

    def _save_for_loads(self, world: Ranks, folder: Path, keys: Sequence[str]) -> None:
        for key in keys:
            path = _saved(folder, key, world.size)
            path.mkdir()
            try:
                world.open(key)
                world.tell(rank_orders.save, mechanism=key, directory=str(path))
            except WorkerEnded:
                remove(path)  # its loads say that there is nothing to load

    def subject(self) -> str:
        return f"{size(self._total)} in {len(self._shapes):,} tensors on every rank (gpt2, data parallel)"

    def facts(self) -> dict[str, float]:
        return {
            "state_nbytes": self._total,
            "state_leaves": len(self._shapes),
            "least_ranks": min(self.ranks),
            "most_ranks": max(self.ranks),
        }

    def views(self, result: Result) -> list[View]:
        gigabytes = result.facts["state_nbytes"] / GB
        best, good = best_writers(result)

        def shares(row: Row) -> Shown:
            writing, apart = row.median("writing_ranks"), row.peak("shares_percent")
            if writing is None:
                return None
            return f"{apart:.2f} %" if f"{writing:.0f}" == row.group else f"{writing:.0f} of {row.group}"

        common: Columns = {
            "of raw": lambda row: results.faster(row, result.row(_limit_section(row), "raw", row.group)),
            "CPU s/GB": lambda row: row.median(CPU_SECONDS, 1 / gigabytes),
        }
        rival: Columns = {
            f"{TIMES}Everystep": lambda row: results.faster(result.beside(row, "everystep"), row)
        }
        disk: Columns = {
            "shares": shares,
            "copies": lambda row: None if (copies := row.median("copies")) is None else f"{copies:.3f}",
        }
        fastest: Columns = {
            "": lambda row: "best here" if row.case == best else "about as good" if row.case in good else None
        }

        def view(section: str, title: str, columns: Columns) -> View:
            ours = (best or "",) if section == "writers" else self.ours
            named_by = _title if section == "writers" else _title_and_ranks
            speed = partial(rates, gigabytes=gigabytes)
            return View(section, title, "GB/s", speed, columns=columns, ours=ours, named_by=named_by)

        return [
            view("save", "durable save, all ranks together", common | rival | disk),
            view("writers", "Checkpointer, by the number of ranks that write", common | fastest),
            view("load", f"load into every rank, {result.page_cache}", common | rival),
        ]

    def notes(self, result: Result) -> list[str]:
        notes = [
            "GB/s: bytes of one copy of the state (GB is 10^9), over the time from the first rank's start to "
            "the last one's end; of a load, too, however many ranks receive it. 'of raw': of one process "
            f"that writes (reads) as much; '{TIMES}Everystep': how many times as fast as that row Everystep "
            "is; 'shares': how far apart the bytes of the ranks are, of a share, or how many ranks wrote "
            "any; 'copies': what is on the disk, over the state. Recycling is the steady state of a "
            "training; Everystep alone makes a new directory each time. The raw device is one process with "
            "normal pages and a new file: several writers, huge pages, and writing over an old file can be "
            "faster."
        ]
        if result.facts["most_ranks"] > result.machine.cpu_count:
            notes.append(
                f"{result.facts['most_ranks']:.0f} ranks share {result.machine.cpu_count} CPUs here; on a "
                "node of its own a rank has more."
            )
        return notes

    def problems(self) -> list[str]:
        return self._problems

    def bars(self, result: Result) -> list[Bar]:
        rows = [row for row in result.section("save") if row.case in self.ours]
        why = "" if rows else "left out of this run"
        why = why or "; ".join(f"{row.title}, {row.group} ranks: {row.status}" for row in rows if row.reason)
        share = result.facts["state_nbytes"] / result.facts["most_ranks"]
        small = f"made for shares of {LEAST_SHARE_NBYTES / 1e6:.1f} MB and more, not {share / 1e6:.1f}"
        small = small if share < LEAST_SHARE_NBYTES else ""

        def worst(name: str, among: Sequence[Row]) -> results.Interval | None:
            found = [value for row in among if (value := row.peak(name)) is not None]
            return results.exactly(max(found) if found else None)

        several = [row for row in rows if row.group != "1"]
        alone = "" if several else "one rank has nothing to share"
        apart = "bytes written per rank, how far apart"
        off = "bytes that all ranks wrote together, more or less than one copy"
        files = "all files of a checkpoint, against one copy"
        shares = None if small else worst("shares_percent", several)
        copies = None if small else worst("copies", rows)
        judge = results.judge
        return [
            judge("shares", apart, "<=", SHARES_PERCENT, "%", shares, small or why or alone),
            judge("each-byte-once", off, "<=", 0.0, "", worst("nbytes_off", rows), why),
            judge("one-copy", files, "<=", COPIES, "x", copies, small or why),
        ]


def best_writers(result: Result) -> tuple[str | None, set[str]]:
    """The number of writers that saved fastest, as its case, and those that are within its noise."""
    rows = [row for row in result.section("writers") if row.samples and row.values()]
    if not rows:
        return None, set()
    best = min(rows, key=lambda row: row.median() or math.inf)
    slowest = max(best.values())
    return best.case, {row.case for row in rows if min(row.values()) <= slowest}


def written_at(path: Path, world: int) -> tuple[list[int], int]:
    """Bytes of the state that each rank wrote, and all that one checkpoint has on the disk.

    Read from the disk, not from the plan. What cannot be told apart by rank was written by rank 0.
    """
    stored = sum(file.stat().st_size for file in files_below(path))
    per_rank = [0] * world
    for file in files_below(path):
        if shard := _SHARD.fullmatch(file.name):
            per_rank[int(shard[1])] += _tensors_nbytes(file)
        elif not _EVERYSTEP_INDEX.fullmatch(file.name):
            found = _DCP_FILE.fullmatch(file.name)
            per_rank[int(found[1]) if found is not None else 0] += file.stat().st_size
    return per_rank, stored


def _tensors_nbytes(shard: Path) -> int:
    """What a file of safetensors holds, without its header and the gaps between tensors."""
    with shard.open("rb") as file:
        header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
    tensors = (entry["data_offsets"] for name, entry in header.items() if not name.startswith("__"))
    return sum(end - begin for begin, end in tensors)


def _title(row: Row) -> str:
    return row.title


def _title_and_ranks(row: Row) -> str:
    return f"{row.title}, {row.group}"


def _limit_section(row: Row) -> str:
    """A number of writers is compared with the limit that was measured between its own rounds."""
    return "save" if row.section == "writers" else row.section


def _saved(folder: Path, key: str, world: int) -> Path:
    return folder / f"saved-{key}-{world}"
