"""What a benchmark measured, as typed records that are also its JSON form. No measuring, no judging here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

Operation = Literal["save", "load"]
Status = Literal["measured", "not installed", "failed"]
Temperature = Literal["cold", "warm"]
Verdict = Literal["PASS", "FAIL", "not measured"]

GB = 1e9
"""Speeds are in decimal gigabytes, as devices are sold; memory is in MiB."""

WARM_UP = 0
"""The round that is not timed."""

RAW = "raw"
RAW_HUGE = "raw-huge"
FIO = "fio"
HOLDFAST = "holdfast"
RECYCLED = "holdfast-recycled"
TORCH = "torch"
TORCH_NO_CRC = "torch-no-crc"
SAFETENSORS = "safetensors"
DCP = "dcp"
PICKLE = "pickle"
SAVEZ = "savez"


class Spread(msgspec.Struct, frozen=True):
    """A median with the extremes it came from."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Sample(msgspec.Struct, frozen=True):
    """One save or load of one system in one round.

    Round 0 warms up: its times would count what a first call sets up, so only its memory is reported.
    """

    round: int
    position: int
    seconds: float
    cpu_seconds: float | None
    peak_growth_nbytes: int | None
    temperature: Temperature | None = None


class Summary(msgspec.Struct, frozen=True):
    """What a row of the table says; every number follows from the samples of the same run."""

    gb_per_second: Spread
    cpu_seconds_per_gb: Spread | None
    peak_growth_nbytes: int | None
    ratio_to_raw: float | None
    holdfast_is_faster_by: float | None


class Row(msgspec.Struct, frozen=True):
    """One system doing one operation; `reason` says why when it was not measured."""

    system: str
    title: str
    operation: Operation
    status: Status
    reason: str = ""
    samples: tuple[Sample, ...] = ()
    summary: Summary | None = None

    @property
    def rate(self) -> float | None:
        """Median rate: what every ratio is made of, so that ratios agree with the speeds beside them."""
        return statistics.median(1 / s.seconds for s in self.timed) if self.timed else None

    @property
    def timed(self) -> tuple[Sample, ...]:
        return tuple(s for s in self.samples if s.round > WARM_UP)


class Latency(msgspec.Struct, frozen=True):
    """Seconds of a durable save of a tiny state, interleaved with the same bytes made durable by hand."""

    nbytes: int
    repetitions: int
    by_hand: Spread
    save: Spread
    checkpointer: Spread


class ImportCost(msgspec.Struct, frozen=True):
    """Seconds of ``import holdfast`` in a new interpreter, and until ``holdfast.save`` could be called."""

    repetitions: int
    import_seconds: Spread
    ready_seconds: Spread
    heavy_modules: tuple[str, ...]


class Bar(msgspec.Struct, frozen=True):
    """One promise about speed or cost, held against this run."""

    key: str
    promise: str
    sense: Literal[">=", "<="]
    limit: float
    measured: float | None
    unit: str
    verdict: Verdict
    detail: str = ""


class Machine(msgspec.Struct, frozen=True):
    """Where it ran; enough to see whether two results may be laid side by side.

    `load_before` is how many CPUs others kept busy in the minute before the run (the load average).
    """

    platform: str
    cpu_count: int
    load_before: float
    filesystem: str
    versions: dict[str, str]


class BenchResult(msgspec.Struct, frozen=True):
    """Everything one run of ``holdfast bench`` found out."""

    created: float
    directory: str
    shape: str
    state_nbytes: int
    state_leaves: int
    rounds: int
    temperature: Temperature
    cache_method: str
    machine: Machine
    rows: tuple[Row, ...]
    latency: Latency | None
    import_cost: ImportCost | None
    bars: tuple[Bar, ...]
    problems: tuple[str, ...] = ()
    format: str = "holdfast-bench/1"

    def row(self, system: str, operation: Operation) -> Row | None:
        return next((r for r in self.rows if r.system == system and r.operation == operation), None)


def summarise(rows: Sequence[Row], nbytes: int) -> tuple[Row, ...]:
    """The same rows with their summaries: medians, and ratios of medians to the raw limit and to Holdfast."""
    by_key = {(row.system, row.operation): row for row in rows}
    summarised = []
    for row in rows:
        if not row.timed:
            summarised.append(row)
            continue
        raw = by_key.get((RAW, row.operation))
        holdfast = by_key.get((HOLDFAST, row.operation))
        cpu = [s.cpu_seconds / (nbytes / GB) for s in row.timed if s.cpu_seconds is not None]
        growths = [s.peak_growth_nbytes for s in row.samples if s.peak_growth_nbytes is not None]
        summary = Summary(
            gb_per_second=Spread.of([nbytes / GB / s.seconds for s in row.timed]),
            cpu_seconds_per_gb=Spread.of(cpu) if cpu else None,
            # The worst round, not the typical one: a buffer kept from round to round grows only in the first.
            peak_growth_nbytes=max(growths) if growths else None,
            ratio_to_raw=speed_ratio(row, raw),
            holdfast_is_faster_by=speed_ratio(holdfast, row),
        )
        summarised.append(msgspec.structs.replace(row, summary=summary))
    return tuple(summarised)


def ratios_by_round(row: Row | None, other: Row | None) -> tuple[float, ...]:
    """The speed of `row` as a multiple of the speed of `other`, round by round."""
    if row is None or other is None:
        return ()
    others = {sample.round: sample for sample in other.timed}
    return tuple(
        others[sample.round].seconds / sample.seconds for sample in row.timed if sample.round in others
    )


def speed_ratio(row: Row | None, other: Row | None) -> float | None:
    """The speed of `row` as a multiple of the speed of `other`; None unless both were measured."""
    if row is None or other is None or row.rate is None or other.rate is None:
        return None
    return row.rate / other.rate
