"""``holdfast bench``: only the wiring; what is measured has tests of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.study import bench as study
from holdfast.study import cache
from holdfast.study.report import from_json
from holdfast.study.training import report as training_report
from holdfast.study.training import training
from support.command import command
from support.training_results import result, row, rows

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
    # Other tests look at what is in the page cache, and write to the same disk.
    monkeypatch.setattr(cache, "_drop_everything", lambda: False)
    monkeypatch.setattr(os, "sync", lambda: None)
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


class TestTraining:
    """``--training``: the same wiring, to another measurement."""

    def test_options_reach_the_benchmark(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[training.TrainingOptions] = []

        def record(options: training.TrainingOptions, console: Console) -> Any:
            seen.append(options)
            raise MemoryError("too large")

        monkeypatch.setattr(training, "run", record)
        plot = tmp_path / "x.png"
        model = ("--size", "8M", "--layers", "1", "--width", "64", "--batch", "2", "--sequence", "16")
        how = ("--steps", "4", "--repeat", "3", "--no-sweep", "--restarts", "1", "--system", "overlap")
        outcome = command("bench", "--training", tmp_path, *model, *how, "--plot", plot)
        assert (outcome.code, outcome.err) == (1, "holdfast: too large\n")
        command("bench", "--training", "--quick", tmp_path, "--steps", "1")
        command("bench", "--training", tmp_path)
        assert seen == [
            training.TrainingOptions(
                directory=tmp_path,
                nbytes=8 << 20,
                layers=1,
                width=64,
                batch=2,
                sequence=16,
                rounds=3,
                steps=4,
                systems=("overlap",),
                sweep=False,
                restarts=1,
                plot=plot,
            ),
            replace(training.QUICK, directory=tmp_path, steps=1),
            training.TrainingOptions(directory=tmp_path),
        ]

    @pytest.mark.parametrize(
        ("stall", "code"), [(0.01, 0), (0.5, 1)], ids=["promises kept", "a promise broken"]
    )
    def test_the_result_is_printed_and_a_broken_promise_is_exit_code_1(
        self, stall: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = result(rows(overlap=row("overlap", stall=stall)))
        monkeypatch.setattr(training, "run", lambda options, console: found)
        text = command("bench", "--training", tmp_path)
        assert text.code == code
        assert "Holdfast, overlap" in text.out
        document = command("bench", "--training", tmp_path, "--json")
        assert document.code == code
        assert training_report.from_json(document.out.encode()) == found
        assert document.document["format"] == "holdfast-bench-training/1"

    @pytest.mark.parametrize(
        "options",
        [
            ("--training", "--shape", "gpt2"),
            ("--training", "--size", "abc"),
            ("--training", "--size", "1"),
            ("--training", "--layers", "0"),
            ("--training", "--width", "100"),
            ("--training", "--layers", "48", "--width", "1600"),
            ("--training", "--batch", "0"),
            ("--training", "--sequence", "2000"),
            ("--training", "--steps", "0"),
            ("--training", "--restarts", "-1"),
            ("--training", "--system", "pickle"),
            ("--training", "--plot", "x.txt"),
            ("--quick",),
            ("--layers", "2"),
            ("--no-sweep",),
            ("--restarts", "0"),
        ],
        ids=" ".join,
    )
    def test_options_that_make_no_sense_are_wrong_usage(
        self, options: tuple[str, ...], tmp_path: Path
    ) -> None:
        outcome = command("bench", tmp_path, *options)
        assert outcome.code == 2
        assert outcome.out == ""
        assert list(tmp_path.iterdir()) == []

    def test_an_option_of_a_training_without_one_is_named(self, tmp_path: Path) -> None:
        outcome = command("bench", tmp_path, "--layers", "2", "--no-sweep")
        assert "--layers, --no-sweep only with --training" in " ".join(outcome.err.split())
