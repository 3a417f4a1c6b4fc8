"""Totals and comparisons by subtree: ``show`` and ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from support.processes.command import command


def state(change: float = 0.0) -> dict[str, Any]:
    weights = {f"h.{index}.w": np.ones((4, 2), np.float32) for index in range(3)}
    moments = {name: {"exp_avg": np.full(3, change)} for name in weights}
    return {"model": weights, "optimizer": moments, "epoch": int(change), "lr": 0.1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    everystep.save(root / "a", state())
    everystep.save(root / "b", {**state(2.0), "new": np.zeros(2)})
    return root / "a", root / "b"


def test_show_has_totals_per_subtree(pair: tuple[Path, Path]) -> None:
    lines = command("show", pair[0]).lines
    assert "model 3 24 96 B" in lines
    assert "optimizer 3 9 72 B" in lines


def test_show_by_depth_has_totals_only(pair: tuple[Path, Path]) -> None:
    lines = command("show", pair[0], "--depth", "3").lines
    assert lines[2:] == [
        *(f"model.h.{index} 1 8 32 B" for index in range(3)),
        *(f"optimizer.h.{index} 1 3 24 B" for index in range(3)),
    ]
    totals = command("show", pair[0], "--depth", "1", "--json").document["subtrees"]
    assert [(total["name"], total["nbytes"]) for total in totals] == [("model", 96), ("optimizer", 72)]


def test_one_subtree_alone_is_looked_into(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"model": {"encoder": [np.ones(1)] * 3, "head": [np.ones(2), np.ones(2)]}})
    lines = command("show", tmp_path / "c").lines
    assert "model.encoder 3 1 8 B" in lines  # one array, and two names that are tied to it
    assert "model.head 2 4 32 B" in lines


def test_diff_sums_up_by_subtree(pair: tuple[Path, Path]) -> None:
    outcome = command("diff", *pair, "--summary")
    assert outcome.code == 1
    assert "model 3 - - - - -" in outcome.lines
    assert "optimizer 3 3 - - 2 1" in outcome.lines
    assert "new 1 - - 1 - -" in outcome.lines
    assert not any(line.startswith("optimizer.h.0") for line in outcome.lines)


def test_diff_of_some_leaves(pair: tuple[Path, Path]) -> None:
    assert command("diff", *pair, "--leaves", "model").code == 0
    assert command("diff", *pair, "--leaves", "model", "--leaves", "epoch").code == 1
    document = command("diff", *pair, "--leaves", "optimizer.*.exp_avg", "--json").document
    assert (len(document["leaves"]), document["values"], document["identical"]) == (3, [], 0)


def test_diff_without_some(pair: tuple[Path, Path]) -> None:
    outcome = command("diff", *pair, "--ignore", "optimizer", "--ignore", "epoch", "--ignore", "n?w")
    assert outcome.code == 0
    assert "equal, bit for bit: 3 leaves, and the values that were compared" in outcome.out
    assert command("diff", *pair, "--ignore", "optimizer").code == 1


def test_diff_of_what_is_nowhere_is_a_mistake(pair: tuple[Path, Path]) -> None:
    outcome = command("diff", *pair, "--leaves", "modle")
    assert outcome.code == 1
    assert "did you mean 'model'?" in outcome.err


def test_piped_output_has_no_spaces_at_the_ends_of_lines(pair: tuple[Path, Path]) -> None:
    for arguments in (("show", pair[0]), ("diff", *pair), ("ls", pair[0].parent), ("doctor", "--no-speed")):
        assert not [line for line in command(*arguments).out.splitlines() if line != line.rstrip()]


def test_long_names_are_cut_between_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    name = "transformer.h.11.attention.c_attn.weight.exp_avg_sq"
    everystep.save(tmp_path / "c", {name: np.ones(3), "other": np.ones(1)})
    out = command("show", tmp_path / "c", "--leaves", "*").out.splitlines()
    assert max(map(len, out)) <= 60
    first, second = (line.split()[0] for line in out[2:4])
    assert first.endswith(".")
    assert first + second == name


def test_diff_of_what_is_all_ignored_is_not_called_equal(pair: tuple[Path, Path]) -> None:
    outcome = command("diff", *pair, "--ignore", "*")
    assert outcome.code == 1
    assert "nothing is left to compare" in outcome.err
    assert "equal" not in outcome.out


def test_show_of_some_leaves_begins_with_their_table(pair: tuple[Path, Path]) -> None:
    assert command("show", pair[0], "--leaves", "*").out.startswith("leaf ")
