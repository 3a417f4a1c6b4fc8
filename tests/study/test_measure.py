"""Costs are read around the right thing, turns are fair, and one system's trouble is not another's."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.study import measure, states
from holdfast.study.peers import Done, Peer
from holdfast.study.results import WARM_UP, Row, summarise

MIB = 1 << 20


class Scripted(Peer):
    """A system that does what a test tells it to."""

    title = "scripted"

    def __init__(self, key: str, calls: list[str] | None = None) -> None:
        self.key = key  # type: ignore[misc]
        self.calls = [] if calls is None else calls
        self.absent: str | None = None
        self.fail_in: str = ""
        self.wrong = False
        self.paths: list[Path] = []

    def missing(self) -> str | None:
        return self.absent

    def _do(self, what: str) -> None:
        self.calls.append(f"{what} {self.key}")
        if what == self.fail_in:
            raise OSError(f"cannot {what}")

    def start(self, directory: Path, state: states.State) -> None:
        self._do("start")

    def save(self, path: Path, state: states.State) -> Done:
        assert not path.exists()
        path.write_bytes(b"x" * 4096)
        self.paths.append(path)
        self.state = state
        self._do("save")
        return Done(path)

    def load(self, saved: Done) -> Done:
        assert saved.path.exists()
        self._do("load")
        leaves = {name: array.copy() for name, array in self.state.arrays.items()}
        if self.wrong:
            next(iter(leaves.values())).reshape(-1)[0] += 1
        return Done(saved.path, leaves=leaves)

    def stop(self) -> None:
        self._do("stop")


def row(measured: measure.Measured, system: str, operation: str) -> Row:
    return next(r for r in measured.rows if (r.system, r.operation) == (system, operation))


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_every_round_gives_everyone_one_turn_and_the_first_place_goes_around(count: int) -> None:
    rounds = [measure.turns(count, i) for i in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert len({order[0] for order in rounds}) == count
    assert len({order[-1] for order in rounds}) == count


def test_neighbours_stay_neighbours_and_take_turns_in_going_first() -> None:
    first_of_pair = set()
    for i in range(10):
        order = measure.turns(10, i)
        gap = (order.index(0) - order.index(1)) % 10
        assert gap in (1, 9)
        first_of_pair.add(order.index(0) < order.index(1))
    assert first_of_pair == {True, False}


def test_systems_are_interleaved_each_round_with_a_new_file_deleted_after(
    tiny: states.State, tmp_path: Path
) -> None:
    calls: list[str] = []
    peers = [Scripted(key, calls) for key in "abc"]
    measured = measure.run_rounds(peers, tiny, tmp_path, 2)
    assert [call for call in calls if call.startswith("start")] == ["start a", "start b", "start c"]
    assert calls.index("load a") < calls.index("start b")  # nothing is prepared before its own first turn
    expected = [
        f"{what} {'abc'[which]}"
        for i in range(3)
        for which in measure.turns(3, i)
        for what in ("save", "load")
    ]
    assert [call for call in calls[:-3] if not call.startswith("start")] == expected
    assert calls[-3:] == ["stop a", "stop b", "stop c"]
    for peer in peers:
        assert len(set(peer.paths)) == 3
        assert len({path.parent for path in peer.paths}) == 3
        assert list((tmp_path / peer.key).iterdir()) == []
        for operation in ("save", "load"):
            assert [s.round for s in row(measured, peer.key, operation).samples] == [0, 1, 2]


def test_what_others_left_dirty_is_written_before_each_clock_starts(
    tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    measure.run_rounds([Scripted("a", calls)], tiny, tmp_path, 1)
    assert calls == ["start a", *["sync", "save a", "sync", "load a"] * 2, "stop a"]


def test_the_warm_up_round_is_recorded_but_not_timed(tiny: states.State, tmp_path: Path) -> None:
    measured = measure.run_rounds([Scripted("a")], tiny, tmp_path, 2)
    (save,) = [r for r in summarise(measured.rows, tiny.nbytes) if r.operation == "save"]
    assert {s.round for s in save.samples} - {s.round for s in save.timed} == {WARM_UP}
    assert save.summary is not None


def test_progress_is_told_before_each_operation(tiny: states.State, tmp_path: Path) -> None:
    told: list[tuple[int, str, str]] = []
    measure.run_rounds([Scripted("a")], tiny, tmp_path, 1, lambda *what: told.append(what))
    assert told == [(i, "scripted", what) for i in (0, 1) for what in ("save", "load")]


def test_what_is_not_installed_is_listed_with_its_reason(tiny: states.State, tmp_path: Path) -> None:
    absent = Scripted("absent")
    absent.absent = "pip install absent"
    measured = measure.run_rounds([absent, Scripted("b")], tiny, tmp_path, 1)
    for operation in ("save", "load"):
        listed = row(measured, "absent", operation)
        assert (listed.status, listed.reason, listed.samples) == ("not installed", "pip install absent", ())
        assert row(measured, "b", operation).status == "measured"
    assert absent.calls == []


@pytest.mark.parametrize("where", ["start", "save", "load"])
def test_a_system_that_fails_is_listed_cleaned_up_and_does_not_stop_the_others(
    where: str, tiny: states.State, tmp_path: Path
) -> None:
    broken = Scripted("broken")
    broken.fail_in = where
    measured = measure.run_rounds([broken, Scripted("b")], tiny, tmp_path, 2)
    listed = row(measured, "broken", "save")
    assert (listed.status, listed.reason) == ("failed", f"OSError: cannot {where}")
    assert listed.summary is None
    assert len(row(measured, "b", "save").samples) == 3
    assert [call for call in broken.calls if call.startswith(where)] == [f"{where} broken"]
    assert broken.calls[-1] == "stop broken"
    assert list((tmp_path / "broken").iterdir()) == []


def test_a_system_that_loads_something_else_has_failed(tiny: states.State, tmp_path: Path) -> None:
    liar = Scripted("liar")
    liar.wrong = True
    listed = row(measure.run_rounds([liar], tiny, tmp_path, 1), "liar", "load")
    assert listed.status == "failed"
    assert "something else than was saved" in listed.reason


def test_one_warm_load_makes_the_run_warm(
    tiny: states.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([("cold", "fadvise")] * 3 + [("warm", "no")])
    monkeypatch.setattr(measure.cache, "chill", lambda files: next(answers))
    assert measure.run_rounds([Scripted("a")], tiny, tmp_path, 3).temperature == "warm"


def test_a_system_with_clocks_of_its_own_is_believed(tiny: states.State, tmp_path: Path) -> None:
    class Own(Scripted):
        cost_is_ours = False

        def save(self, path: Path, state: states.State) -> Done:
            super().save(path, state)
            return Done(path, seconds=12.5, cpu_seconds=3.5)

    measured = measure.run_rounds([Own("own")], tiny, tmp_path, 1)
    for sample in row(measured, "own", "save").samples:
        assert (sample.seconds, sample.cpu_seconds, sample.peak_growth_nbytes) == (12.5, 3.5, None)
    for sample in row(measured, "own", "load").samples:
        assert sample.cpu_seconds is None


def test_peak_memory_is_seen_though_it_was_freed_again() -> None:
    def greedy() -> None:
        np.ones(64 * MIB, np.uint8)

    def modest() -> None:
        np.ones(1024, np.uint8)

    for _ in range(2):  # the second time the kernel's mark has already been that high
        _, cost = measure.cost_of(greedy)
        assert cost.peak_growth_nbytes is not None
        assert 62 * MIB <= cost.peak_growth_nbytes <= 80 * MIB
    _, cost = measure.cost_of(modest)
    assert cost.peak_growth_nbytes is not None
    assert cost.peak_growth_nbytes < 8 * MIB


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

    result, cost = measure.cost_of(work)
    assert result == "done"
    assert cost.cpu_seconds >= 0.9 * sum(used)
