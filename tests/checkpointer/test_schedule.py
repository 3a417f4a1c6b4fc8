"""When saves are due, on a simulated clock, held against the closed formulas."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everystep.checkpointer.schedule import (
    PROBE_CALLS,
    Auto,
    Cost,
    EverySeconds,
    EverySteps,
    Schedule,
    daly_interval,
    make_schedule,
    young_interval,
)
from support.states.simulated_training import Training, waste_under_failures


def auto(**options: Any) -> Auto:
    made = make_schedule("auto", **options)
    assert isinstance(made, Auto)
    return made


# What may be asked for.


def _due(schedule: Schedule, calls: Sequence[int]) -> list[int]:
    found = []
    for step in calls:
        schedule.stepped(step, 0.0, 0.0, False)
        found += [step] if schedule.due(step, 0.0) else []
    return found


def test_steps_are_due_at_their_multiples() -> None:
    schedule = make_schedule(3)
    assert isinstance(schedule, EverySteps)
    assert _due(schedule, range(10)) == [0, 3, 6, 9]
    assert schedule.explain() == "every 3 steps"
    assert make_schedule(1).explain() == "every step"


@pytest.mark.parametrize(
    ("calls", "due"),
    [
        (range(1, 30, 4), [13, 21]),  # no multiple of ten among them
        (range(391, 2000, 391), [391, 391 * 2, 391 * 3, 391 * 4, 391 * 5]),
        ([8, 9, 10, 11, 5, 9, 12], [10, 12]),  # and back to an older step
        ([20, 20], [20, 20]),
    ],
    ids=["stride", "epochs", "back", "again"],
)
def test_a_multiple_that_no_call_falls_on_is_made_up_for_by_the_next(
    calls: Sequence[int], due: list[int]
) -> None:
    assert _due(make_schedule(10), calls) == due


def test_what_was_passed_is_counted_from_the_step_that_training_resumed_at() -> None:
    """A process that ends after one call of its own must have saved, or no work would ever be done."""
    for began, step, due in ((0, 9, False), (0, 14, True), (14, 19, False), (14, 28, True), (95, 61, False)):
        schedule = make_schedule(10)
        schedule.stepped(3, 0.0, 0.0, False)
        schedule.resumed(began)
        assert _due(schedule, [step]) == [step] * due, (began, step)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1h", 3600), ("1.5h", 5400), (".5s", 0.5), ("2d", 172800), (" 7 s ", 7)],
)
def test_times_are_understood(text: str, seconds: float) -> None:
    schedule = make_schedule(text)
    assert isinstance(schedule, EverySeconds)
    assert schedule.seconds == seconds


@pytest.mark.parametrize(
    "every", [0, -1, True, 2.0, 2.5, None, "", "10", "s", "0s", "-5s", "5 weeks", "1e3s", "AUTO", [], b"5s"]
)
def test_anything_else_is_refused_with_what_is_allowed(every: Any) -> None:
    with pytest.raises(ValueError, match=r'a number of steps .* "30s", "5m" or "1.5h", or "auto", not '):
        make_schedule(every)


@pytest.mark.parametrize("budget", [0, 1, -0.1, 1.5, math.nan, "3%", None])
def test_a_budget_is_a_share(budget: Any) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        make_schedule("auto", budget=budget)


@pytest.mark.parametrize("mtbf", [0, -1.0, math.inf, math.nan, "6", "soon", "0h", True, timedelta(hours=6)])
def test_a_time_between_failures_is_a_time(mtbf: Any) -> None:
    with pytest.raises(ValueError, match='"6h" or "2d"'):
        make_schedule("auto", mtbf=mtbf)


@pytest.mark.parametrize("every", [5, "30s"])
def test_a_time_between_failures_goes_with_auto_only(every: int | str) -> None:
    with pytest.raises(ValueError, match='goes with every="auto"'):
        make_schedule(every, mtbf="6h")
    assert auto(mtbf="6h").mtbf == auto(mtbf=21600).mtbf == 21600.0


# Seconds.


@given(st.floats(0.5, 50), st.floats(0.01, 20))
def test_seconds_save_at_the_first_call_after_the_interval(seconds: float, step: float) -> None:
    training = Training(EverySeconds(seconds), step=step, stall=0.3).run(200)
    starts = [1000.0 + step, *(training.clock[save][0] for save in training.saves)]
    gaps = [after - before for before, after in pairwise(starts)]
    assert all(seconds <= gap < seconds + step + 0.3 + 1e-6 for gap in gaps)
    assert training.now - starts[-1] <= seconds + step + 0.3 + 1e-6  # and none was left out at the end


def test_seconds_do_not_count_from_a_question() -> None:
    schedule = make_schedule("30s")
    assert not schedule.due(1, 1e9)
    schedule.stepped(1, 100.0, 0.0, False)
    assert not schedule.due(1, 129.9)
    assert schedule.due(1, 130.0)


# Auto, within a budget.


@pytest.mark.parametrize("budget", [0.01, 0.03, 0.2])
@pytest.mark.parametrize("stall", [0.0001, 0.029, 0.03, 0.1, 1.0, 7.0])
def test_a_constant_stall_gives_the_closed_formula(stall: float, budget: float) -> None:
    schedule = auto(budget=budget)
    training = Training(schedule, step=0.5, stall=stall).run_until(12)
    assert schedule.interval == math.ceil(round(stall / (budget * 0.5), 6))
    assert training.overhead(5) <= budget * (1 + 1e-9)
    assert not schedule.measuring


def test_an_overlapped_save_costs_the_slowdown_of_the_steps_beside_it() -> None:
    schedule = auto()
    # 0.8 s of writing beside a step of 1 s that goes a quarter slower: 0.8 s do the work of 0.64 s.
    training = Training(schedule, stall=0.01, write=0.8, slow=0.25).run_until(12)
    assert schedule.interval == math.ceil((0.01 + 0.16) / 0.03)
    found = schedule.measured()
    assert found is not None
    assert found.slowdown == pytest.approx(0.16)
    assert training.overhead(5) <= 0.03


@settings(max_examples=50)
@given(
    step=st.floats(0.001, 100),
    stall=st.floats(0, 3),
    write=st.floats(0, 6),
    slow=st.floats(0, 1),
    budget=st.sampled_from([0.03, 0.1, 0.5]),
)
@example(step=1.0, stall=0.75, write=0.125, slow=0.0, budget=0.5)  # counts time that a save took as work
def test_the_overhead_keeps_within_the_budget_once_settled(
    step: float, stall: float, write: float, slow: float, budget: float
) -> None:
    schedule = auto(budget=budget)
    training = Training(schedule, step=step, stall=stall * step, write=write * step, slow=slow)
    training.run_until(40)
    found, interval = schedule.measured(), schedule.interval
    assert found is not None
    assert interval is not None
    assert training.overhead(20) <= budget * (1 + 1e-6) + 1e-9
    # And no more than needed: one step less would break the budget, or have two saves in flight.
    shorter = interval - 1
    assert shorter < found.durable_steps or found.cost / (shorter * step) > budget * (1 - 1e-6)
    assert interval >= found.durable_steps


def test_saves_of_many_steps_are_never_due_while_one_is_in_flight() -> None:
    schedule = auto()
    training = Training(schedule, write=7.5).run_until(12)  # Training itself refuses a second one
    assert schedule.interval == 8
    # Nine where a step was left alone to be measured.
    assert {after - before for before, after in pairwise(training.saves[4:])} <= {8, 9}


def test_the_first_call_saves_and_a_save_is_thought_dear_until_it_is_known() -> None:
    schedule = auto()
    assert schedule.due(1, 0.0)
    assert "measuring" in schedule.explain()
    training = Training(schedule, stall=60.0).run(40)
    assert training.saves == [1]
    assert "measuring" in schedule.explain()


def test_calls_that_are_far_apart_need_not_wait_for_measurements() -> None:
    training = Training(auto(), step=1.0, stride=1000, stall=0.2, write=5.0).run(8)
    assert training.saves == [1000 * call for call in range(1, 9)]


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.6), (0.6, 0.1)])
def test_a_cost_that_changes_midway_is_followed(before: float, after: float) -> None:
    schedule = auto()
    training = Training(schedule, stall=lambda step: before if step < 1000 else after)
    training.run(999)
    assert schedule.interval == math.ceil(before / 0.03)
    training.run(1000)
    assert schedule.interval == math.ceil(after / 0.03)


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.1), (0.1, 1.0)])
def test_a_step_time_that_changes_midway_is_followed_even_when_every_step_is_saved(
    before: float, after: float
) -> None:
    schedule = auto()
    cost = 0.025 * min(before, after)
    training = Training(schedule, step=lambda step: before if step < 1000 else after, stall=cost, write=cost)
    training.run(999)
    assert schedule.interval == 1
    training.run(600)
    assert schedule.interval == 1
    found = schedule.measured()
    assert found is not None
    assert found.alone == pytest.approx(after)
    assert found.cost == pytest.approx(cost, rel=1e-6)


def test_a_step_is_left_alone_now_and_then_to_measure_it() -> None:
    training = Training(auto(), write=0.9).run(1000)
    skipped = sorted(set(range(100, 1000)) - set(training.saves))
    assert {after - before for before, after in pairwise(skipped)} == {PROBE_CALLS + 1}


def test_evaluations_between_steps_do_not_count_as_cost() -> None:
    schedule = auto()
    Training(schedule, step=lambda step: 30.0 if step % 10 == 0 else 1.0, stall=0.05, write=0.5).run(600)
    assert schedule.interval == 2


def test_the_first_steps_and_the_first_save_do_not_decide_for_long() -> None:
    schedule = auto()
    Training(
        schedule,
        step=lambda step: 60.0 if step <= 2 else 1.0,
        stall=lambda step: 1.0 if step <= 1 else 0.05,
        write=0.5,
    ).run(300)
    assert schedule.interval == 2


def test_steps_that_are_slow_because_they_are_the_first_are_no_cost_of_the_save_beside_them() -> None:
    training = Training(auto(), step=lambda step: 60.0 if step <= 3 else 1.0, stall=0.01, write=5.0).run(12)
    assert training.saves[:2] == [1, 7]


def test_the_first_save_counts_no_more_once_there_is_a_second() -> None:
    schedule = auto()
    Training(schedule, stall=lambda step: 0.3 if step == 1 else 0.06).run_until(2)
    found = schedule.measured()
    assert found is not None
    assert found.stall == 0.06


def test_a_stall_that_only_the_steps_know_of_is_a_cost_too() -> None:
    # A synchronous save is durable before anybody can say how long training will have waited for it.
    schedule = auto()
    training = Training(schedule, stall=0.3, told=0.0).run_until(12)
    assert schedule.interval == 10
    assert training.overhead(5) <= 0.03 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_flutter(seed: int) -> None:
    chance = random.Random(seed)
    schedule = auto()
    training = Training(
        schedule,
        step=lambda step: chance.gauss(1.0, 0.05),
        stall=lambda step: chance.gauss(0.3, 0.05),
        write=0.5,
        slow=0.1,
    )
    training.run(500)
    seen = []
    for _ in range(3000):
        training.run(1)
        seen.append(schedule.interval)
    exact = (0.3 + 0.5 * 0.1 / 1.1) / 0.03
    changes = sum(before != after for before, after in pairwise(seen))
    assert changes < len(seen) / 20
    assert all(interval is not None and 0.8 * exact <= interval <= 1.6 * exact for interval in seen)
    assert training.overhead(30) <= 0.033


def test_saves_that_fail_are_tried_again_and_cost_nothing_known() -> None:
    schedule = auto()
    training = Training(schedule, stall=0.1, write=0.4, failing=lambda step: step < 100).run(99)
    assert len(training.saves) > 10
    assert schedule.interval is None
    training.run(400)
    assert schedule.interval == 4
    assert not schedule.measuring


def test_saves_that_fail_do_not_push_out_what_is_known() -> None:
    schedule = auto()
    training = Training(schedule, stall=0.1, failing=lambda step: 100 < step < 300).run(299)
    assert len([step for step in training.saves if 100 < step < 300]) > 20
    assert schedule.measured() is not None
    assert schedule.interval == 4


def test_a_training_that_went_back_saves_there_and_the_same_step_only_once() -> None:
    schedule = auto()
    training = Training(schedule, stall=0.3).run_until(9)
    last = training.saves[-1]
    assert not schedule.due(last, training.now)
    assert schedule.due(last - 50, training.now)


@given(st.integers(1, 60), st.sampled_from([1, "7s", "auto"]))
def test_asking_changes_nothing_and_once_due_it_stays_due(calls: int, every: int | str) -> None:
    schedule = make_schedule(every)
    training = Training(schedule, stall=0.1).run(calls)
    explained = schedule.explain()
    answers = [schedule.due(training.done + ahead, training.now + ahead) for ahead in range(1, 40)]
    assert answers == sorted(answers)
    assert answers == [schedule.due(training.done + ahead, training.now + ahead) for ahead in range(1, 40)]
    assert schedule.explain() == explained


def test_a_save_may_be_reported_from_another_thread() -> None:
    schedule = auto()
    for step in range(1, 200):
        schedule.stepped(step, step * 1.0, 0.0, False)
        if schedule.due(step, step * 1.0):
            schedule.started(step, step * 1.0)
            reporter = threading.Thread(target=schedule.finished, args=(Cost(step, 0.06, 0.06),))
            reporter.start()
            reporter.join()
    assert schedule.interval == 2


def test_it_says_what_the_choice_follows_from() -> None:
    schedule = auto()
    Training(schedule, step=1.5, stall=0.12, write=0.5).run(200)
    assert schedule.explain().splitlines() == [
        "auto (budget 3%): every 3 steps",
        "  that is about 4.5 s, at an overhead of 2.67%",
        "  a step takes 1.5 s (median of 33 with no save in flight)",
        "  a save costs 120 ms: 120 ms stall, 0 s slowdown of steps beside it (medians of 9 saves)",
        "  it is durable after 620 ms: at least 1 step apart",
    ]


# Auto, for a rate of failures.


def test_where_a_save_is_cheap_beside_the_failures_dalys_interval_is_youngs() -> None:
    for ratio in (1e-6, 1e-5, 1e-4):
        assert daly_interval(ratio, 1.0) == pytest.approx(young_interval(ratio, 1.0), rel=0.01)
    assert young_interval(2.0, 100.0) == 20.0
    assert daly_interval(2.0, 1.0) == daly_interval(5.0, 1.0) == 1.0


@pytest.mark.parametrize("ratio", [0.0005, 0.01, 0.1, 0.4])
def test_the_chosen_interval_wastes_little_more_than_the_best_of_a_sweep(ratio: float) -> None:
    mtbf = 10_000.0
    cost = ratio * mtbf
    schedule = auto(mtbf=mtbf)
    Training(schedule, step=10.0, stall=cost).run_until(8)
    assert schedule.interval is not None
    chosen = schedule.interval * 10.0
    assert chosen == pytest.approx(daly_interval(cost, mtbf), abs=5.0)

    def waste(interval: float) -> float:
        return waste_under_failures(interval, cost, mtbf, work=200_000 * chosen, seed=7)

    sweep = {factor: waste(chosen * factor) for factor in (0.25, 0.5, 0.7, 0.85, 1.15, 1.3, 1.7, 2.5, 4.0)}
    assert waste(chosen) <= 1.02 * min(sweep.values())
    # The sweep is wide enough to tell: its ends are clearly worse.
    assert min(sweep[0.25], sweep[4.0]) > 1.1 * waste(chosen)


def test_an_optimum_over_the_budget_is_taken_and_said() -> None:
    schedule = auto(mtbf="1h")
    Training(schedule, stall=20.0).run_until(6)
    assert schedule.interval == round(daly_interval(20.0, 3600.0))
    assert "over the budget, taken all the same" in schedule.explain()
    assert "a failure every 1 h" in schedule.explain()
    frugal = auto(mtbf="30d")
    Training(frugal, stall=1.0).run_until(6)
    assert "over the budget" not in frugal.explain()


def test_the_optimum_is_never_shorter_than_a_save() -> None:
    schedule = auto(mtbf=60.0)
    Training(schedule, write=25.0).run_until(8)
    assert schedule.interval == 25
