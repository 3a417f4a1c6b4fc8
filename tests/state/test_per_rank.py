"""Promise: what is marked `per_rank` is kept apart from what ranks share, and goes back to its own rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.errors import CorruptCheckpoint, StateMismatch, UnsupportedState
from everystep.state import FlatState, LeafMeta, Restore, flatten, leaf_names, prune, unflatten, values
from everystep.state.torch_objects import modules_in, optimizers_in, parameter_names
from support.states.memory_store import Saved, fresh, read, through_json, write


def saved_with_local(state: object, rank: int = 0) -> tuple[Saved, dict[str, Any]]:
    flat: FlatState = flatten(state, rank)
    leaves = [*flat.leaves, *flat.local_leaves]
    names = [leaf.name for leaf in leaves]
    assert len(set(names)) == len(names)
    return (
        Saved(
            through_json(flat.tree),
            {leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework) for leaf in leaves},
            {**dict(flat.aliases), **dict(flat.local_aliases)},
            {leaf.name: read(leaf.source) for leaf in leaves},
        ),
        through_json(dict(flat.local)),
    )


def put_back(into: object, saved: Saved, local: Any, **options: Any) -> Restore:
    made = Restore(into, saved.tree, saved.leaves, saved.aliases, local=local, **options)
    if made.mismatch:
        raise made.mismatch.error()
    for name, where in made.destinations.items():
        write(where, saved.data[name])
    made.finish(fresh(saved, made.fresh))
    return made


def test_the_tree_refers_to_a_place_and_the_rank_keeps_the_node() -> None:
    shared = np.arange(3.0)
    flat = flatten({"w": shared, "data": everystep.per_rank({"at": 5, "seen": np.arange(2)})}, rank=12)
    assert flat.tree == {"w": {"$leaf": "w"}, "data": {"$per_rank": "data"}}
    assert flat.local == {"data": {"at": 5, "seen": {"$leaf": "@12.data.seen"}}}
    assert [leaf.name for leaf in flat.leaves] == ["w"]
    assert [leaf.name for leaf in flat.local_leaves] == ["@12.data.seen"]
    assert list(leaf_names(flat.tree)) == ["w"]


def test_marked_arrays_are_tied_to_each_other_but_never_to_shared_ones() -> None:
    array = np.arange(3.0)
    flat = flatten({"w": array, "a": everystep.per_rank([array, array]), "b": everystep.per_rank(array)})
    assert flat.aliases == ()
    assert [leaf.name for leaf in flat.local_leaves] == ["@0.a.0"]
    assert flat.local_aliases == (("@0.a.1", "@0.a.0"), ("@0.b", "@0.a.0"))


def test_places_that_read_the_same_are_distinguished() -> None:
    flat = flatten({"a.b": everystep.per_rank(1), "a": {"b": everystep.per_rank(2)}})
    assert flat.tree == {"a.b": {"$per_rank": "a.b"}, "a": {"b": {"$per_rank": "a.b~1"}}}
    assert flat.local == {"a.b": 1, "a.b~1": 2}


def test_the_whole_state_may_be_marked() -> None:
    flat = flatten(everystep.per_rank({"x": 1}))
    assert (flat.tree, flat.local) == ({"$per_rank": "_"}, {"_": {"x": 1}})


def test_a_mark_within_a_mark_is_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"a\.b.*mark it once"):
        flatten({"a": everystep.per_rank({"b": everystep.per_rank(1)})})


def test_names_of_shared_leaves_cannot_be_taken_for_those_of_a_rank() -> None:
    array = np.arange(3.0)
    assert flatten({"@one": array}).leaves[0].name == "@one"
    with pytest.raises(UnsupportedState, match="begin with '@'"):
        flatten({"@one": array, "a": everystep.per_rank(array.copy())})
    # Readers of what several ranks or volumes hold look for it in the part of rank 1 alone.
    with pytest.raises(UnsupportedState, match=r"@1\.a.*begin with '@'"):
        flatten({"@1": {"a": array}})


def test_random_numbers_are_asked_last_inside_of_a_mark_too() -> None:
    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"drawn": float(np.random.random())}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            np.random.random()

    state = {"rng": everystep.per_rank(everystep.rng()), "drawing": Drawing()}
    saved, local = saved_with_local(state)
    expected = np.random.random()
    put_back(state, saved, local)
    assert np.random.random() == expected


def test_the_walks_for_modules_see_through_the_mark() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state = {"mine": everystep.per_rank({"model": model, "optimizer": optimizer})}
    assert list(modules_in(state)) == [("mine.model", model)]
    assert list(optimizers_in(state)) == [optimizer]
    assert parameter_names(state)[id(model.weight)].full == "mine.model.weight"


# --- back ---------------------------------------------------------------------------------------------------


def test_a_new_state_has_what_one_rank_had_or_nothing() -> None:
    saved, local = saved_with_local({"x": 1, "mine": everystep.per_rank([2, {"y": np.arange(2)}])})
    arrays = fresh(saved, saved.leaves)
    assert unflatten(saved.tree, arrays) == {"x": 1, "mine": None}
    found: Any = unflatten(saved.tree, arrays, local=local)
    assert found["mine"][0] == 2
    assert found["mine"][1]["y"].tolist() == [0, 1]
    assert values(saved.tree) == {"x": 1}
    assert values(saved.tree, local=local) == {"x": 1, "mine.0": 2}
    assert values({"l": [1, {"$per_rank": "l.1"}]}) == {"l.0": 1}


def test_choosing_leaves_leaves_the_mark_out() -> None:
    saved, _ = saved_with_local({"w": np.arange(2), "mine": everystep.per_rank(np.arange(2))})
    assert prune(saved.tree, {"w"}) == {"w": {"$leaf": "w"}}


def test_a_marked_target_takes_what_its_rank_saved_in_place() -> None:
    saved, local = saved_with_local({"mine": everystep.per_rank({"a": np.arange(3), "n": 4})}, rank=3)
    own = {"a": np.zeros(3, int), "n": 0}
    into = {"mine": everystep.per_rank(own)}
    mark = into["mine"]
    made = put_back(into, saved, local)
    assert into["mine"] is mark
    assert mark.value is own
    assert (own["a"].tolist(), own["n"]) == ([0, 1, 2], 4)
    assert made.kept == ()
    assert list(made.destinations) == ["@3.mine.a"]


@pytest.mark.parametrize("local", [None, {}, {"other": 1}])
def test_what_was_not_saved_of_this_rank_stays_as_it_is_and_is_listed(local: Any) -> None:
    saved, _ = saved_with_local(
        {
            "mine": everystep.per_rank({"n": 4}),
            "deep": {"p": everystep.per_rank(1), "q": 2},
            "r": [1, everystep.per_rank(2)],
        }
    )
    into: dict[str, Any] = {"mine": everystep.per_rank({"n": 7}), "deep": {"p": 8, "q": 0}, "r": [0, 9]}
    made = put_back(into, saved, local)
    assert made.kept == ("mine", "deep.p", "r.1")
    assert into["mine"].value == {"n": 7}
    assert into["deep"] == {"p": 8, "q": 2}
    assert into["r"] == [1, 9]


@pytest.mark.parametrize("here", [True, False], ids=["of this rank", "of others"])
def test_what_the_target_has_no_place_for_may_be_left_out_and_is_listed(here: bool) -> None:
    saved, local = saved_with_local({"w": 1, "mine": everystep.per_rank({"n": 4, "x": np.arange(2)})})
    made = put_back({"w": 0}, saved, local if here else {})
    assert made.left_out == ("mine",)
    assert made.fresh == ()
    saved, local = saved_with_local({"w": 1, "mine": {"n": 4}})
    with pytest.raises(StateMismatch, match="mine"):
        put_back({"w": np.zeros(1)}, saved, local)


def test_a_mark_on_one_side_only_is_no_obstacle() -> None:
    saved, local = saved_with_local({"a": everystep.per_rank({"n": 1, "x": np.arange(2)}), "b": {"n": 2}})
    into: dict[str, Any] = {"a": {"n": 0, "x": np.zeros(2, int)}, "b": everystep.per_rank({"n": 0})}
    put_back(into, saved, local)
    assert into["a"]["n"] == 1
    assert into["a"]["x"].tolist() == [0, 1]
    assert into["b"].value == {"n": 2}


def test_a_marked_optimizer_and_module_come_back() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        return {"mine": everystep.per_rank({"model": model, "opt": torch.optim.Adam(model.parameters())})}

    state = make(1)
    state["mine"].value["model"](torch.ones(2)).sum().backward()
    state["mine"].value["opt"].step()
    saved, local = saved_with_local(state)
    other = make(2)
    put_back(other, saved, local)
    ours, theirs = state["mine"].value, other["mine"].value
    assert torch.equal(ours["model"].weight, theirs["model"].weight)
    moments = [s["opt"].state[s["model"].weight]["exp_avg"] for s in (ours, theirs)]
    assert torch.equal(*moments)


def test_a_damaged_reference_is_reported() -> None:
    for call in (lambda t: unflatten(t, {}), values, lambda t: Restore({}, t, {}, {})):
        with pytest.raises(CorruptCheckpoint, match="where a place belongs"):
            call({"x": {"$per_rank": 5}})
    deep: Any = {"$per_rank": "a"}
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(CorruptCheckpoint, match="nested deeper"):
        unflatten(deep, {}, local={"a": 1})


# --- checkpoints of several ranks ---------------------------------------------------------------------------


def test_leaves_of_other_ranks_are_elsewhere_and_not_a_mismatch() -> None:
    saved, _ = saved_with_local({"net": {"0": np.arange(2), "1": np.arange(3)}, "note": "x", "more": 1})
    into = {"net": {"1": np.zeros(3, int)}, "note": ""}
    made = Restore(into, saved.tree, saved.leaves, saved.aliases, shared=True)
    assert not made.mismatch
    assert made.elsewhere == ("net.0",)
    assert list(made.destinations) == ["net.1"]
    assert Restore(into, saved.tree, saved.leaves, saved.aliases).mismatch.extra == ("net.0", "more")


def test_what_is_missing_or_different_stays_a_mismatch() -> None:
    saved, _ = saved_with_local({"a": np.arange(2), "b": np.arange(2)})
    into = {"a": np.zeros(3, int), "c": np.zeros(1)}
    made = Restore(into, saved.tree, saved.leaves, saved.aliases, shared=True)
    assert made.mismatch.missing == ("c",)
    assert len(made.mismatch.wrong) == 1
    assert made.elsewhere == ("b",)
