"""``holdfast bench --ranks``: real ranks once, at a tiny size; everything else from made-up results."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from rich.console import Console

from holdfast.study.ranks import bars, bench, measure, plot
from holdfast.study.ranks.orders import Did, Order, Prepare, Save
from holdfast.study.ranks.report import from_json, render, to_json
from holdfast.study.ranks.results import RanksResult, Row, Written, summarise
from holdfast.study.ranks.shares import written_at
from holdfast.study.ranks.world import RankEnded, World, seconds_of
from holdfast.study.results import DCP, HOLDFAST, RAW, RECYCLED, TORCH, Machine
from support.command import command

GB = 1_000_000_000


def row(system: str, world: int, seconds: float, kind: str = "save", **more: object) -> Row:
    title = {RAW: "raw device limit", RECYCLED: "Checkpointer", HOLDFAST: "holdfast.save"}.get(system, system)
    rounds = (seconds * 0.9, seconds, seconds * 1.1)
    return msgspec.structs.replace(
        Row(kind, world, system, title, "measured", seconds=rounds),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def made_up(*, shares: tuple[int, ...] = (GB // 4,) * 4, nbytes: int = GB) -> RanksResult:
    """Four ranks are as fast as the device, and two of them are enough for that."""
    written = Written(shares, sum(shares) + 100_000)
    rows = [
        row(RAW, 1, 1.0, written=Written((GB,), GB)),
        row(RECYCLED, 1, 1.25, written=Written((GB,), GB)),
        row(RAW, 4, 1.0, written=Written((GB, 0, 0, 0), GB)),
        row(RECYCLED, 4, 1.0, written=written),
        row(HOLDFAST, 4, 1.25, written=written),
        row(DCP, 4, 5.0, written=Written((GB // 4,) * 4, GB)),
        row(TORCH, 4, 2.5, written=Written((GB, 0, 0, 0), GB)),
        *(row(f"writers-{n}", 4, s, "writers", writers=n) for n, s in enumerate((1.3, 1.0, 1.1, 1.2), 1)),
        row(RAW, 1, 1.0, "load", saved_by=4),
        row(HOLDFAST, 1, 2.0, "load", saved_by=4),
        Row("load", 1, DCP, "dcp.save + fsync", "failed", "rank 0: OSError: gone", saved_by=4),
    ]
    machine = Machine("somewhere", 2, 0.0, "ext4", {})
    result = RanksResult(
        created=0.0,
        seconds=60.0,
        directory="/somewhere",
        ranks=(1, 4),
        state_nbytes=nbytes,
        state_leaves=64,
        rounds=3,
        temperature="cold",
        cache_method="drop_caches",
        machine=machine,
        rows=summarise(rows, nbytes),
    )
    return msgspec.structs.replace(result, bars=bars.judge(result))


def text_of(result: RanksResult) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140).print(render(result))
    return stream.getvalue()


def verdicts(result: RanksResult) -> dict[str, str]:
    return {bar.key: bar.verdict for bar in result.bars}


@pytest.mark.timeout(600)
def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    picture = tmp_path / "ranks.svg"
    room = tmp_path / "room"
    room.mkdir()
    options = ("--ranks", "2,1", "--size", "4M", "--rounds", "1", "--plot", picture, "--json")
    outcome = command("bench", room, *options)
    assert outcome.code == 0, outcome.err + outcome.out
    found = from_json(outcome.out.encode())
    assert [row.reason for row in found.rows if row.reason] == []
    assert found.ranks == (1, 2)
    assert [(row.world, row.system) for row in found.of("save")] == [
        (world, system) for world in (1, 2) for system in (RAW, RECYCLED, HOLDFAST, DCP, TORCH)
    ]
    assert [(row.world, row.writers) for row in found.of("writers")] == [(2, 1), (2, 2)]
    assert found.best_writers in (1, 2)
    loads = {(row.saved_by, row.world) for row in found.of("load")}
    assert loads == {(2, 1), (2, 2), (1, 2)}
    # One copy, shared out; rank 0's torch.save is not.
    by_key = {(row.world, row.system): row.written for row in found.of("save")}
    for system in (RECYCLED, HOLDFAST):
        written = by_key[2, system]
        assert written is not None
        assert sum(written.per_rank) == found.state_nbytes
        assert abs(written.per_rank[0] - written.per_rank[1]) <= 64 << 10
    alone = by_key[2, TORCH]
    assert alone is not None
    assert alone.per_rank[1] == 0
    assert verdicts(found)["each-byte-once"] == "PASS"
    assert all(row.summary is not None and len(row.seconds) == 1 for row in found.rows)
    assert picture.stat().st_size > 0
    assert list(room.iterdir()) == []


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_named_and_takes_the_others_with_it(tmp_path: Path) -> None:
    with World(2, 3 << 20, tmp_path, timeout=120.0) as world:
        pids = world.pids
        os.kill(pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # gone, so that the other can only miss it
        with pytest.raises(RankEnded, match="rank 1 was ended by signal 9"):
            world.tell(Prepare(RECYCLED, str(tmp_path)))
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


class FakeWorld:
    """Stands in for ranks: saves write a file, and one system kills its rank."""

    started = 0
    prepared: ClassVar[list[str]] = []

    def __init__(self, size: int, nbytes: int, logs: Path, timeout: float) -> None:
        type(self).started += 1
        self.size = size

    def tell(self, order: Order) -> list[Did]:
        if isinstance(order, Prepare):
            self.prepared.append(order.directory)
        if isinstance(order, Save):
            Path(order.path).write_bytes(b"x")
            if order.system == DCP:
                raise RankEnded("rank 1 was ended by signal 9")
        return [Did(1.0 + rank, 2.0 + rank) for rank in range(self.size)]

    def stop(self) -> None:
        raise RankEnded("rank 0 did not answer within 5 s")

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_a_system_that_fails_is_out_and_a_new_world_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "World", FakeWorld)
    monkeypatch.setattr(FakeWorld, "prepared", [])
    meter = measure.Meter(
        1000, tmp_path, ranks=(2,), rounds=3, systems=(RAW, RECYCLED, HOLDFAST, DCP), timeout=5.0
    )
    rows = {(row.kind, row.system): row for row in meter.run()}
    assert FakeWorld.started == 2
    assert meter.problems == ["2 ranks did not end well: rank 0 did not answer within 5 s"]
    assert len(FakeWorld.prepared) == len(set(FakeWorld.prepared)), "a new world has directories of its own"
    assert rows["save", DCP].status == "failed"
    assert rows["save", DCP].reason == "rank 1 was ended by signal 9"
    assert rows["load", DCP].reason == "there is nothing to load: it could not be saved"
    assert rows["save", HOLDFAST].seconds == (2.0, 2.0, 2.0)  # from the first beginning to the last end
    assert rows["load", HOLDFAST].seconds == (2.0, 2.0, 2.0)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"specimen-{HOLDFAST}-2", f"specimen-{RAW}-2"], "only what was to be loaded is left"


def test_ranks_that_cannot_be_started_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def start(size: int, *more: object) -> None:
        tries.append(size)
        raise RankEnded("rank 0 ended with exit code 1: no torch")

    monkeypatch.setattr(measure, "World", start)
    rows = measure.Meter(1000, tmp_path, ranks=(1, 2), rounds=2, timeout=5.0).run()
    assert tries == [1, 2]  # and nobody is started to load what was not saved
    assert {row.status for row in rows} == {"failed"}
    reasons = {row.reason for row in rows if row.kind == "save"}
    assert "2 ranks could not be started: rank 0 ended with exit code 1: no torch" in reasons
    assert list(tmp_path.iterdir()) == []


def test_worlds_come_in_an_order_in_which_there_is_something_to_load() -> None:
    assert [(v.world, v.saves, v.loads) for v in measure.visits((1, 2, 4))] == [
        (1, True, ()),
        (4, True, (4, 1)),
        (2, True, (4,)),
        (1, False, (4,)),
    ]
    assert [(v.world, v.saves, v.loads) for v in measure.visits((3,))] == [(3, True, (3,))]


def test_an_operation_lasts_from_the_first_beginning_to_the_last_end() -> None:
    assert seconds_of([Did(1.0, 2.0), Did(0.5, 3.0)]) == 2.5
    assert seconds_of([Did(1.0, 9.0, seconds=0.25), Did(0.0, 9.0)]) == 0.25


def test_every_row_is_held_against_its_own_world() -> None:
    found = {(row.kind, row.world, row.system): row.summary for row in made_up().rows}
    four = found["save", 4, RECYCLED]
    assert four is not None
    assert four.gb_per_second.median == pytest.approx(1.0)
    assert four.of_raw == pytest.approx(1.0)
    peer = found["save", 4, DCP]
    assert peer is not None
    assert peer.holdfast_is_faster_by == pytest.approx(4.0)
    writers = found["writers", 4, "writers-1"]
    assert writers is not None
    assert writers.of_raw == pytest.approx(1 / 1.3)
    load = found["load", 1, HOLDFAST]
    assert load is not None
    assert load.of_raw == pytest.approx(0.5)


def test_the_report_says_what_was_found() -> None:
    text = text_of(made_up())
    for words in (
        "best on this device: 2 writers (about as good: 3, 4)",
        "0.00 %",
        "1 of 4",
        "4 → 1",
        "rank 0: OSError: gone",
        "PASS",
    ):
        assert words in text
    assert "FAIL" not in text
    assert from_json(to_json(made_up())) == made_up()
    assert b'"format": "holdfast-bench-ranks/1"' in to_json(made_up())


def test_shares_that_are_uneven_and_bytes_written_twice_break_a_promise() -> None:
    quarter = GB // 4
    uneven = made_up(shares=(quarter + 5_000_000, quarter, quarter, quarter - 5_000_000))
    assert verdicts(uneven) == {"shares": "FAIL", "each-byte-once": "PASS", "one-copy": "PASS"}
    twice = made_up(shares=(GB // 2,) * 4)
    assert verdicts(twice) == {"shares": "PASS", "each-byte-once": "FAIL", "one-copy": "FAIL"}
    assert "FAIL" in text_of(twice)


def test_promises_about_percents_are_not_made_for_tiny_states() -> None:
    tiny = made_up(shares=(1_000_000, 900_000, 1_000_000, 1_100_000), nbytes=4_000_000)
    assert verdicts(tiny) == {"shares": "not measured", "each-byte-once": "FAIL", "one-copy": "not measured"}


@pytest.mark.parametrize("code", [0, 1])
def test_a_broken_promise_is_exit_code_1(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_up(shares=(GB // 2,) * 4) if code else made_up()
    seen: list[bench.RanksOptions] = []

    def record(options: bench.RanksOptions, console: Console) -> RanksResult:
        seen.append(options)
        return found

    monkeypatch.setattr(bench, "run", record)
    outcome = command(
        "bench", tmp_path, "--ranks", "4,1,4", "--size", "8M", "--repeat", "2", "--system", "dcp"
    )
    assert outcome.code == code
    assert "best on this device" in outcome.out
    assert seen == [bench.RanksOptions((1, 4), tmp_path, nbytes=8 << 20, rounds=2, systems=("dcp",))]


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", "x"),
        ("--ranks", ""),
        ("--ranks", "0"),
        ("--ranks", "1,,2"),
        ("--ranks", "-1"),
        ("--ranks", "1000"),
        ("--ranks", "1", "--size", "1"),
        ("--ranks", "1", "--rounds", "0"),
        ("--ranks", "1", "--system", "pickle"),
        ("--ranks", "1", "--plot", "x.txt"),
        ("--ranks", "1", "--training"),
        ("--ranks", "1", "--shape", "gpt2"),
        ("--ranks", "1", "--layers", "2"),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_wrong_usage(options: tuple[str, ...], tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, *options)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Usage" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_too_large_a_state_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises((MemoryError, OSError), match="choose a smaller --size"):
        bench.run(bench.RanksOptions((64,), tmp_path, nbytes=1 << 40), Console(file=io.StringIO()))
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(made_up(), tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="png"):
        plot.draw(made_up(), tmp_path / "ranks.txt")


def test_shares_are_read_from_the_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert written_at(tmp_path / "file", 2) == Written((100, 0), 100)
    (tmp_path / "dcp").mkdir()
    for name, count in (("__0_0.distcp", 30), ("__1_0.distcp", 50), (".metadata", 5)):
        (tmp_path / "dcp" / name).write_bytes(b"x" * count)
    assert written_at(tmp_path / "dcp", 2) == Written((35, 50), 85)
