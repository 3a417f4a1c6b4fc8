"""Summaries follow from the samples of the same run, and from nothing else."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.study import results
from holdfast.study.results import Row, Spread, ratios_by_round, summarise
from support.bench_results import NBYTES, row


def test_spread_is_median_and_extremes() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_a_row_says_the_median_speed_and_its_range_without_the_warm_up() -> None:
    (summarised,) = summarise([row(results.TORCH, "save", 2.0, cpu_seconds_per_gb=0.5)], NBYTES)
    assert summarised.summary is not None
    speed = summarised.summary.gb_per_second
    assert (speed.median, speed.low, speed.high) == pytest.approx((2.0, 1.9, 2.08))
    assert summarised.summary.cpu_seconds_per_gb is not None
    assert summarised.summary.cpu_seconds_per_gb.median == pytest.approx(0.5)


def test_memory_is_the_worst_round_warm_up_included() -> None:
    (summarised,) = summarise([row(results.TORCH, "save", 2.0, peak_mib=77)], NBYTES)
    assert summarised.summary is not None
    assert summarised.summary.peak_growth_nbytes == 77 << 20


def test_ratios_are_those_of_the_speeds_beside_them() -> None:
    given = [
        row(results.RAW, "save", 2.0),
        row(results.HOLDFAST, "save", 1.8),
        row(results.TORCH, "save", 0.6),
    ]
    raw, holdfast, torch = (r.summary for r in summarise(given, NBYTES))
    assert raw is not None
    assert holdfast is not None
    assert torch is not None
    assert (raw.ratio_to_raw, holdfast.ratio_to_raw, torch.ratio_to_raw) == pytest.approx((1.0, 0.9, 0.3))
    assert torch.holdfast_is_faster_by == pytest.approx(3.0)
    assert holdfast.holdfast_is_faster_by == pytest.approx(1.0)


def test_rounds_are_paired_with_the_same_round_of_the_other() -> None:
    fast = row(results.TORCH, "save", 2.0)
    slow = msgspec.structs.replace(fast, samples=tuple(reversed(fast.samples[:3])))
    assert ratios_by_round(fast, slow) == pytest.approx((1.0, 1.0))  # rounds 1 and 2; no warm-up, no round 3
    assert ratios_by_round(fast, None) == ()


def test_saves_are_compared_with_saves_and_loads_with_loads() -> None:
    given = [row(results.RAW, "save", 2.0), row(results.RAW, "load", 4.0), row(results.TORCH, "load", 1.0)]
    summary = summarise(given, NBYTES)[2].summary
    assert summary is not None
    assert summary.ratio_to_raw == pytest.approx(0.25)
    assert summary.holdfast_is_faster_by is None


def test_what_was_not_measured_has_no_summary() -> None:
    absent = Row(results.DCP, "torch DCP", "save", "not installed", "pip install torch")
    assert summarise([absent], NBYTES) == (absent,)
