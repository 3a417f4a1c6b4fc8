"""The events of a run as columns: what a crash would have lost, what went wrong, and bounds."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from everystep.checkpointer.events import Event, Failed, Opened, Phases, Restored, Saved
from everystep.view.timeline import MAX_HAPPENINGS, timeline
from support.states.shown_runs import long_story


def opened(time: float) -> Opened:
    return Opened(time=time, pid=1, host="here", mode="sync", every=1)


def saved(step: int, time: float, took: float = 1.0) -> Saved:
    phases = Phases(0.0, took, 0.0, 0.0)
    return Saved(step, time, "sync", 1000, 1100, 3, phases, stall_seconds=took)


def test_a_crash_loses_what_came_after_the_state_that_is_durable() -> None:
    found = timeline([opened(100.0), saved(10, 110.0, took=2.0), saved(20, 125.0, took=3.0)]).saves
    # Before the first save was durable everything since the start; then all since that state was captured.
    assert found.lost_seconds == [10.0, 125.0 - 108.0]
    assert found.lost_steps == [10, 10]
    assert found.captured == [108.0, 122.0]


def test_after_a_resume_only_what_came_after_it_can_be_lost() -> None:
    events: list[Event] = [
        opened(0.0),
        saved(10, 10.0),
        opened(500.0),
        Restored(10, 505.0, 1000, 2.0),
        saved(12, 509.0),
    ]
    found = timeline(events)
    assert found.saves.lost_seconds[-1] == 4.0
    assert found.saves.lost_steps[-1] == 2
    assert found.saves.training == [1, 2]
    assert (found.trainings, found.began, found.host) == (2, 500.0, "here")


def test_a_failed_save_makes_the_loss_grow() -> None:
    events: list[Event] = [
        opened(0.0),
        saved(1, 10.0),
        Failed(2, 20.0, "sync", "StorageFull", "full"),
        saved(3, 30.0),
    ]
    found = timeline(events)
    assert found.saves.lost_seconds[-1] == 21.0
    (failure,) = [item for item in found.happenings if item.kind == "failed"]
    assert (failure.tone, failure.step, failure.event) == ("bad", 2, 2)
    assert "StorageFull: full" in failure.text


def test_saves_that_failed_last_tell_what_a_crash_would_have_lost() -> None:
    full = ("sync", "StorageFull", "full")
    events: list[Event] = [
        Failed(1, 1.0, *full),  # the log begins later than the run: nothing tells since when
        opened(2.0),
        saved(10, 12.0, took=2.0),
        Failed(20, 30.0, *full),
        opened(100.0),
        Restored(10, 104.0, 1000, 2.0),
        Failed(15, 110.0, *full),
    ]
    lost = [(item.lost_seconds, item.lost_steps) for item in timeline(events).happenings]
    assert lost == [(None, None), (None, None), (20.0, 10), (None, None), (None, None), (6.0, 5)]


def test_a_clock_that_was_set_back_is_no_loss() -> None:
    found = timeline([opened(0.0), saved(1, 100.0), saved(2, 50.0)]).saves
    assert found.lost_seconds == [100.0, None]


def test_a_log_that_begins_in_the_middle_of_a_training_loses_nothing_at_first() -> None:
    found = timeline([saved(500, 100.0, took=2.0), saved(510, 110.0)]).saves
    assert (found.lost_seconds[0], found.lost_steps[0]) == (2.0, 0)


def test_going_back_is_shown() -> None:
    events: list[Event] = [opened(0.0), saved(50, 10.0), opened(20.0), Restored(40, 21.0, 1000, 1.0)]
    assert timeline(events).happenings[-1].text == "Training resumed from step 40, 10 before the newest one."


def test_later_events_follow_for_a_reader_who_has_the_first_ones() -> None:
    events = list(long_story(2400))
    whole, first = timeline(events), timeline(events[:1000])
    rest = whole.since(1000)
    assert first.saves.step + rest.saves.step == whole.saves.step
    assert first.saves.lost_seconds + rest.saves.lost_seconds == whole.saves.lost_seconds
    assert first.happenings + rest.happenings == whole.happenings
    assert rest.events == len(events)


def test_a_long_log_is_thinned_to_its_slowest_saves() -> None:
    dice = random.Random(1)
    events = [saved(step, 10.0 * step, took=dice.uniform(0.1, 0.2)) for step in range(1, 5001)]
    events[1234] = saved(1235, 12350.0, took=9.0)
    found = timeline(events, most_saves=200)
    assert len(found.saves) <= 200
    assert found.all_saves == 5000
    assert 1235 in found.saves.step
    assert (found.saves.step[0], found.saves.step[-1]) == (1, 5000)
    assert found.saves.step == sorted(found.saves.step)


def test_other_events_are_bounded_too() -> None:
    events: list[Event] = [opened(float(at)) for at in range(MAX_HAPPENINGS + 10)]
    found = timeline(events)
    assert len(found.happenings) == MAX_HAPPENINGS
    assert found.all_happenings == MAX_HAPPENINGS + 10
    assert found.happenings[-1].event == MAX_HAPPENINGS + 9


def test_metrics_of_saves_are_taken_where_a_log_has_them() -> None:
    event = structs.replace(saved(1, 10.0), metrics={"loss": 0.5})
    assert timeline([event, saved(2, 20.0)]).saves.metrics == [{"loss": 0.5}, {}]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_any_number_of_events_makes_a_timeline(count: int) -> None:
    assert timeline(list(long_story(5))[:count]).events == count
