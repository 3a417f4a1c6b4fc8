"""What the simulation of many ranks found, as typed records that are also its JSON form; and its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec
from rich.console import Console
from rich.table import Table

Layout = Literal["ddp", "fsdp", "hsdp x tp"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

COMMIT_LIMIT_SECONDS = 1.0
"""What the coordinator may take per commit of `COMMIT_LIMIT_WORLD` ranks."""
COMMIT_LIMIT_WORLD = 1024


class Case(msgspec.Struct, frozen=True):
    """What one layout costs in one world. Seconds are of one process; sizes in bytes."""

    layout: Layout
    world: int
    leaves: int
    state_nbytes: int
    merge_seconds: float
    """Once per layout, on every rank: encode its view, decode another, merge them to the world's leaves."""
    plan_seconds: float
    """Once per layout, on every rank: share the leaves out."""
    fragments_seconds: float
    """Once per layout, on every rank: its own fragments."""
    load_ratio: float
    """Bytes of the rank that writes most (planned for any, or written by one measured), over the mean."""
    fragments: float
    description_nbytes: int
    """The whole layout as bytes, for comparing plans and finding parts."""
    part_nbytes: float
    part_seconds: float
    """Per save, on every rank: encode its part."""
    message_nbytes: float
    """Per save: what a rank tells the coordinator when its part is durable."""
    root_nbytes: int
    commit_seconds: float
    """Per save, on the coordinator: decode and compare everybody's message, encode the root."""
    reshard_world: int
    reshard_parts: float
    reshard_reads: float
    reshard_open_seconds: float
    """Per resume, on every rank: decode the root and the layout in it."""
    reshard_locate_seconds: float
    """Per resume, on every rank: which parts hold what it wants."""
    reshard_seconds: float
    """Per resume, on every rank: from these parts, which bytes of which files."""

    @property
    def rank_seconds(self) -> float:
        return self.merge_seconds + self.plan_seconds + self.fragments_seconds

    @property
    def resume_seconds(self) -> float:
        return self.reshard_open_seconds + self.reshard_locate_seconds + self.reshard_seconds

    @property
    def all_ranks_seconds(self) -> float:
        """Planning on all ranks, who in truth plan at the same time: a measured one, times the world."""
        return self.world * self.rank_seconds


def growth(before: Case, after: Case, value: Callable[[Case], float]) -> float:
    """How often linear growth fits into the growth between two cases: 1 is linear, 0 is none at all."""
    size = after.world * after.leaves / (before.world * before.leaves)
    return math.log(value(after) / value(before)) / math.log(size)


def pairs(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Cases that differ in one thing: the next larger world, or more leaves in the same world."""
    found: list[tuple[Case, Case]] = []
    for case in cases:
        alike = [other for other in cases if other.layout == case.layout]
        wider = [other for other in alike if other.leaves == case.leaves and other.world > case.world]
        fuller = [other for other in alike if other.world == case.world and other.leaves > case.leaves]
        found += [(case, min(wider, key=lambda other: other.world))] if wider else []
        found += [(case, min(fuller, key=lambda other: other.leaves))] if fuller else []
    return found


def show(cases: Sequence[Case], console: Console) -> None:
    """The table, then growth between worlds."""
    table = Table(
        title="Planning at scale (simulated ranks, real planner and manifests)",
        caption="plan/rank (merge views, plan, own fragments), encode, open, locate, plan reads: CPU time, "
        "median of a few ranks; all ranks: plan/rank x ranks. max/mean above 1 where a layout leaves shards "
        "uneven that have no copies to share.",
    )
    headings = (
        "layout", "ranks", "leaves", "plan/rank", "all ranks", "max/mean", "described", "fragments", "part",
        "encode", "message", "root", "commit", "resume on", "parts", "reads", "open", "locate", "plan reads",
    )  # fmt: skip
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for case in cases:
        table.add_row(
            case.layout,
            f"{case.world:,}",
            f"{case.leaves:,}",
            _ms(case.rank_seconds),
            f"{case.all_ranks_seconds:.1f} s",
            f"{case.load_ratio:.4f}",
            _kib(case.description_nbytes),
            f"{case.fragments:,.0f}",
            _kib(case.part_nbytes),
            _ms(case.part_seconds),
            f"{case.message_nbytes:,.0f} B",
            _kib(case.root_nbytes),
            _ms(case.commit_seconds),
            f"{case.reshard_world:,}",
            f"{case.reshard_parts:,.0f}",
            f"{case.reshard_reads:,.0f}",
            _ms(case.reshard_open_seconds),
            _ms(case.reshard_locate_seconds),
            _ms(case.reshard_seconds),
        )
    console.print(table)
    for before, after in pairs(cases):
        console.print(_growth_line(before, after), highlight=False)
    for case in cases:
        if case.world == COMMIT_LIMIT_WORLD:
            verdict = "PASS" if case.commit_seconds < COMMIT_LIMIT_SECONDS else "FAIL"
            console.print(
                f"{verdict}: {case.layout}, {case.world:,} ranks x {case.leaves:,} leaves: the coordinator's "
                f"work per commit is {_ms(case.commit_seconds)}; the limit is {COMMIT_LIMIT_SECONDS:.0f} s",
                highlight=False,
            )


def _growth_line(before: Case, after: Case) -> str:
    values: tuple[tuple[str, Callable[[Case], float]], ...] = (
        ("plan/rank", lambda case: case.rank_seconds),
        ("all ranks", lambda case: case.all_ranks_seconds),
        ("part", lambda case: case.part_nbytes),
        ("root", lambda case: case.root_nbytes),
        ("commit", lambda case: case.commit_seconds),
        ("reshard/rank", lambda case: case.resume_seconds),
    )
    found = ", ".join(f"{name} {growth(before, after, value):.2f}" for name, value in values)
    return (
        f"{before.layout}: {before.world:,} x {before.leaves:,} -> {after.world:,} x {after.leaves:,}: "
        f"growth (1 = linear in ranks x leaves): {found}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _kib(nbytes: float) -> str:
    return f"{nbytes / 1024:,.0f} KiB"
