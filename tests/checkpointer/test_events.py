"""The diary of a run: complete while it can be, and never in the way of a save."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everystep.checkpointer import events
from everystep.checkpointer.events import (
    EVENTS_NAME,
    MAX_LINE_NBYTES,
    OLDER_NAME,
    Event,
    EventLog,
    Failed,
    Opened,
    PassedOver,
    Phases,
    Preempted,
    Restored,
    Saved,
    read_events,
)
from everystep.errors import CheckpointNotFound

ONE_OF_EACH: tuple[Event, ...] = (
    Opened(time=1.5, pid=77, host="node-3", mode="overlap", every="auto"),
    Restored(step=3, time=2.0, nbytes=10**9, seconds=0.5),
    PassedOver(step=4, time=2.5, reason="digest differs"),
    Saved(
        step=4,
        time=3.0,
        mode="overlap",
        nbytes=2 * 10**9,
        stored_nbytes=2 * 10**9 + 4096,
        leaves=12,
        seconds=Phases(stage=0.1, write=0.7, sync=0.15, commit=0.05),
        stall_seconds=0.1,
        in_place_nbytes=19 * 10**8,
        copied_nbytes=10**8,
    ),
    Failed(step=5, time=4.0, mode="overlap", error="StorageFull", message="no room", stall_seconds=0.2),
    Preempted(step=6, time=5.0, signal="SIGTERM"),
)


def restored(step: int) -> Restored:
    return Restored(step=step, time=float(step), nbytes=1, seconds=0.1)


def steps(run: Path) -> list[int]:
    found, _ = read_events(run)
    return [event.step for event in found if not isinstance(event, Opened)]


def lines(run: Path) -> list[bytes]:
    return (run / EVENTS_NAME).read_bytes().splitlines()


def add_all(log: EventLog, steps: Iterable[int]) -> None:
    for step in steps:
        log.add(restored(step))


def write_all(run: Path, *added: Event) -> None:
    log = EventLog(run)
    for event in added:
        log.add(event)
    log.close()


def test_what_is_added_is_read_back_equal(tmp_path: Path) -> None:
    write_all(tmp_path, *ONE_OF_EACH)
    assert read_events(tmp_path) == (list(ONE_OF_EACH), 0)


def test_each_event_is_one_line_of_json_that_says_what_it_is(tmp_path: Path) -> None:
    write_all(tmp_path, *ONE_OF_EACH)
    documents = [json.loads(line) for line in lines(tmp_path)]
    names = ["opened", "restored", "passed_over", "saved", "failed", "preempted"]
    assert [document["event"] for document in documents] == names
    assert documents[3]["seconds"] == {"stage": 0.1, "write": 0.7, "sync": 0.15, "commit": 0.05}


def test_speed_counts_every_phase() -> None:
    saved = ONE_OF_EACH[3]
    assert isinstance(saved, Saved)
    assert saved.seconds.total == pytest.approx(1.0)
    assert saved.gb_per_second == pytest.approx(2.0)
    instant = msgspec.structs.replace(saved, seconds=Phases(stage=0.0, write=0.0, sync=0.0, commit=0.0))
    assert instant.gb_per_second == 0.0


def test_a_second_log_appends_and_nothing_is_written_before_something_happens(tmp_path: Path) -> None:
    EventLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    write_all(tmp_path, restored(1))
    write_all(tmp_path, restored(2))
    assert steps(tmp_path) == [1, 2]


def test_without_a_run_nothing_is_written() -> None:
    log = EventLog(None)
    log.add(restored(1))
    assert (list(log), log.path, log.broken) == ([restored(1)], None, None)
    log.close()


def test_the_latest_thousand_are_at_hand(tmp_path: Path) -> None:
    log = EventLog(None)
    add_all(log, range(1500))
    assert len(log) == 1000
    assert (log[0], log[-1]) == (restored(500), restored(1499))
    assert log[-2:] == [restored(1498), restored(1499)]
    assert [event.step for event in log if isinstance(event, Restored)] == list(range(500, 1500))
    with pytest.raises(IndexError):
        log[1000]


# What crashes and other programs leave in the file.


@pytest.mark.parametrize("whole", [0, 2])
def test_wherever_a_crash_tore_the_last_line_the_next_writer_starts_a_new_one(
    whole: int, tmp_path: Path
) -> None:
    write_all(tmp_path, *map(restored, range(whole + 1)))
    path = tmp_path / EVENTS_NAME
    written = path.read_bytes()
    last = len(written.splitlines()[-1])
    for lost in range(last + 2):
        path.write_bytes(written[: len(written) - lost])
        write_all(tmp_path, restored(100), restored(101))
        # One byte less is only the newline: that line is whole.
        kept = range(whole + 1 if lost <= 1 else whole)
        found, skipped = read_events(tmp_path)
        assert found == [restored(step) for step in (*kept, 100, 101)]
        assert skipped == (1 < lost <= last)


@pytest.mark.parametrize(
    "foreign",
    [
        b"not json",
        b"\x00" * 512,
        b"\xff\xfe",
        b"{}",
        b"[]",
        b"null",
        b'{"event":"invented","step":1}',
        b'{"event":"restored","step":"one","time":1.0,"nbytes":1,"seconds":1.0}',
        b'{"event":"restored","step":1}',
        b'{"event":"restored","step":-1,"time":1.0,"nbytes":1,"seconds":1.0}',
        b'{"event":"restored","step":1' + b"0" * 400 + b',"time":1.0,"nbytes":1,"seconds":1.0}',
        b'{"event":"restored","step":1,"time":1.0,"nbytes":1,"seconds":1e308}',
        b'{"event":"restored","x":' + b"[" * 60_000,
        b"x" * (MAX_LINE_NBYTES + 1),
        b"x" * (3 * MAX_LINE_NBYTES),
    ],
    ids=lambda line: repr(line[:24]),
)
def test_a_line_that_is_no_event_is_passed_over_and_counted(foreign: bytes, tmp_path: Path) -> None:
    write_all(tmp_path, restored(1))
    with open(tmp_path / EVENTS_NAME, "ab") as file:
        file.write(foreign + b"\n\n  \n")
    write_all(tmp_path, restored(2))
    with open(tmp_path / EVENTS_NAME, "ab") as file:
        file.write(foreign)
    found, skipped = read_events(tmp_path)
    assert (found, skipped) == ([restored(1), restored(2)], 2)


def test_fields_of_a_later_version_do_not_hide_an_event(tmp_path: Path) -> None:
    (tmp_path / EVENTS_NAME).write_bytes(
        b'{"event":"restored","step":1,"time":1.0,"nbytes":1,"seconds":0.1,"new":{"a":[1]}}\n'
    )
    assert read_events(tmp_path) == ([restored(1)], 0)


def test_a_giant_line_takes_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    with open(tmp_path / EVENTS_NAME, "wb") as file:
        file.truncate(64 << 20)  # zeros without a single newline, and without taking space
    tracemalloc.start()
    try:
        assert read_events(tmp_path) == ([], 1)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    assert read_events(tmp_path) == ([], 0)
    with pytest.raises(CheckpointNotFound, match="elsewhere"):
        read_events(tmp_path / "elsewhere")


def test_text_that_is_not_utf8_or_very_long_is_still_logged(tmp_path: Path) -> None:
    odd = Failed(step=1, time=0.0, mode="sync", error="SaveFailed", message="at /runs/\udcff")
    long = PassedOver(step=2, time=0.0, reason="\N{SNOWMAN}" * 100_000)
    write_all(tmp_path, odd, long)
    found, skipped = read_events(tmp_path)
    assert skipped == 0
    assert isinstance(found[0], Failed)
    assert found[0].message == "at /runs/\\udcff"
    assert isinstance(found[1], PassedOver)
    assert found[1].reason == "\N{SNOWMAN}" * 4000


# Size.


def test_a_log_that_has_grown_too_large_makes_way_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LOG_NBYTES", 500)
    log = EventLog(tmp_path)
    for step in range(100):
        log.add(restored(step))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1300
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([EVENTS_NAME, OLDER_NAME])
    told = steps(tmp_path)
    assert told == list(range(100 - len(told), 100))
    assert len(told) > 6  # the older generation is read too


def test_a_log_found_too_large_makes_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, *map(restored, range(20)))
    monkeypatch.setattr(events, "MAX_LOG_NBYTES", 500)
    write_all(tmp_path, restored(20))
    assert len(lines(tmp_path)) == 1
    assert steps(tmp_path) == list(range(21))


def test_a_log_rotated_while_it_is_read_is_not_read_twice(tmp_path: Path) -> None:
    write_all(tmp_path, restored(1))
    os.link(tmp_path / EVENTS_NAME, tmp_path / OLDER_NAME)
    assert steps(tmp_path) == [1]


# Trouble with the file.


def test_a_run_that_cannot_be_written_is_said_once_and_remembered(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "missing")
    with pytest.warns(RuntimeWarning, match=r"missing/events\.jsonl.*Saves go on") as said:
        add_all(log, range(3))
    assert len(said) == 1
    assert isinstance(log.broken, FileNotFoundError)
    assert len(log) == 3
    # When the place comes back, so do the lines.
    (tmp_path / "missing").mkdir()
    log.add(restored(3))
    log.close()
    assert steps(tmp_path / "missing") == [3]


def test_a_full_disk_neither_raises_nor_joins_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    answers: list[Any] = [None, 10, OSError(errno.ENOSPC, "No space left on device"), None, None]

    def write(file: int, data: bytes) -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return real(file, data[:answer])

    monkeypatch.setattr(os, "write", write)
    log = EventLog(tmp_path)
    with pytest.warns(RuntimeWarning, match="only 10 of") as said:
        add_all(log, range(5))
    log.close()
    assert len(said) == 1
    assert isinstance(log.broken, OSError)
    assert log.broken.errno == errno.ENOSPC
    monkeypatch.undo()
    found, skipped = read_events(tmp_path)
    assert found == [restored(0), restored(3), restored(4)]
    assert skipped == 1


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_something_that_is_no_file_in_its_place_is_no_reason_to_wait(kind: str, tmp_path: Path) -> None:
    path = tmp_path / EVENTS_NAME
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    log = EventLog(tmp_path)
    with pytest.warns(RuntimeWarning, match="events are not written"):
        log.add(restored(1))
    assert log.broken is not None


def test_where_warnings_are_errors_a_save_is_not_failed_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "missing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add(restored(1))
    assert "everystep: events are not written" in capsys.readouterr().err


def test_after_close_nothing_is_written_but_it_is_remembered(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.add(restored(1))
    log.close()
    log.close()
    log.add(restored(2))
    assert list(log) == [restored(1), restored(2)]
    assert steps(tmp_path) == [1]


# Subscribers.


def test_subscribers_hear_everything_until_they_leave() -> None:
    log = EventLog(None)
    heard: list[Event] = []
    leave = log.subscribe(heard.append)
    leave_second = log.subscribe(heard.append)
    log.add(restored(1))
    leave()
    leave()
    log.add(restored(2))
    leave_second()
    log.add(restored(3))
    assert heard == [restored(1), restored(1), restored(2)]


def test_a_subscriber_that_fails_is_named_and_does_not_stop_others(tmp_path: Path) -> None:
    def careless(event: Event) -> None:
        raise KeyError("oops")

    log = EventLog(tmp_path)
    heard: list[Event] = []
    log.subscribe(careless)
    log.subscribe(heard.append)
    with pytest.warns(RuntimeWarning, match=r"careless failed on Restored, KeyError: 'oops'"):
        log.add(restored(1))
    log.close()
    assert heard == [restored(1)]
    assert steps(tmp_path) == [1]


def test_a_subscriber_may_use_the_log() -> None:
    log = EventLog(None)

    def curious(event: Event) -> None:
        leave()
        assert log[-1] == event
        log.add(restored(2))

    leave = log.subscribe(curious)
    log.add(restored(1))
    assert list(log) == [restored(1), restored(2)]


# Threads and processes.


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    ready = threading.Barrier(4)

    def add(first: int) -> None:
        ready.wait(120)
        add_all(log, range(first, first + 200))

    threads = [threading.Thread(target=add, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    log.close()
    found, skipped = read_events(tmp_path)
    assert skipped == 0
    assert found == list(log)
    assert sorted(steps(tmp_path)) == [1000 * number + step for number in range(4) for step in range(200)]


def in_a_child(act: Any) -> int:
    """The exit code of a forked child that does `act`: 0 when it returns true."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing_even_when_the_fork_came_in_the_middle_of_an_event(
    tmp_path: Path,
) -> None:
    log = EventLog(tmp_path)
    log.add(restored(1))
    heard: list[Event] = []
    log.subscribe(heard.append)

    def act() -> bool:
        log.add(restored(2))
        log.subscribe(heard.append)()
        remembered = list(log)
        log.close()
        return remembered == [restored(1)] and heard == []

    with log._lock:  # as another thread would hold it
        assert in_a_child(act) == 0
    log.add(restored(3))
    log.close()
    assert steps(tmp_path) == [1, 3]
    assert heard == [restored(3)]


def test_metrics_are_written_with_the_save_and_read_back_exactly(tmp_path: Path) -> None:
    (event,) = (event for event in ONE_OF_EACH if isinstance(event, Saved))
    told = msgspec.structs.replace(event, metrics={"loss": 0.1, "norm": math.inf, "low": -math.inf})
    write_all(tmp_path, told, msgspec.structs.replace(event, metrics={"loss": math.nan}))
    (first, second), skipped = read_events(tmp_path)
    assert (first, skipped) == (told, 0)
    assert isinstance(second, Saved)
    assert math.isnan(second.metrics["loss"])


def test_more_metrics_than_a_line_may_have_do_not_cost_the_event(tmp_path: Path) -> None:
    (event,) = (event for event in ONE_OF_EACH if isinstance(event, Saved))
    write_all(tmp_path, msgspec.structs.replace(event, metrics={f"m{n}" * 10: float(n) for n in range(5000)}))
    assert read_events(tmp_path) == ([event], 0)
