"""Trees of several ranks made one."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import CorruptCheckpoint
from everystep.state import flatten, leaf_names
from everystep.state.merging import merge_trees
from everystep.state.node import MAX_DEPTH, Node


def ref(name: str) -> Node:
    return {"$leaf": name}


def test_stages_of_a_pipeline_become_one_model() -> None:
    first = {"model": {"$state_dict": [{"v": 1}, ["embed", ref("model.embed")], ["norm", ref("model.norm")]]}}
    last = {"model": {"$state_dict": [{"v": 2}, ["norm", ref("model.norm")], ["head", ref("model.head")]]}}
    assert merge_trees([{**first, "step": 3}, {**last, "step": 3, "stage": 1}]) == {
        "model": {
            "$state_dict": [
                {"v": 1},
                ["embed", ref("model.embed")],
                ["norm", ref("model.norm")],
                ["head", ref("model.head")],
            ]
        },
        "step": 3,
        "stage": 1,
    }


def optimizer(names: list[Any], **rest: Any) -> Node:
    state: Node = {name: {"exp_avg": ref(f"opt.{name}")} for name in names}
    return {"state": state, "param_groups": [{"lr": 0.1, **rest, "params": names}]}


def test_partitions_of_an_optimizer_become_one() -> None:
    merged = merge_trees([optimizer(["a", "b"]), optimizer(["b", "c"], lr=0.5, extra=1), optimizer(["d"])])
    assert merged == {
        "state": {name: {"exp_avg": ref(f"opt.{name}")} for name in "abcd"},
        "param_groups": [{"lr": 0.1, "params": ["a", "b", "c", "d"], "extra": 1}],
    }


def test_further_groups_of_an_optimizer_are_appended() -> None:
    one: Node = {"state": {}, "param_groups": [{"params": ["a"]}]}
    two: Node = {"state": {}, "param_groups": [{"params": []}, {"params": ["b"], "lr": 2}]}
    assert merge_trees([one, two]) == {
        "state": {},
        "param_groups": [{"params": ["a"]}, {"params": ["b"], "lr": 2}],
    }


def test_what_only_looks_like_an_optimizer_is_merged_like_anything_else() -> None:
    one: Node = {"state": {}, "param_groups": [{"params": 1}]}
    two: Node = {"state": {"x": 1}, "param_groups": [{"params": 2}]}
    assert merge_trees([one, two]) == {"state": {"x": 1}, "param_groups": [{"params": 1}]}


@pytest.mark.parametrize("wrap", ["$dict", "$odict", "$counter"])
def test_mappings_with_other_keys_merge_by_the_key_itself(wrap: str) -> None:
    a: Node = {wrap: [[1, ref("a")], [{"$tuple": [1, 2]}, 5]]}
    b: Node = {wrap: [[True, ref("b")], [1.0, 2], [{"$tuple": [1, 2]}, 6], [1, ref("c")]]}
    assert merge_trees([a, b]) == {wrap: [[1, ref("a")], [{"$tuple": [1, 2]}, 5], [True, ref("b")], [1.0, 2]]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (ref("a"), ref("b")),
        ([1, 2], [3]),
        ({"$tuple": [1]}, [1]),
        ({"a": 1}, {"$odict": [["b", 2]]}),
        ({"$deque": [[1], None]}, {"$deque": [[2], None]}),
        ({"$per_rank": "x"}, {"$per_rank": "y"}),
        (None, {"a": 1}),
    ],
)
def test_where_nothing_can_be_joined_the_first_counts(first: Node, second: Node) -> None:
    assert merge_trees([first, second]) == first
    assert merge_trees([{"at": first}, {"at": second}]) == {"at": first}


def test_sequences_of_one_length_merge_place_by_place() -> None:
    a: Node = [{"a": ref("a")}, {"$tuple": [{}, 1]}]
    b: Node = [{"b": ref("b")}, {"$tuple": [{"c": ref("c")}, 2]}]
    assert merge_trees([a, b]) == [{"a": ref("a"), "b": ref("b")}, {"$tuple": [{"c": ref("c")}, 1]}]


def test_nesting_is_bounded() -> None:
    node: Node = 0
    for _ in range(MAX_DEPTH + 2):
        node = {"a": node}
    with pytest.raises(CorruptCheckpoint, match="nested deeper"):
        merge_trees([node, node])


@pytest.mark.parametrize(
    "bad",
    [
        {"$dict": 3},
        {"$odict": [[1]]},
        {"$state_dict": []},
        {"$defaultdict": []},
        {"$namespace": 3},
        {"$tuple": 1},
        {"a": 1, "$b": 2},
    ],
)
def test_what_is_malformed_is_damage(bad: Node) -> None:
    with pytest.raises(CorruptCheckpoint):
        merge_trees([bad, bad])


states: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), below, max_size=4)
        | st.dictionaries(st.text(max_size=3), below, max_size=4).map(OrderedDict)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=4).map(Counter)
        | st.dictionaries(st.text(max_size=3), below, max_size=4).map(lambda held: defaultdict(list, held))
        | st.dictionaries(st.sampled_from("abc"), below, max_size=4).map(lambda held: Namespace(**held))
    ),
    max_leaves=12,
)


@given(states)
def test_a_tree_merged_with_itself_is_the_tree(state: Any) -> None:
    tree = flatten(state).tree
    assert merge_trees([tree]) == tree
    assert merge_trees([tree, tree, tree]) == tree


@given(
    st.lists(st.dictionaries(st.tuples(*[st.sampled_from("abc")] * 3), st.booleans()), min_size=1, max_size=5)
)
def test_the_leaves_of_the_result_are_those_of_all(ranks: list[dict[tuple[str, str, str], bool]]) -> None:
    """Ranks with any of the leaves of a state, in any order."""
    trees: list[Node] = []
    for rank in ranks:
        tree: dict[str, Any] = {}
        for one, two, three in rank:
            tree.setdefault(one, {}).setdefault(two, {})[three] = ref(f"{one}.{two}.{three}")
        trees.append(tree)
    merged = list(leaf_names(merge_trees(trees)))
    assert sorted(merged) == sorted({".".join(path) for rank in ranks for path in rank})
