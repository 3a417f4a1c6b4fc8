"""Turns are fair, costs are read around the right call, and one case's trouble is not another's."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from everystep_study.harness import cache, machine, runner
from everystep_study.harness.costs import cost_of
from everystep_study.harness.results import CPU_SECONDS, PEAK_NBYTES, SECONDS
from everystep_study.harness.runner import turns
from everystep_study.harness.suite import Group, Needs, Turn
from support.study.bench_results import Scripted, ScriptedSuite, quiet

MIB = 1 << 20


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_every_round_gives_each_case_one_turn_and_the_first_place_goes_around(count: int) -> None:
    rounds = [turns(count, i) for i in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert len({order[0] for order in rounds}) == count
    assert len({order[-1] for order in rounds}) == count


def test_neighbours_stay_neighbours_and_take_turns_in_going_first() -> None:
    first_of_pair = set()
    for i in range(10):
        order = turns(10, i)
        assert (order.index(0) - order.index(1)) % 10 in (1, 9)
        first_of_pair.add(order.index(0) < order.index(1))
    assert first_of_pair == {True, False}


def test_cases_are_interleaved_and_each_is_set_up_at_its_first_turn(tmp_path: Path) -> None:
    calls: list[str] = []
    suite = ScriptedSuite([Scripted(key, calls) for key in "abc"])
    found = runner.run(suite, tmp_path, quiet())
    first = [f"{what} {key}" for key in "abc" for what in ("setup", "measure", "check", "clean_up")]
    later = [
        f"{what} {'abc'[which]}" for i in (1, 2) for which in turns(3, i) for what in ("measure", "clean_up")
    ]
    assert calls == [*first, *later, "close a", "close b", "close c"]
    assert [[sample.round for sample in row.samples] for row in found.rows] == [[0, 1, 2]] * 3
    assert len(found.rows[0].values()) == 2, "the warm-up round is recorded but not timed"
    assert list(tmp_path.iterdir()) == []


def test_a_slow_warm_up_counts_as_the_first_turn(tmp_path: Path) -> None:
    calls: list[str] = []
    slow = ScriptedSuite([Scripted(key, calls) for key in "ab"], slow_seconds=0.0)
    found = runner.run(slow, tmp_path, quiet())
    assert [[sample.round for sample in row.samples] for row in found.rows] == [[1, 2]] * 2
    assert calls.count("measure a") == 2


def test_dirty_pages_are_written_before_each_clock_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    runner.run(ScriptedSuite([Scripted("a", calls)], rounds=1), tmp_path, quiet())
    assert [c for c in calls if c in ("sync", "measure a")] == ["sync", "measure a"] * 2
    calls.clear()
    runner.run(ScriptedSuite([Scripted("a", calls)], rounds=1, settle=False), tmp_path, quiet())
    assert "sync" not in calls


@pytest.mark.parametrize("where", ["setup", "measure", "check"])
def test_a_case_that_fails_is_listed_cleaned_up_and_does_not_stop_the_others(
    where: str, tmp_path: Path
) -> None:
    calls: list[str] = []
    suite = ScriptedSuite([Scripted("broken", calls, where), Scripted("b", calls)])
    broken, other = runner.run(suite, tmp_path, quiet()).rows
    assert (broken.status, broken.reason, broken.samples) == ("failed", f"OSError: cannot {where}", ())
    assert len(other.samples) == 3
    assert calls.count(f"{where} broken") == 1
    assert "close broken" in calls
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_listed_with_what_to_install(tmp_path: Path) -> None:
    calls: list[str] = []
    suite = ScriptedSuite([Scripted("absent", calls, absent="pip install absent"), Scripted("b", [])])
    absent, other = runner.run(suite, tmp_path, quiet()).rows
    assert (absent.status, absent.reason) == ("not installed", "pip install absent")
    assert other.status == "measured"
    assert calls == []


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    case = Scripted("a", [])

    def interrupt() -> None:
        raise KeyboardInterrupt

    case.work = interrupt
    with pytest.raises(KeyboardInterrupt):
        runner.run(ScriptedSuite([case]), tmp_path, quiet())
    assert list(tmp_path.iterdir()) == []


def test_a_suite_that_breaks_off_keeps_what_was_measured(tmp_path: Path) -> None:
    class Breaking(ScriptedSuite):
        def groups(self, folder: Path) -> Iterator[Group]:
            yield from super().groups(folder)
            raise OSError("gone")

    found = runner.run(Breaking([Scripted("a", [])]), tmp_path, quiet())
    assert found.problems == ("stopped early: OSError: gone",)
    assert found.rows[0].status == "measured"


def test_one_warm_load_makes_the_run_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([("cold", "fadvise")] * 2 + [("warm", "no")])
    monkeypatch.setattr(cache, "empty", lambda files: next(answers))

    class Loading(Scripted):
        def measure(self, turn: Turn) -> None:
            turn.empty_cache([])
            super().measure(turn)

    assert runner.run(ScriptedSuite([Loading("a", [])]), tmp_path, quiet()).temperature == "warm"


class TestRoom:
    def suite(self, **needs: int) -> ScriptedSuite:
        suite = ScriptedSuite([Scripted("a", [])])
        suite.needs = lambda: Needs(**needs)  # type: ignore[method-assign]
        return suite

    def test_a_disk_that_is_too_small_is_reported_before_it_is_filled(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="choose a smaller --size or another directory"):
            runner.run(self.suite(disk_nbytes=1 << 60), tmp_path, quiet())

    def test_too_little_memory_is_reported_before_it_is_filled(self, tmp_path: Path) -> None:
        with pytest.raises(MemoryError, match="choose a smaller --size"):
            runner.run(self.suite(memory_nbytes=1 << 60), tmp_path, quiet())

    def test_a_missing_directory_and_no_rounds_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="is not a directory"):
            runner.run(self.suite(), tmp_path / "nowhere", quiet())
        with pytest.raises(ValueError, match="at least one round"):
            runner.run(ScriptedSuite(rounds=0), tmp_path, quiet())

    def test_filesystem_of_a_path_is_that_of_its_own_mount(self) -> None:
        assert machine._filesystem(Path("/proc/self")) == "proc"


def test_peak_memory_is_seen_though_it_was_freed_again() -> None:
    for _ in range(2):  # the second time the kernel's mark has already been that high
        cost = cost_of(lambda: np.ones(64 * MIB, np.uint8).sum())[1]
        assert 62 * MIB <= cost[PEAK_NBYTES] <= 80 * MIB
    assert cost_of(lambda: np.ones(1024, np.uint8))[1][PEAK_NBYTES] < 8 * MIB


def test_cpu_time_counts_all_threads() -> None:
    used: list[float] = []

    def burn() -> None:
        while time.thread_time() < 0.05:
            sum(range(1000))
        used.append(time.thread_time())

    def work() -> str:
        threads = [threading.Thread(target=burn) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "done"

    done, cost = cost_of(work)
    assert done == "done"
    assert cost[CPU_SECONDS] >= 0.9 * sum(used)
    assert cost[SECONDS] > 0


def test_without_a_terminal_progress_is_lines_with_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LINE_SECONDS", 0.0)
    suite = ScriptedSuite([Scripted(key, []) for key in "ab"], rounds=3)
    console = quiet()
    runner.run(suite, tmp_path, console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 * 4
    assert "warm-up: the " in lines[0]
    assert re.search(r"round 3 of 3 \(about \d+ s left\): the [ab]$", lines[-1])


def test_hundreds_of_short_turns_are_not_hundreds_of_lines(tmp_path: Path) -> None:
    console = quiet()
    runner.run(ScriptedSuite([Scripted("a", [])], rounds=50, settle=False), tmp_path, console)
    assert isinstance(console.file, StringIO)
    assert 1 <= len(console.file.getvalue().splitlines()) < 25
