"""The suite of several ranks: real ranks once, at a tiny size; everything else from made-up results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from everystep_study.harness import runner
from everystep_study.harness.results import Result, Row, from_json
from everystep_study.suites.ranks import RanksSuite, best_writers, visits, written_at
from everystep_study.workers import processes as workers
from everystep_study.workers import rank_orders
from everystep_study.workers.processes import Ranks, TimeUp, WorkerEnded
from everystep_study.workers.rank_orders import seconds_of
from support.processes.command import command
from support.study.bench_results import answer, quiet, result, row, text_of

GB = 1_000_000_000


def made_up(*, off: float = 0.0, apart: float = 0.1, copies: float = 1.0001, nbytes: float = GB) -> Result:
    """Four ranks are as fast as the device, and two of them are enough for that."""
    disk = {"writing_ranks": 4.0, "shares_percent": apart, "nbytes_off": off, "copies": copies}
    rows = [
        row("save", "raw", "4", seconds=1.0),
        row("save", "everystep-recycled", "4", seconds=1.0, **disk),
        row("save", "everystep", "4", seconds=1.25, **disk),
        row("save", "torch", "4", seconds=2.5, writing_ranks=1.0, shares_percent=400.0, copies=1.0),
        *(
            row("writers", f"writers-{n}", "4", seconds=(s, s, 1.1 * s))
            for n, s in ((1, 1.3), (2, 1.0), (3, 1.1))
        ),
        Row("load", "4 -> 1", "dcp", "torch DCP", "failed", "rank 0: OSError: gone"),
    ]
    # Made-up warm-up rounds have ten times the readings; what is on the disk is the same in every round.
    rows = [msgspec.structs.replace(r, samples=r.samples[1:]) for r in rows]
    return result(*rows, facts={"state_nbytes": nbytes, "most_ranks": 4})


def verdicts(found: Result) -> dict[str, str]:
    return {bar.key: bar.verdict for bar in RanksSuite().bars(found)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    picture = tmp_path / "ranks.svg"
    folder = tmp_path / "folder"
    folder.mkdir()
    options = ("--ranks", "2,1", "--size", "4M", "--rounds", "1", "--plot", picture, "--json")
    outcome = command("bench", folder, *options)
    assert outcome.code == 0, outcome.err + outcome.out
    found = from_json(outcome.out.encode())
    assert {(row.status, row.reason) for row in found.rows} == {("measured", "")}
    systems = ["raw", "everystep-recycled", "everystep", "dcp", "torch"]
    assert [(row.group, row.case) for row in found.section("save")] == [
        (group, system) for group in ("1", "2") for system in systems
    ]
    assert [row.case for row in found.section("writers")] == ["writers-1", "writers-2"]
    assert len({row.group for row in found.section("load")}) == 3
    # One copy, shared out; rank 0's torch.save is not.
    for system in ("everystep-recycled", "everystep"):
        written = found.row("save", system, "2")
        assert written is not None
        assert (written.peak("nbytes_off"), written.peak("writing_ranks")) == (0, 2)
    alone = found.row("save", "torch", "2")
    assert alone is not None
    assert alone.median("writing_ranks") == 1
    assert picture.stat().st_size > 0
    assert list(folder.iterdir()) == []


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_named_and_takes_the_others_with_it(tmp_path: Path) -> None:
    with Ranks(2, 3 << 20, tmp_path, 120.0) as ranks:
        ranks.start()
        pids = ranks.pids
        os.kill(pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # gone, so that the other can only miss it
        with pytest.raises(WorkerEnded, match="rank 1 was ended by signal 9"):
            ranks.open("everystep-recycled")
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_no_rank_is_waited_for_after_the_end(tmp_path: Path) -> None:
    with pytest.raises(TimeUp):
        Ranks(1, 1 << 20, tmp_path, 600.0, end=time.monotonic()).open("everystep")


class FakeChild:
    """Stands in for the process of a rank that does not end."""

    def finish(self) -> None: ...

    def has_ended_well(self, seconds: float) -> bool:
        return False

    def kill(self) -> None: ...


class FakeRanks(Ranks):
    """Stands in for ranks: saves write a file, and one system kills its rank."""

    starts = 0
    opened: ClassVar[list[str]] = []

    def _start(self) -> Iterator[Any]:
        type(self).starts += 1
        self._starts += 1
        self._prepared.clear()
        yield from (FakeChild() for _ in range(self.size))

    def _prepare(self) -> None: ...

    def _tell(self, order: Any, seconds: float, arguments: Any, own: Any = ()) -> list[dict[str, Any]]:
        if order is rank_orders.open_mechanism:
            self.opened.append(arguments["directory"])
        if order is rank_orders.save:
            Path(arguments["directory"], "0").write_bytes(b"x")
            if arguments["mechanism"] == "dcp":
                self.kill()
                raise WorkerEnded("rank 1 was ended by signal 9")
        return [answer(1.0 + rank, 2.0 + rank) for rank in range(self.size)]


def test_a_system_that_fails_is_out_and_new_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everystep_study.suites.ranks.Ranks", FakeRanks)
    monkeypatch.setattr(FakeRanks, "starts", 0)
    monkeypatch.setattr(FakeRanks, "opened", [])
    suite = RanksSuite((2,), 2 << 20, systems=("raw", "everystep-recycled", "everystep", "dcp"), timeout=5.0)
    found = runner.run(suite, tmp_path, quiet())
    rows = {(row.section, row.case): row for row in found.rows}
    assert found.problems == ("2 ranks: rank 0 did not end well",)
    assert len(FakeRanks.opened) == len(set(FakeRanks.opened)), "new ranks have directories of their own"
    assert FakeRanks.starts > 1
    assert rows["save", "dcp"].reason == "WorkerEnded: rank 1 was ended by signal 9"
    assert rows["load", "dcp"].reason == "RuntimeError: there is nothing to load: it could not be saved"
    for section in ("save", "load"):  # from the first beginning to the last end
        assert rows[section, "everystep"].values() == [2.0, 2.0, 2.0]
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_cannot_be_started_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def start(self: Ranks) -> Iterator[Any]:
        tries.append(self.size)
        raise WorkerEnded("rank 0 ended with exit code 1: no torch")

    monkeypatch.setattr(workers.Ranks, "_start", start)
    found = runner.run(RanksSuite((1, 2), 2 << 20, rounds=2, timeout=5.0), tmp_path, quiet())
    assert tries == [1, 2]  # and no ranks are started to load what was not saved
    assert {row.status for row in found.rows} == {"failed"}
    assert any("2 ranks could not be started: rank 0 ended" in row.reason for row in found.rows)


def test_worlds_come_in_an_order_in_which_there_is_something_to_load() -> None:
    assert [(v.world, v.saves, v.loads) for v in visits((1, 2, 4))] == [
        (1, True, ()),
        (4, True, (4, 1)),
        (2, True, (4,)),
        (1, False, (4,)),
    ]
    assert [(v.world, v.saves, v.loads) for v in visits((3,))] == [(3, True, (3,))]


def test_an_operation_lasts_from_the_first_beginning_to_the_last_end() -> None:
    assert seconds_of([answer(1.0, 2.0), answer(0.5, 3.0)]) == 2.5
    assert seconds_of([answer(1.0, 9.0, own=0.25), answer(0.0, 9.0)]) == 0.25


def test_the_report_says_what_was_found() -> None:
    text = text_of(RanksSuite(), made_up())
    for words in (
        "the everystep, 4 0.80 0.80-0.80 0.80 \N{EN DASH} 1.00 0.10 % 1.000",
        "the torch, 4 0.40 0.40-0.40 0.40 \N{EN DASH} 2.00 1 of 4 1.000",
        "best here",
        "torch DCP: failed. rank 0: OSError: gone",
        "4 ranks share 2 CPUs here",
    ):
        assert words in text
    assert best_writers(made_up()) == ("writers-2", {"writers-2", "writers-3"})


def test_uneven_shares_and_bytes_written_twice_break_a_promise() -> None:
    assert verdicts(made_up()) == {"shares": "PASS", "each-byte-once": "PASS", "one-copy": "PASS"}
    assert verdicts(made_up(apart=4.0))["shares"] == "FAIL"
    twice = verdicts(made_up(off=float(GB), copies=2.0))
    assert twice == {"shares": "PASS", "each-byte-once": "FAIL", "one-copy": "FAIL"}


def test_promises_about_percents_are_not_made_for_tiny_states() -> None:
    tiny = verdicts(made_up(off=8.0, apart=4.0, nbytes=4e6))
    assert tiny == {"shares": "not measured", "each-byte-once": "FAIL", "one-copy": "not measured"}


def test_shares_are_read_from_the_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert written_at(tmp_path / "file", 2) == ([100, 0], 100)
    (tmp_path / "dcp").mkdir()
    for name, count in (("__0_0.distcp", 30), ("__1_0.distcp", 50), (".metadata", 5)):
        (tmp_path / "dcp" / name).write_bytes(b"x" * count)
    assert written_at(tmp_path / "dcp", 2) == ([35, 50], 85)
