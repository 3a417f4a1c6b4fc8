"""What a crash can leave of a file: every legal state, for a page cache and for persistent memory.

`Disk` is the model. It takes the events of the engine's seam one by one and knows, for each unit of the
file, which contents may be on the medium now. Page cache: a unit is a page; any page may have been written
out at any moment since the last sync. Persistent memory: a unit is 8 bytes; any store may have reached it, in
any order, until its cache line was written back and a fence has passed. A file that grew may still be short.

`survey` runs over a timeline: events, and for each stretch of them the states that may be found. It recovers
from many states at every point, and classifies what it finds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from everystep.engine import faults

PAGE = 4096
WORD = 8

Content = dict[str, Any]
"""Name -> something comparable."""


class Noticed(Exception):
    """What was recovered says itself that it is not whole."""


class Disk:
    """One file on its medium. `unit` is what reaches the medium whole."""

    def __init__(self, unit: int, image: bytes = b"") -> None:
        self.unit = unit
        self._durable = bytearray(image)  # as long as anything was ever stored; zeros beyond the size
        self._sizes = [len(image)]  # the first is durable, each of the others may be
        self._versions: dict[int, list[bytes]] = {}
        self._flushed: dict[int, int] = {}

    def apply(self, event: faults.TracedCall) -> None:
        call = event.call
        if call in ("write", "store"):
            self._store(event.offset, event.data)
        elif call in ("fallocate", "truncate"):
            if call == "truncate" or event.nbytes > self._sizes[-1]:
                self._resize(event.nbytes)
        elif call == "sync":
            self._flushed = {unit: len(versions) for unit, versions in self._versions.items()}
            self._settle()
        elif call == "write_back":
            for unit in range(event.offset // self.unit, -(-(event.offset + event.nbytes) // self.unit)):
                if unit in self._versions:
                    self._flushed[unit] = len(self._versions[unit])
        elif call == "fence":
            self._settle()

    def _resize(self, nbytes: int) -> None:
        self._sizes.append(nbytes)
        self._durable.extend(bytes(max(0, nbytes - len(self._durable))))

    def _store(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if end > self._sizes[-1]:
            self._resize(end)
        for unit in range(offset // self.unit, -(-end // self.unit)):
            begin = unit * self.unit
            now = self._latest(unit)
            first, last = max(begin, offset), min(begin + self.unit, end)
            new = now[: first - begin] + data[first - offset : last - offset] + now[last - begin :]
            if new != now:
                self._versions.setdefault(unit, []).append(new)

    def _latest(self, unit: int) -> bytes:
        versions = self._versions.get(unit)
        return versions[-1] if versions else bytes(self._durable[unit * self.unit : (unit + 1) * self.unit])

    def _settle(self) -> None:
        for unit, count in self._flushed.items():
            versions = self._versions[unit]
            self._put(self._durable, unit, versions[count - 1])
            if count == len(versions):
                del self._versions[unit]
            else:
                self._versions[unit] = versions[count:]
        self._flushed.clear()
        self._sizes = self._sizes[-1:]

    def _put(self, image: bytearray, unit: int, content: bytes) -> None:
        image[unit * self.unit : unit * self.unit + len(content)] = content

    def state(self, choice: dict[int, int], size: int) -> bytes:
        """The file if each unit has reached its version of that number (-1: what was durable before)."""
        image = bytearray(self._durable)
        for unit, version in choice.items():
            if version >= 0:
                self._put(image, unit, self._versions[unit][version])
        return bytes(image[:size])

    def newest(self) -> bytes:
        """What processes on the same machine see."""
        return self.state({unit: len(v) - 1 for unit, v in self._versions.items()}, self._sizes[-1])

    def states(self, most: int, rng: random.Random) -> Iterator[bytes]:
        """All states that a crash could leave now, or as many of them, the extreme ones first."""
        pending = list(self._versions.items())
        count = len(self._sizes)
        for _, versions in pending:
            count *= 1 + len(versions)
            if count > most:
                break
        if count <= most:
            for numbers in product(*(range(-1, len(versions)) for _, versions in pending)):
                for size in self._sizes:
                    yield self.state({u: n for (u, _), n in zip(pending, numbers, strict=True)}, size)
            return
        for number in range(most):
            yield self.state(self._choice(pending, number, rng), rng.choice(self._sizes))

    def _choice(
        self, pending: list[tuple[int, list[bytes]]], number: int, rng: random.Random
    ) -> dict[int, int]:
        full = {unit: len(versions) - 1 for unit, versions in pending}
        if number == 0:
            return full
        if number % 4 == 1:  # one is missing
            return {**full, rng.choice(pending)[0]: -1}
        if number % 4 == 2:  # one has made it
            unit = rng.choice(pending)[0]
            return {unit: full[unit]}
        share = rng.choice((0.02, 0.5, 0.9, 0.98))
        return {
            unit: rng.randrange(len(versions)) if rng.random() < 0.2 else len(versions) - 1
            for unit, versions in pending
            if rng.random() < share
        }


@dataclass(slots=True)
class Stretch:
    """Events, and the states of which a crash among them may leave one: the latest is the last."""

    events: list[faults.TracedCall]
    allowed: list[Content]
    finally_: list[Content]
    """After its last event."""


@dataclass(slots=True)
class Timeline:
    """What was done to one file, and what it was before."""

    image: bytes
    stretches: list[Stretch] = field(default_factory=list)

    @contextmanager
    def recorded(self, allowed: list[Content], finally_: list[Content]) -> Iterator[None]:
        """The events of a block. The lists are read when it ends."""
        stretch = Stretch([], allowed, finally_)
        try:
            with faults.traced() as stretch.events:
                yield
        finally:
            self.stretches.append(stretch)


@dataclass(slots=True)
class Outcome:
    """How often a crash ended how."""

    states: int = 0
    latest: int = 0
    previous: int = 0
    noticed: int = 0
    unnoticed: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def torn(self) -> int:
        return self.noticed + self.unnoticed


Recover = Callable[[bytes], Content]


def survey(
    timeline: Timeline,
    recover: Recover,
    *,
    unit: int,
    per_point: int,
    seed: int = 0,
    points: Callable[[int], bool] = lambda point: True,
) -> Outcome:
    """Crashes after every event, or those of `points`, recovers, and compares with what is allowed there."""
    rng = random.Random(seed)
    disk = Disk(unit, timeline.image)
    outcome = Outcome()
    point = 0
    for stretch in timeline.stretches:
        for index, event in enumerate(stretch.events):
            disk.apply(event)
            point += 1
            if not points(point):
                continue
            last = index == len(stretch.events) - 1
            allowed = stretch.finally_ if last else stretch.allowed
            for image in disk.states(per_point, rng):
                judge(
                    outcome, recover, image, allowed, f"after {event.call} {index} of {len(stretch.events)}"
                )
    return outcome


def judge(outcome: Outcome, recover: Recover, image: Any, allowed: list[Content], where: str) -> None:
    outcome.states += 1
    try:
        found = recover(image)
    except Noticed as error:
        outcome.noticed += 1
        if len(outcome.examples) < 5:
            outcome.examples.append(f"{where}: noticed: {error}")
        return
    if found == allowed[-1]:
        outcome.latest += 1
    elif found in allowed:
        outcome.previous += 1
    else:
        outcome.unnoticed += 1
        if len(outcome.examples) < 5:
            outcome.examples.append(f"{where}: unnoticed: {found!r:.300} instead of one of {allowed!r:.300}")


def merged(outcomes: Iterable[Outcome]) -> Outcome:
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(
            {n: getattr(outcome, n) for n in ("states", "latest", "previous", "noticed", "unnoticed")}
        )
    return Outcome(**total)
