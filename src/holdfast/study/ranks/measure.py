"""In which order ranks are started and things are measured.

Worlds come one after the other, since each rank holds the whole state. Inside of a world all systems take
turns in every round (`holdfast.study.measure.turns`), the device's limit among them: what is compared is
measured within moments of each other. In the largest world so do `Checkpointer`s of which 1, 2, ... ranks
write.

Loads: what the largest world saved is loaded by every other one and by itself, and what the smallest saved
by the largest. So the smallest comes first, then the largest, then those between, and the smallest again.

A rank that fails takes its world with it. The system that was at work is out, and a new world goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.study import cache, results
from holdfast.study.ballast import Ballast
from holdfast.study.measure import turns
from holdfast.study.peers import files_below, remove
from holdfast.study.ranks.orders import Did, Load, Order, Prepare, Save
from holdfast.study.ranks.results import Kind, Row, Written
from holdfast.study.ranks.shares import written_at
from holdfast.study.ranks.systems import LOADING, SYSTEMS, WRITERS
from holdfast.study.ranks.world import RankEnded, World, seconds_of
from holdfast.study.results import WARM_UP, Temperature

Progress = Callable[[str], None]


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


@dataclass(slots=True)
class _Log:
    """One row while it is measured. A system that failed once is out: its numbers would mislead."""

    kind: Kind
    world: int
    system: str
    title: str
    saved_by: int | None = None
    writers: int | None = None
    failure: str | None = None
    seconds: list[float] = field(default_factory=list)
    written: Written | None = None

    def row(self) -> Row:
        failed = self.failure is not None
        return Row(
            kind=self.kind,
            world=self.world,
            system=self.system,
            title=self.title,
            status="failed" if failed else "measured",
            reason=self.failure or "",
            saved_by=self.saved_by,
            writers=self.writers,
            seconds=() if failed else tuple(self.seconds),
            written=None if failed else self.written,
        )


class _Site:
    """The ranks of one size, started when they are first needed, and again after one has failed."""

    def __init__(self, size: int, nbytes: int, room: Path, timeout: float, ballast: Ballast) -> None:
        self.size = size
        self._nbytes = nbytes
        self._timeout = timeout
        self._ballast = ballast
        self._room = room
        self._world: World | None = None
        self._prepared: set[str] = set()
        self._launches = 0
        self._why_not: str | None = None
        self._made: list[Path] = []

    def tell(self, order: Order) -> list[Did]:
        """`RankEnded` when a rank does not do it; then there is no world any more."""
        world = self._ranks()
        try:
            with self._ballast.let_go():
                return world.tell(order)
        except RankEnded:
            self._world = None
            raise

    def prepare(self, system: str) -> None:
        self._ranks()
        if system not in self._prepared:
            self.tell(Prepare(system, str(self._directory(system))))
            self._prepared.add(system)

    def close(self, *, politely: bool) -> None:
        """Ends the ranks, and removes what they had on the disk. `RankEnded` when one does not end well."""
        world, self._world = self._world, None
        try:
            if world is not None:
                with world:
                    if politely:
                        world.stop()
        finally:
            for directory in self._made:
                remove(directory)

    def _ranks(self) -> World:
        if self._why_not is not None:
            raise RankEnded(self._why_not)  # once is enough: it may have taken all of the time-out
        if self._world is None:
            self._launches += 1
            self._prepared.clear()
            try:
                self._world = World(self.size, self._nbytes, self._directory("logs"), self._timeout)
            except RankEnded as error:
                self._why_not = f"{self.size} ranks could not be started: {error}"
                raise RankEnded(self._why_not) from error
        return self._world

    def _directory(self, name: str) -> Path:
        directory = self._room / f"{name}-of-{self.size}-{self._launches}"
        directory.mkdir()
        self._made.append(directory)
        return directory


class Meter:
    """Measures one state in worlds of several sizes, inside of the directory `room`."""

    def __init__(
        self,
        nbytes: int,
        room: Path,
        *,
        ranks: Sequence[int],
        rounds: int,
        systems: Sequence[str] = (),
        timeout: float,
        progress: Progress = lambda said: None,
    ) -> None:
        self._nbytes = nbytes
        self._room = room
        self._ranks = ranks
        self._rounds = rounds
        self._systems = tuple(key for key in SYSTEMS if not systems or key in systems)
        self._timeout = timeout
        self._progress = progress
        self._temperatures: set[Temperature] = set()
        self.cache_method = "nothing was loaded"
        self.problems: list[str] = []

    @property
    def temperature(self) -> Temperature:
        """One warm load among cold ones spoils the comparison."""
        return "cold" if self._temperatures == {"cold"} else "warm"

    @property
    def operations(self) -> int:
        """How many there will be, for the progress."""
        saves = sum(len(self._save_logs(visit.world)) for visit in visits(self._ranks) if visit.saves)
        loads = sum(len(self._loading) * len(visit.loads) for visit in visits(self._ranks))
        return (saves + loads) * (self._rounds + 1)

    def run(self) -> list[Row]:
        """Everything, in the order of the tables."""
        found: list[_Log] = []
        ballast = Ballast(self._nbytes)
        try:
            for visit in visits(self._ranks):
                found += self._visit(visit, ballast)
        finally:
            ballast.close()
        kinds: dict[Kind, int] = {"save": 0, "writers": 1, "load": 2}
        found.sort(key=lambda log: (kinds[log.kind], -(log.saved_by or 0), log.world))  # stable
        return [log.row() for log in found]

    def _visit(self, visit: Visit, ballast: Ballast) -> list[_Log]:
        site = _Site(visit.world, self._nbytes, self._room, self._timeout, ballast)
        saves = self._save_logs(visit.world) if visit.saves else []
        loads = [
            _Log("load", visit.world, key, SYSTEMS[key].title, saved_by=source)
            for source in visit.loads
            for key in self._loading
        ]
        measured = False
        try:
            self._rounds_of(site, saves, self._save)
            if visit.saves and visit.world in (min(self._ranks), max(self._ranks)):
                self._leave_specimens(site, saves)
            for log in loads:
                if not self._specimen(log.system, log.saved_by).exists():
                    log.failure = "there is nothing to load: it could not be saved"
            self._rounds_of(site, loads, self._load)
            measured = True
        finally:
            try:
                site.close(politely=measured)
            except RankEnded as error:  # all has been measured, and is not lost to that
                self.problems.append(f"{visit.world} ranks did not end well: {error}")
        return [*saves, *loads]

    @property
    def _loading(self) -> tuple[str, ...]:
        return tuple(key for key in LOADING if key in self._systems)

    def _save_logs(self, world: int) -> list[_Log]:
        logs = [_Log("save", world, key, SYSTEMS[key].title) for key in self._systems]
        if world == max(self._ranks) > 1 and results.RECYCLED in self._systems:
            for writers in range(1, world + 1):
                title = f"{writers} {'writer' if writers == 1 else 'writers'} of {world}"
                logs.append(_Log("writers", world, f"{WRITERS}{writers}", title, writers=writers))
        return logs

    def _rounds_of(
        self, site: _Site, logs: Sequence[_Log], take_turn: Callable[[_Site, _Log, int], None]
    ) -> None:
        """All of them in every round. One more round than asked for is run first, which is not counted."""
        for round_index in range(WARM_UP, self._rounds + 1) if logs else ():
            for which in turns(len(logs), round_index):
                log = logs[which]
                when = "warm-up" if round_index == WARM_UP else f"round {round_index} of {self._rounds}"
                source = "" if log.saved_by is None else f" {log.saved_by} \N{RIGHTWARDS ARROW}"
                self._progress(f"{log.kind},{source} {site.size} ranks, {when}: {log.title}")
                if log.failure is not None:
                    continue
                try:
                    take_turn(site, log, round_index)
                except RankEnded as error:
                    log.failure = str(error)

    def _save(self, site: _Site, log: _Log, round_index: int) -> None:
        site.prepare(log.system)
        target = self._room / f"{log.system}-{log.world}-{round_index}"
        # What others left behind (dirty pages, blocks to discard) is finished before the clock starts.
        os.sync()
        try:
            answers = site.tell(Save(log.system, str(target)))
            if round_index > WARM_UP:
                log.seconds.append(seconds_of(answers))
            if log.written is None:
                where = answers[0].path
                log.written = written_at(target if where is None else Path(where), log.world)
        finally:
            remove(target)

    def _load(self, site: _Site, log: _Log, round_index: int) -> None:
        site.prepare(log.system)
        specimen = self._specimen(log.system, log.saved_by)
        temperature, self.cache_method = cache.chill(files_below(specimen))
        self._temperatures.add(temperature)
        verify = round_index == WARM_UP and log.system != results.RAW
        answers = site.tell(Load(log.system, str(specimen), verify))
        if round_index > WARM_UP:
            log.seconds.append(seconds_of(answers))

    def _leave_specimens(self, site: _Site, saves: Sequence[_Log]) -> None:
        """What later loads read."""
        for log in saves:
            if log.kind != "save" or log.system not in self._loading or log.failure is not None:
                continue
            specimen = self._specimen(log.system, log.world)
            try:
                site.prepare(log.system)
                site.tell(Save(log.system, str(specimen)))
            except RankEnded as error:
                log.failure = str(error)
                remove(specimen)

    def _specimen(self, system: str, world: int | None) -> Path:
        return self._room / f"specimen-{system}-{world}"
