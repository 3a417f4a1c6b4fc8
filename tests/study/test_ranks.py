"""The suite of several ranks: real ranks once, at a tiny size; everything else from made-up results."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from everystep_study import runner, world
from everystep_study.rank import Answer, Order
from everystep_study.results import Result, Row, from_json
from everystep_study.suites.ranks import RanksSuite, best_writers, visits, written_at
from everystep_study.world import RankEnded, World, seconds_of
from support.processes.command import command
from support.study.bench_results import quiet, result, row, text_of

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
    with World(2, 3 << 20, tmp_path, timeout=120.0) as ranks:
        pids = ranks.pids
        os.kill(pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # gone, so that the other can only miss it
        with pytest.raises(RankEnded, match="rank 1 was ended by signal 9"):
            ranks.tell(Order("prepare", "everystep-recycled", str(tmp_path)))
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_no_rank_is_waited_for_after_the_end(tmp_path: Path) -> None:
    with pytest.raises(RankEnded, match="rank 0 did not answer within 0 s"):
        World(1, 1 << 20, tmp_path, timeout=600.0, end=time.monotonic())


class FakeWorld:
    """Stands in for ranks: saves write a file, and one system kills its rank."""

    started = 0
    prepared: ClassVar[list[str]] = []

    def __init__(self, size: int, nbytes: int, logs: Path, timeout: float, end: float) -> None:
        type(self).started += 1
        self.size = size

    def tell(self, order: Order) -> list[Answer]:
        if order.do == "prepare":
            self.prepared.append(order.path)
        if order.do == "save":
            Path(order.path).write_bytes(b"x")
            if order.peer == "dcp":
                raise RankEnded("rank 1 was ended by signal 9")
        return [Answer(1.0 + rank, 2.0 + rank, path=order.path) for rank in range(self.size)]

    def stop(self) -> None:
        raise RankEnded("rank 0 did not answer within 5 s")

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_a_system_that_fails_is_out_and_a_new_world_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "World", FakeWorld)
    monkeypatch.setattr(FakeWorld, "started", 0)
    monkeypatch.setattr(FakeWorld, "prepared", [])
    suite = RanksSuite((2,), 2 << 20, systems=("raw", "everystep-recycled", "everystep", "dcp"), timeout=5.0)
    found = runner.run(suite, tmp_path, quiet())
    rows = {(row.section, row.case): row for row in found.rows}
    assert found.problems == ("2 ranks did not end well: rank 0 did not answer within 5 s",)
    assert len(FakeWorld.prepared) == len(set(FakeWorld.prepared)), "a new world has directories of its own"
    assert FakeWorld.started > 1
    assert rows["save", "dcp"].reason == "RankEnded: rank 1 was ended by signal 9"
    assert rows["load", "dcp"].reason == "RuntimeError: there is nothing to load: it could not be saved"
    for section in ("save", "load"):  # from the first beginning to the last end
        assert rows[section, "everystep"].values() == [2.0, 2.0, 2.0]
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_cannot_be_started_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def start(size: int, *more: object) -> None:
        tries.append(size)
        raise RankEnded("rank 0 ended with exit code 1: no torch")

    monkeypatch.setattr(world, "World", start)
    found = runner.run(RanksSuite((1, 2), 2 << 20, rounds=2, timeout=5.0), tmp_path, quiet())
    assert tries == [1, 2]  # and no world is started to load what was not saved
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
    assert seconds_of([Answer(1.0, 2.0), Answer(0.5, 3.0)]) == 2.5
    assert seconds_of([Answer(1.0, 9.0, seconds=0.25), Answer(0.0, 9.0)]) == 0.25


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
