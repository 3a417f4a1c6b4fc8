"""The promises about ranks that save together, held against one run; made for states of some size."""

from __future__ import annotations

from holdfast.plan.ranks import BLOCK_NBYTES
from holdfast.study import results
from holdfast.study.bars import make_bar
from holdfast.study.ranks.results import RanksResult, Written
from holdfast.study.results import Bar

SHARES_PERCENT = 1.0
COPIES = 1.01
"""Names, places and checksums come on top of the state's own bytes."""
LEAST_SHARE_NBYTES = 100 * BLOCK_NBYTES
"""Cuts between shares move by up to a block, to where an array or a row ends: too much for smaller ones."""

_OURS = (results.HOLDFAST, results.RECYCLED)


def judge(result: RanksResult) -> tuple[Bar, ...]:
    rows = [row for row in result.of("save") if row.system in _OURS]
    found = [row.written for row in rows if row.written is not None]
    detail = "; ".join(
        sorted({f"{row.title}, {row.world} ranks: {row.status}" for row in rows if row.reason})
    )
    if not rows:
        detail = "left out of this run"
    share = result.state_nbytes / max(result.ranks)
    small = f"made for shares of {LEAST_SHARE_NBYTES / 1e6:.1f} MB and more, not {share / 1e6:.1f}"
    small = small if share < LEAST_SHARE_NBYTES else ""
    return (
        _shares([] if small else found, small or detail),
        _each_byte_once(result, found, detail),
        _one_copy(result, [] if small else found, small or detail),
    )


def _shares(found: list[Written], detail: str) -> Bar:
    promise = "bytes written per rank, how far apart"
    spreads = [100 * written.spread for written in found if len(written.per_rank) > 1]
    if found and not spreads:
        detail = "one rank has nothing to share"
    measured = max(spreads) if spreads else None
    return make_bar("shares", promise, "<=", SHARES_PERCENT, measured, "%", detail)


def _each_byte_once(result: RanksResult, found: list[Written], detail: str) -> Bar:
    off = [abs(written.nbytes - result.state_nbytes) for written in found]
    promise = "bytes that all ranks wrote together, more or less than one copy"
    return make_bar("each-byte-once", promise, "<=", 0.0, float(max(off)) if off else None, "", detail)


def _one_copy(result: RanksResult, found: list[Written], detail: str) -> Bar:
    stored = [written.stored_nbytes / result.state_nbytes for written in found]
    promise = "all files of a checkpoint, against one copy"
    return make_bar("one-copy", promise, "<=", COPIES, max(stored) if stored else None, "x", detail)
