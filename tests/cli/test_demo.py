"""``holdfast demo``: only the wiring; the story has tests of its own."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.study import demo as study
from support.command import command

REPORT = study.DemoReport(
    equal=True,
    killed_at=17,
    resumed_after=16,
    comparison=study.Comparison(3, 100, ()),
    digest_resumed="aa",
    digest_straight="aa",
    race=None,
    seconds=1.0,
)


def test_tells_the_story_and_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[study.DemoOptions] = []

    def tell(options: study.DemoOptions, console: Console) -> study.DemoReport:
        given.append(options)
        console.print("once upon a time")
        return REPORT

    monkeypatch.setattr(study, "tell", tell)
    outcome = command("demo", "--dir", tmp_path, "--steps", "10", "--no-speed")
    assert (outcome.code, outcome.out) == (0, "once upon a time\n")
    assert (given[0].directory, given[0].steps, given[0].race_repeats) == (tmp_path, 10, 0)
    assert 1 < given[0].kill_at < 10

    as_json = command("demo", "--json")
    assert as_json.err == "once upon a time\n"
    assert as_json.document["equal"] is True
    assert as_json.document["comparison"] == {"leaves": 3, "nbytes": 100, "differing": []}
    assert given[1] == study.DemoOptions()


def test_unequal_ends_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "tell", lambda options, console: replace(REPORT, equal=False))
    assert command("demo").code == 1


def test_a_story_that_fails_is_an_error_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(options: study.DemoOptions, console: Console) -> study.DemoReport:
        raise study.DemoFailed("it was not killed:\nsomething")

    monkeypatch.setattr(study, "tell", tell)
    outcome = command("demo")
    assert (outcome.code, outcome.err) == (1, "holdfast: it was not killed:\nsomething\n")
    assert command("demo", "--json").document == {
        "error": {"type": "DemoFailed", "message": "it was not killed:\nsomething"}
    }


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    outcome = command("demo")
    assert outcome.code == 1
    assert "pip install torch" in outcome.err


def test_one_step_is_too_few(tmp_path: Path) -> None:
    assert command("demo", "--steps", "1").code == 2
