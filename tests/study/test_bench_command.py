"""``everystep bench``: only the wiring; what is measured has tests of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everystep_study.commands.bench import parse_size
from everystep_study.harness import cache, results, runner
from everystep_study.harness.results import from_json
from everystep_study.harness.suite import Group, Suite
from everystep_study.suites.ranks import RanksSuite
from everystep_study.suites.save_load import SaveLoadSuite
from everystep_study.suites.training import TrainingSuite
from support.processes.command import command
from support.study.bench_results import result, row

MIB = 1 << 20
SMALL = ("--size", "2M", "--repeat", "1", "--system", "raw", "--system", "everystep")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The suites that would have been run."""
    found: list[Any] = []

    def record(suite: Suite, directory: Path, console: object, *, check: bool) -> results.Result:
        found.append(suite)
        facts = {"state_nbytes": 1e9, "most_ranks": 4}
        return result(row("save", "everystep", seconds=1.0), facts=facts)

    monkeypatch.setattr(runner, "run", record)
    return found


def test_options_reach_the_suites(tmp_path: Path, seen: list[Any]) -> None:
    model = ("--size", "8M", "--layers", "1", "--width", "64", "--batch", "2", "--sequence", "16")
    how = ("--steps", "4", "--repeat", "3", "--no-sweep", "--restarts", "1", "--system", "overlap")
    for options in (
        (*SMALL, "--shape", "many-small"),
        (),
        ("--training", *model, *how),
        ("--training", "--quick", "--steps", "1"),
        ("--ranks", "4,1,4", "--size", "8M", "--repeat", "2", "--system", "dcp"),
    ):
        assert command("bench", tmp_path, *options).code == 0
    assert seen == [
        SaveLoadSuite(2 * MIB, "many-small", 1, ("raw", "everystep")),
        SaveLoadSuite(),
        TrainingSuite(
            nbytes=8 * MIB,
            layers=1,
            width=64,
            batch=2,
            sequence=16,
            rounds=3,
            steps=4,
            systems=("overlap",),
            sweep=False,
            restarts=1,
        ),
        replace(TrainingSuite.quick(), steps=1),
        RanksSuite((1, 4), 8 * MIB, 2, ("dcp",)),
    ]


def test_quick_is_for_every_suite(tmp_path: Path, seen: list[Any]) -> None:
    command("bench", tmp_path, "--quick", "--markdown", tmp_path / "page.md", "--size", "64M")
    names = [type(suite) for suite in seen]
    assert names == [SaveLoadSuite, TrainingSuite, RanksSuite]
    assert [suite.nbytes for suite in seen] == [64 * MIB, 100 * MIB, 128 * MIB]
    assert [suite.rounds for suite in seen] == [3, 2, 3]
    page = (tmp_path / "page.md").read_text()
    assert page.count("\n## ") == 3
    assert "overwrites it" in page


def test_a_small_benchmark_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests look at what is in the page cache, and write to the same disk.
    monkeypatch.setattr(cache, "_drop_everything", lambda: False)
    monkeypatch.setattr(os, "sync", lambda: None)
    real = SaveLoadSuite.groups

    def few_rounds(suite: SaveLoadSuite, folder: Path) -> Iterator[Group]:
        suite.small_rounds, suite.import_rounds = 3, 1
        return real(suite, folder)

    monkeypatch.setattr(SaveLoadSuite, "groups", few_rounds)
    room = tmp_path / "room"
    room.mkdir()
    picture = tmp_path / "x.svg"
    outcome = command("bench", room, *SMALL, "--quick", "--json", "--plot", picture)
    assert outcome.code == 0
    found = from_json(outcome.out.encode())
    assert {row.case for row in found.section("save")} == {"raw", "everystep"}
    assert outcome.document["format"] == "everystep-bench/2"
    assert found.bars == (), "promises are for --check"
    assert picture.exists()
    assert list(room.iterdir()) == []


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1)], ids=["kept", "broken"])
def test_a_broken_promise_is_exit_code_1(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = results.judge("k", "a promise", "<=", 2.0, "x", results.exactly(value))
    found = msgspec.structs.replace(result(row("save", "everystep", seconds=1.0)), bars=(bar,))
    monkeypatch.setattr(runner, "run", lambda *given, check: found if check else None)
    outcome = command("bench", tmp_path, "--check")
    assert outcome.code == code
    assert ("FAIL" in outcome.out) == bool(code)
    assert command("bench", tmp_path, "--check", "--json").code == code


def test_a_picture_without_matplotlib_says_what_to_install_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = command("bench", tmp_path, "--plot", tmp_path / "x.png")
    assert outcome.code == 1
    assert "pip install matplotlib" in outcome.err
    assert seen == []


def test_too_little_room_is_said_in_one_line(tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, "--size", "900T", "--shape", "few-large")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "smaller --size" in outcome.err


@pytest.mark.parametrize(
    "options",
    [
        "--size abc",
        "--size 1",
        "--shape round",
        "--repeat 0",
        "--system nonsense",
        "--plot x.txt",
        "--training --shape gpt2",
        "--training --size abc",
        "--training --size 1",
        "--training --layers 0",
        "--training --width 100",
        "--training --layers 48 --width 1600",
        "--training --batch 0",
        "--training --sequence 2000",
        "--training --steps 0",
        "--training --restarts -1",
        "--training --system pickle",
        "--training --plot x.txt",
        "--layers 2",
        "--no-sweep",
        "--restarts 0",
        "--ranks x",
        "--ranks 0",
        "--ranks 1,,2",
        "--ranks -1",
        "--ranks 1000",
        "--ranks 1 --size 1",
        "--ranks 1 --rounds 0",
        "--ranks 1 --system pickle",
        "--ranks 1 --plot x.txt",
        "--ranks 1 --training",
        "--ranks 1 --shape gpt2",
        "--ranks 1 --layers 2",
        "--markdown x.md --json",
        "--markdown x.md --plot x.png",
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(options: str, tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, *options.split(" "))
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Usage" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_an_option_of_a_training_without_one_is_named(tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, "--layers", "2", "--no-sweep")
    assert "--layers, --no-sweep only with --training" in " ".join(outcome.err.split())


def test_sizes_are_read_as_people_write_them() -> None:
    read = {"4096": 4096, "64k": 65536, "256M": 256 * MIB, "1GiB": 1 << 30, "1.5 GB": 3 << 29, "2T": 2 << 40}
    assert {text: parse_size(text) for text in read} == read
    for text in ("", "M", "-1G", "1X", "1 G i B", "many"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(text)
