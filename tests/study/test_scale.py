"""Ranks of the study: what of a save is waiting, and what a projection says."""

from __future__ import annotations

import pytest

from everystep_study.suites.scale import project, split
from everystep_study.workers.rank_orders import WaitingClock
from support.study.bench_results import answer


def test_a_rank_waits_inside_of_messages_and_for_the_last_one_to_end() -> None:
    found = split([answer(0.0, 4.0, waited=1.0), answer(0.0, 1.0, waited=0.25)])
    assert (found["writing, rank 0"], found["waiting, rank 0"]) == (3.0, 1.0)
    assert (found["writing, rank 1"], found["waiting, rank 1"]) == (0.75, 3.25)
    assert found["seconds"] == 4.0


def test_a_projection_is_a_line_and_never_falls_below_what_was_measured() -> None:
    found = project({1: 1.0, 2: 2.0, 4: 4.0})
    assert found["seconds, 64 ranks"] == pytest.approx(64.0)
    falling = project({1: 4.0, 2: 2.0, 4: 1.0})
    assert (falling["seconds_per_rank"], falling["seconds, 64 ranks"]) == (0.0, 1.0)


def test_nested_waits_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 13.0])
    monkeypatch.setattr("everystep_study.workers.rank_orders.time.monotonic", lambda: next(now))
    clock = WaitingClock()
    inner = clock._timed(lambda: "done")
    assert clock._timed(inner)() == "done"
    assert clock.seconds == 3.0
