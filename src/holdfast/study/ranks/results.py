"""What a benchmark of several ranks measured, as typed records that are also its JSON form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.study.results import GB, HOLDFAST, RAW, Bar, Machine, Spread, Status, Temperature

Kind = Literal["save", "writers", "load"]


class Written(msgspec.Struct, frozen=True):
    """Bytes of the state that each rank wrote, and all that is on the disk of one checkpoint."""

    per_rank: tuple[int, ...]
    stored_nbytes: int

    @property
    def nbytes(self) -> int:
        return sum(self.per_rank)

    @property
    def spread(self) -> float:
        """How far apart the shares are, of a share."""
        share = self.nbytes / len(self.per_rank)
        return (max(self.per_rank) - min(self.per_rank)) / share if share else 0.0


class Summary(msgspec.Struct, frozen=True):
    """What a row of the table says; ratios are of medians of the same world's rounds."""

    gb_per_second: Spread
    of_raw: float | None
    holdfast_is_faster_by: float | None


class Row(msgspec.Struct, frozen=True):
    """One system in a world of `world` ranks; `reason` says why when it was not measured.

    Of a load: `saved_by` is how many ranks had saved it. Of the search for the best number of writers:
    `writers`. `seconds` are those of the rounds, without the one that warms up.
    """

    kind: Kind
    world: int
    system: str
    title: str
    status: Status
    reason: str = ""
    saved_by: int | None = None
    writers: int | None = None
    seconds: tuple[float, ...] = ()
    written: Written | None = None
    summary: Summary | None = None

    @property
    def rate(self) -> float | None:
        return statistics.median(1 / seconds for seconds in self.seconds) if self.seconds else None


class RanksResult(msgspec.Struct, frozen=True):
    """Everything one run of ``holdfast bench --ranks`` found out."""

    created: float
    seconds: float
    directory: str
    ranks: tuple[int, ...]
    state_nbytes: int
    state_leaves: int
    rounds: int
    temperature: Temperature
    cache_method: str
    machine: Machine
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...] = ()
    problems: tuple[str, ...] = ()
    format: str = "holdfast-bench-ranks/1"

    def of(self, kind: Kind) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    @property
    def best_writers(self) -> int | None:
        """How many writers saved fastest, of those tried; None when they were not."""
        tried = [row for row in self.of("writers") if row.rate is not None]
        return max(tried, key=lambda row: row.rate or 0.0).writers if tried else None

    @property
    def about_as_good(self) -> tuple[int, ...]:
        """The numbers of writers whose rounds do not all lie behind those of the best one; itself, too."""
        rows = [row for row in self.of("writers") if row.seconds]
        best = next((row for row in rows if row.writers == self.best_writers), None)
        if best is None:
            return ()
        slowest = max(best.seconds)
        return tuple(row.writers for row in rows if row.writers is not None and min(row.seconds) <= slowest)


def summarise(rows: Sequence[Row], nbytes: int) -> tuple[Row, ...]:
    """The same rows with their summaries: each is compared with those of its own world and kind."""
    summarised = []
    for row in rows:
        if row.rate is None:
            summarised.append(row)
            continue
        # A number of writers is held against the limit that was measured between its own rounds.
        alike = [
            other
            for other in rows
            if (other.world, other.saved_by) == (row.world, row.saved_by)
            and other.kind == ("save" if row.kind == "writers" else row.kind)
        ]
        rates = {other.system: other.rate for other in alike}
        raw, ours = rates.get(RAW), rates.get(HOLDFAST)
        summary = Summary(
            Spread.of([nbytes / GB / seconds for seconds in row.seconds]),
            None if raw is None else row.rate / raw,
            None if ours is None else ours / row.rate,
        )
        summarised.append(msgspec.structs.replace(row, summary=summary))
    return tuple(summarised)
