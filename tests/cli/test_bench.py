"""``holdfast bench``: only the wiring; what is measured has tests of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.study import bench as study
from holdfast.study.report import from_json

from .support import command

OPTIONS = ("--size", "2M", "--repeat", "1", "--system", "raw", "--system", "holdfast")


class Recorder:
    """Stands in for the measuring; keeps the options it was given."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.options: study.BenchOptions | None = None

    def __call__(self, options: study.BenchOptions, console: Console) -> Any:
        self.options = options
        raise self.error


def test_options_reach_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(MemoryError("too large"))
    monkeypatch.setattr(study, "run", recorder)
    plot = tmp_path / "x.svg"
    outcome = command("bench", tmp_path, *OPTIONS, "--shape", "many-small", "--plot", plot)
    assert outcome.code == 1
    assert outcome.err == "holdfast: too large\n"
    assert recorder.options == study.BenchOptions(
        directory=tmp_path,
        nbytes=2 << 20,
        shape="many-small",
        rounds=1,
        systems=("raw", "holdfast"),
        plot=plot,
    )


def test_a_small_benchmark_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = command("bench", tmp_path, *OPTIONS, "--json")
    result = from_json(outcome.out.encode())
    assert {row.system for row in result.rows} == {"raw", "holdfast"}
    assert outcome.code == int(any(bar.verdict == "FAIL" for bar in result.bars))
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(study, "run", lambda options, console: result)
    text = command("bench", tmp_path, *OPTIONS)
    assert text.code == outcome.code
    assert "durable save" in text.out


@pytest.mark.parametrize(
    "options",
    [
        ("--size", "abc"),
        ("--size", "1"),
        ("--shape", "round"),
        ("--repeat", "0"),
        ("--system", "nonsense"),
        ("--plot", "x.txt"),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_wrong_usage(options: tuple[str, ...], tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, *options)
    assert outcome.code == 2
    assert outcome.out == ""
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_in_one_line(tmp_path: Path) -> None:
    outcome = command("bench", tmp_path, "--size", "900T")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "smaller --size" in outcome.err
