"""``everystep show``."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

import everystep
from support.processes.command import command, damage_leaf, make_run, make_state, step_path


def test_shows_facts_values_and_leaves(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", make_state(), step=1234, metrics={"loss": 0.5})
    outcome = command("show", tmp_path / "one")
    assert outcome.code == 0
    lines = outcome.lines
    assert "step 1,234" in lines
    assert "metrics loss 0.5" in lines
    assert "note str 'hello'" in lines
    assert "model.w F32 [30, 20] 2.3 KiB numpy" in lines


def test_json_holds_every_fact_and_keeps_the_exact_value(tmp_path: Path) -> None:
    tied = np.zeros((2, 3))
    state = {"a": tied, "b": tied, "n": math.nan, "t": (1, 2.5), "big": 2**80}
    info = everystep.save(tmp_path / "one", state, step=7, metrics={"loss": math.inf})
    document = command("show", tmp_path / "one", "--json").document
    assert set(document) == {
        *("path", "format", "id", "step", "created", "world", "metrics", "nbytes", "stored_nbytes"),
        *("files", "values", "subtrees", "leaves"),
    }
    assert (document["step"], document["id"], document["format"]) == (7, info.id, "everystep/1")
    assert document["metrics"] == {"loss": "inf"}
    assert document["nbytes"] == 48
    assert document["values"] == {
        "n": {"$float": "7ff8000000000000"},
        "t": {"$tuple": [1, 2.5]},
        "big": {"$int": str(2**80)},
    }
    leaf = {"dtype": "F64", "shape": [2, 3], "nbytes": 48, "framework": "numpy"}
    assert document["leaves"] == [
        {"name": "a", **leaf, "alias_of": None},
        {"name": "b", **leaf, "alias_of": "a"},
    ]
    assert [file["name"] for file in document["files"]] == ["r00000.v0.safetensors"]


def test_leaves_come_in_the_order_of_the_state(tmp_path: Path) -> None:
    state = {"small": np.zeros(3, np.int8), "wide": np.zeros(3), "half": np.zeros(3, np.float16)}
    everystep.save(tmp_path / "one", state)
    document = command("show", tmp_path / "one", "--json").document
    assert [leaf["name"] for leaf in document["leaves"]] == ["small", "wide", "half"]


def test_a_run_means_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [3, 12])
    assert command("show", run, "--json").document["path"] == str(step_path(run, 12))


def test_a_glob_shows_only_what_matches(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", make_state())
    outcome = command("show", tmp_path / "one", "--leaves", "*.b")
    assert "model.b" in outcome.out
    assert "model.w" not in outcome.out
    assert "1 of 2 leaves, 160 B" in outcome.out
    document = command("show", tmp_path / "one", "--leaves", "model.?", "--json").document
    assert [leaf["name"] for leaf in document["leaves"]] == ["model.w", "model.b"]


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", make_state())
    outcome = command("show", tmp_path / "one", "--leaves", "[")
    assert outcome.code == 1
    assert "no leaf" in outcome.err
    assert (
        command("show", tmp_path / "one", "--leaves", "x*", "--json").document["error"]["type"]
        == "StateMismatch"
    )


def test_many_leaves_are_cut_off_unless_asked_for(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"p": {str(i): np.zeros(1) for i in range(150)}})
    short, full = command("show", tmp_path / "one"), command("show", tmp_path / "one", "--all")
    assert "p.99 " in short.out
    assert "p.100 " not in short.out
    assert "and 50 leaves more" in short.out
    assert "p.149 " in full.out
    assert len(command("show", tmp_path / "one", "--json").document["leaves"]) == 150


def test_long_values_are_cut_off_unless_asked_for(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"text": "x" * 5000, "huge": 7**20_000})
    assert "x" * 500 not in command("show", tmp_path / "one").out
    full = command("show", tmp_path / "one", "--all").out
    assert "x" * 5000 in full
    assert "too long to print" in full


def test_arrays_are_not_read(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", make_state())
    damage_leaf(tmp_path / "one", "model.w")
    assert command("show", tmp_path / "one").code == 0


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"a\x1b[2J": np.zeros(1), "[bold]": "\x1b]0;title\x07"})
    outcome = command("show", tmp_path / "one")
    assert "\x1b" not in outcome.out
    assert "[bold]" in outcome.out  # not taken for markup


def test_an_unfinished_save_is_not_shown_as_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    step_path(run, 1).rename(run / "step-000000000001.partial")
    outcome = command("show", run / "step-000000000001.partial")
    assert outcome.code == 1
    assert "did not finish" in outcome.err
