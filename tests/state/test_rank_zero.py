"""Promise: of what is marked `rank_zero`, only rank 0 says something, and every rank gets that back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.errors import UnsupportedState
from everystep.state import flatten
from everystep.state.merging import merge_trees
from everystep.state.torch_objects import modules_in, optimizers_in
from support.states.memory_store import restore, save


def state_of(rank: int) -> dict[str, Any]:
    return {"w": np.arange(3.0), "log": everystep.rank_zero({"best": rank, "curve": np.full(2, float(rank))})}


def test_only_rank_zero_says_something_about_it() -> None:
    first, other = flatten(state_of(0), 0), flatten(state_of(5), 5)
    assert first.tree == {"w": {"$leaf": "w"}, "log": {"best": 0, "curve": {"$leaf": "log.curve"}}}
    assert other.tree == {"w": {"$leaf": "w"}}
    assert [leaf.name for leaf in other.leaves] == ["w"]
    assert merge_trees([first.tree, other.tree]) == first.tree


def test_other_ranks_are_not_asked_for_their_state() -> None:
    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("asked")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    marked = {"x": 1, "log": everystep.rank_zero(Refusing())}
    assert flatten(marked, 1).tree == {"x": 1}
    with pytest.raises(AssertionError, match="asked"):
        flatten(marked, 0)


def test_keys_of_any_type_stay_mergeable() -> None:
    first = flatten({1: everystep.rank_zero(7), "a": 2}, 0).tree
    other = flatten({1: everystep.rank_zero(8), "a": 2}, 1).tree
    assert merge_trees([first, other]) == first == {"$dict": [[1, 7], ["a", 2]]}


def test_every_target_gets_what_was_saved() -> None:
    saved = save(state_of(0))
    into = state_of(9)
    mark = into["log"]
    restore(into, saved)
    assert into["log"] is mark
    assert mark.value["best"] == 0
    assert mark.value["curve"].tolist() == [0.0, 0.0]


def test_one_process_saves_the_same_with_the_mark_and_without() -> None:
    assert flatten({"a": everystep.rank_zero([1, 2])}).tree == flatten({"a": [1, 2]}).tree


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "state",
    [
        everystep.rank_zero({}),
        {"a": [everystep.rank_zero(1)]},
        {"a": (everystep.rank_zero(1),)},
    ],
)
def test_it_marks_entries_of_dicts_only(state: Any, rank: int) -> None:
    with pytest.raises(UnsupportedState, match="rank_zero marks entries of dicts"):
        flatten(state, rank)


@pytest.mark.parametrize(
    "state",
    [
        {"a": everystep.rank_zero(everystep.per_rank(1))},
        {"a": everystep.per_rank({"b": everystep.rank_zero(1)})},
    ],
)
def test_a_mark_within_a_mark_is_refused(state: Any) -> None:
    with pytest.raises(UnsupportedState, match="mark it once"):
        flatten(state, 1)


def test_the_walks_for_modules_see_through_the_mark() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state = {"mine": everystep.rank_zero({"model": model, "optimizer": optimizer})}
    assert list(modules_in(state)) == [("mine.model", model)]
    assert list(optimizers_in(state)) == [optimizer]
