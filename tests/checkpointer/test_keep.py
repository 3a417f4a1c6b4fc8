"""Which checkpoints stay: each rule by itself, and all together against a plain restatement of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep import Keep
from everystep.checkpointer import Kept
from support.crashes.run_model import wanted


def kept(*steps: int, **metrics: float) -> list[Kept]:
    return [Kept(step, float(step), metrics) for step in steps]


losses = st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf, -math.inf]) | st.floats()
histories = st.lists(
    st.tuples(
        st.integers(0, 200), st.floats(0, 1e6), st.dictionaries(st.sampled_from(["loss", "acc"]), losses)
    ),
    unique_by=lambda row: row[0],
    max_size=20,
).map(lambda rows: [Kept(*row) for row in sorted(rows, key=lambda row: row[0])])
keeps = st.builds(
    Keep,
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 50),
    best=st.none()
    | st.tuples(st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 4)),
    seconds=st.none() | st.floats(1, 1e5),
)


@given(keeps, histories)
def test_what_stays_is_what_any_rule_wants(keep: Keep, history: list[Kept]) -> None:
    assert keep.chosen(history) == wanted(keep, history)


@given(keeps, histories)
def test_the_newest_always_stays(keep: Keep, history: list[Kept]) -> None:
    assert not history or history[-1].step in keep.chosen(history)


@given(keeps, histories)
def test_pruning_twice_is_pruning_once(keep: Keep, history: list[Kept]) -> None:
    """What stayed must not fall at the next save because others are gone."""
    once = keep.chosen(history)
    assert keep.chosen([item for item in history if item.step in once]) == once


def test_each_rule_by_itself() -> None:
    history = kept(*range(1, 11))
    assert Keep(last=2).chosen(history) == {9, 10}
    assert Keep(last=1, every=4).chosen(history) == {4, 8, 10}
    assert Keep(last=1, seconds=3.0).chosen(history) == {1, 4, 7, 10}
    scored = [
        Kept(step, 0.0, {"loss": loss}) for step, loss in enumerate([3.0, 1.0, 2.0, math.nan, -math.inf, 5.0])
    ]
    assert Keep(last=1, best=("loss", "min", 2)).chosen(scored) == {4, 1, 5}
    assert Keep(last=1, best=("loss", "max", 1)).chosen(scored) == {5}
    assert Keep(last=1, best=("accuracy", "max", 3)).chosen(scored) == {5}  # a metric that was never reported
    assert Keep().chosen([]) == set()


def test_a_clock_that_jumps_ahead_and_is_set_right_costs_no_checkpoint() -> None:
    """One checkpoint is dated a year ahead; those behind it are kept at their distances all the same."""
    year = 365 * 86400.0
    created = {1: 0.0, 2: 10.0, 3: 20.0 + year, 4: 30.0, 5: 35.0, 6: 40.0, 7: 50.0, 8: 55.0}
    history = [Kept(step, at, {}) for step, at in created.items()]
    assert Keep(last=1, seconds=10.0).chosen(history) == {1, 2, 3, 4, 6, 7, 8}


@pytest.mark.parametrize("direction", ["min", "max"])
def test_a_loss_that_is_not_a_number_is_never_the_best(direction: Any) -> None:
    history = [
        Kept(step, 0.0, {"loss": loss}) for step, loss in enumerate([math.nan, 2.0, math.nan, 2.5, 2.2])
    ]
    best = {"min": 1, "max": 3}[direction]
    assert Keep(last=1, best=("loss", direction, 1)).chosen(history) == {best, 4}


def test_of_equals_the_newer_is_the_better() -> None:
    assert Keep(last=1, best=("loss", "min", 1)).chosen(kept(1, 2, 3, loss=0.5)) == {3}


@pytest.mark.parametrize(
    "rules",
    [
        {"last": 0},
        {"last": 1.5},
        {"last": True},
        {"last": "3"},
        {"last": None},
        {"every": 0},
        {"every": 2.0},
        {"best": ("loss", "lowest", 1)},
        {"best": ("loss", "min", 0)},
        {"best": ("loss", "min", 1.5)},
        {"best": ("loss", "min")},
        {"best": "loss"},
        {"best": ("loss", ["min"], 1)},
        {"best": (0, "min", 1)},
        {"best": 3},
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"seconds": "1h"},
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(**rules)


def test_numbers_of_other_libraries_are_numbers() -> None:
    keep = Keep(last=np.int64(2), every=np.int32(4), best=("loss", "min", np.int64(1)), seconds=np.float32(3))  # type: ignore[arg-type]
    assert keep.chosen(kept(*range(1, 11))) == {1, 4, 7, 8, 9, 10}
