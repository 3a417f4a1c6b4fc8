"""What a benchmark measured: one model for every suite, which is also its JSON form.

A `Row` is one case in one section of a suite (the section "save" of the case "torch"). Its samples hold
readings by name: `SECONDS`, `CPU_SECONDS`, and what else the suite records.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

Status = Literal["measured", "not installed", "failed"]
Temperature = Literal["cold", "warm"]
Sense = Literal[">=", "<="]
Verdict = Literal["PASS", "FAIL", "within noise", "not measured"]
Readings = Mapping[str, float]

GB = 1e9
"""Speeds are in decimal gigabytes, as devices are sold; memory is in MiB."""
MIB = 1 << 20

SECONDS = "seconds"
CPU_SECONDS = "cpu_seconds"
OTHERS_SECONDS = "others_cpu_seconds"
"""CPU time that the machine spent meanwhile on anything but this process and its children."""
PEAK_NBYTES = "peak_nbytes"
"""How far resident memory grew."""

_RESAMPLES = 1000
_TAIL = 0.025
BUSY_SHARE = 0.10
"""The share of the CPUs that others may use during a run; beyond it the comparison is theirs."""
LEAST_ROUNDS = 3
"""With fewer rounds one cannot tell what is noise."""


class Spread(msgspec.Struct, frozen=True):
    """A median with the extremes it came from."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Sample(msgspec.Struct, frozen=True):
    """One measured call. Rounds below 1 warm up: only their memory is reported."""

    round: int
    position: int
    readings: dict[str, float]


class Row(msgspec.Struct, frozen=True):
    """One case in one section; `reason` says why when it was not measured.

    Rows are comparable when section and `group` are the same: they took turns.
    """

    section: str
    group: str
    case: str
    title: str
    status: Status
    reason: str = ""
    samples: tuple[Sample, ...] = ()

    def values(self, name: str = SECONDS) -> list[float]:
        return [s.readings[name] for s in self.samples if s.round > 0 and name in s.readings]

    def median(self, name: str = SECONDS, factor: float = 1.0) -> float | None:
        found = self.values(name)
        return factor * statistics.median(found) if found else None

    def spread(self, name: str = SECONDS) -> Spread | None:
        found = self.values(name)
        return Spread.of(found) if found else None

    def peak(self, name: str = PEAK_NBYTES) -> float | None:
        """The worst round, warm-up included: a buffer that is kept grows only once."""
        found = [s.readings[name] for s in self.samples if name in s.readings]
        return max(found) if found else None

    def rounds(self, name: str = SECONDS) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for sample in self.samples:
            if sample.round > 0 and name in sample.readings:
                found.setdefault(sample.round, []).append(sample.readings[name])
        return found


class Interval(msgspec.Struct, frozen=True):
    """A value with its 95 % interval; `rounds` says how many it rests on."""

    value: float
    low: float
    high: float
    rounds: int


class Bar(msgspec.Struct, frozen=True):
    """One promise about speed or cost, compared with this run."""

    key: str
    promise: str
    sense: Sense
    limit: float
    unit: str
    verdict: Verdict
    measured: Interval | None = None
    detail: str = ""


class Machine(msgspec.Struct, frozen=True):
    """Where it ran; enough to see whether two results are comparable.

    `load_before` is the load average when the run began. `others_share` is the share of the CPUs that others
    used while something was measured; None where the kernel does not tell.
    """

    platform: str
    cpu_count: int
    load_before: float
    filesystem: str
    versions: dict[str, str]
    others_share: float | None = None


class Result(msgspec.Struct, frozen=True):
    """Everything one run of a suite found out. `facts` describe what was measured."""

    suite: str
    subject: str
    created: float
    seconds: float
    directory: str
    rounds: int
    machine: Machine
    facts: dict[str, float]
    rows: tuple[Row, ...]
    temperature: Temperature = "warm"
    cache_method: str = "nothing was loaded"
    bars: tuple[Bar, ...] = ()
    problems: tuple[str, ...] = ()
    format: str = "everystep-bench/2"

    @property
    def page_cache(self) -> str:
        """How loads found the page cache."""
        return f"cold page cache ({self.cache_method})" if self.temperature == "cold" else "warm page cache"

    def section(self, name: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.section == name)

    def row(self, section: str, case: str, group: str | None = None) -> Row | None:
        found = (row for row in self.section(section) if row.case == case)
        return next((row for row in found if group is None or row.group == group), None)

    def beside(self, row: Row, case: str) -> Row | None:
        """The row of another case that took turns with `row`."""
        return self.row(row.section, case, row.group)


def to_json(result: Result) -> bytes:
    """The whole result, every sample included, as one line of JSON."""
    return msgspec.json.encode(result)


def from_json(data: bytes) -> Result:
    return msgspec.json.decode(data, type=Result)


def ratio(row: Row | None, other: Row | None, name: str = SECONDS) -> float | None:
    """The median of `row` as a multiple of that of `other`; None unless both were measured."""
    if row is None or other is None:
        return None
    above, below = row.median(name), other.median(name)
    return None if above is None or not below else above / below


def faster(row: Row | None, other: Row | None) -> float | None:
    """How many times as fast as `other` `row` is."""
    return ratio(other, row)


def ratio_interval(row: Row, other: Row, name: str = SECONDS) -> Interval | None:
    """`ratio` with its interval. Rounds are drawn together, since both took turns in each."""
    above, below = row.rounds(name), other.rounds(name)
    common = sorted(above.keys() & below.keys())
    if not common or not all(map(sum, below.values())):
        return None

    def of(drawn: Iterable[int]) -> float:
        numbers = list(drawn)
        return statistics.median(v for n in numbers for v in above[n]) / statistics.median(
            v for n in numbers for v in below[n]
        )

    return bootstrap(common, of)


def interval(row: Row, name: str = SECONDS) -> Interval | None:
    """The median reading of `row` with its interval."""
    values = row.rounds(name)
    if not values:
        return None
    return bootstrap(sorted(values), lambda drawn: statistics.median(v for n in drawn for v in values[n]))


def bootstrap(rounds: Sequence[int], statistic: Callable[[Iterable[int]], float]) -> Interval:
    """`statistic` of all rounds, and its 95 % interval over rounds drawn again (percentile bootstrap)."""
    draw = random.Random(0)  # the same result gives the same interval
    found = sorted(statistic(draw.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES))
    low, high = found[int(_TAIL * _RESAMPLES)], found[int((1 - _TAIL) * _RESAMPLES)]
    return Interval(statistic(rounds), low, high, len(rounds))


def scaled(found: Interval | None, factor: float) -> Interval | None:
    if found is None:
        return None
    return Interval(found.value * factor, found.low * factor, found.high * factor, found.rounds)


def exactly(value: float | None) -> Interval | None:
    """A value without noise: bytes, or the worst of all rounds."""
    return None if value is None else Interval(value, value, value, 0)


def judge(
    key: str,
    promise: str,
    sense: Sense,
    limit: float,
    unit: str,
    measured: Interval | None,
    detail: str = "",
) -> Bar:
    """FAIL when the whole interval is on the wrong side of the limit, PASS when on the right one."""
    verdict: Verdict
    if measured is None:
        verdict = "not measured"
    elif 0 < measured.rounds < LEAST_ROUNDS:
        verdict, detail = "not measured", f"{measured.rounds} rounds; {LEAST_ROUNDS} or more are needed"
    else:
        kept = [
            value >= limit if sense == ">=" else value <= limit for value in (measured.low, measured.high)
        ]
        verdict = "PASS" if all(kept) else "within noise" if any(kept) else "FAIL"
    return Bar(key, promise, sense, limit, unit, verdict, measured, detail)


def promised(
    key: str,
    promise: str,
    sense: Sense,
    limit: float,
    above: Row | None,
    below: Row | None,
    *,
    reading: str = SECONDS,
    factor: float = 1.0,
    why: str = "",
) -> Bar:
    """A promise about `above` as a multiple of `below`, times `factor`; `why` it cannot be judged, if so."""
    why = why or why_not(above, below)
    found = None if why or above is None or below is None else ratio_interval(above, below, reading)
    return judge(key, promise, sense, limit, "x", scaled(found, factor), why)


def size(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / MIB:.1f} MiB"


def why_not(*rows: Row | None) -> str:
    """Why a promise could not be judged from these rows; empty when they were measured."""
    for row in rows:
        if row is None:
            return "left out of this run"
        if row.status != "measured":
            return f"{row.title}: {row.status}"
    return ""
