"""What DCP knows of a state survives as an Everystep tree, whatever the state is."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import everystep
from everystep.state import leaf_names, unflatten
from everystep.state.unflatten import decode_value
from everystep.universal.dcp.plain_values import NotPlain, ValuePickler, plain_node
from everystep.universal.dcp.record import DcpRecord, compose, entries_of, leaf_node

TENSOR = torch.ones(1)
KEYS = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(["$leaf", "0", "a.b", "@1", "~"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
# Without empty dicts: DCP saves nothing of them, and forgets them.
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        st.just(TENSOR) | VALUES | st.lists(VALUES, max_size=2) | st.tuples(VALUES),
        lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def _composed(flat: dict[str, Any], planner_data: object) -> Any:
    """The tree of a state that DCP has taken apart, through JSON as in a manifest."""
    values = frozenset(name for name, item in flat.items() if item is not TENSOR)
    nodes = {name: plain_node(item) if name in values else leaf_node(name) for name, item in flat.items()}
    tree = compose(nodes, DcpRecord(version="1"), values, planner_data)
    return msgspec.json.decode(msgspec.json.encode(tree))


class Subclass(str):
    """Would come back as something else."""


@settings(max_examples=40)
@given(STATES)
def test_names_paths_and_values_survive(state: dict[str, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:  # two entries have the same name: DCP refuses that
        return
    tree = _composed(flat, paths)
    entries = entries_of(tree, "here")
    assert entries.planner_data == paths
    assert sorted(entries.names) == sorted(flat)
    tensors = {name for name, item in flat.items() if item is TENSOR}
    assert set(leaf_names(tree)) == tensors
    assert set(entries.values) == set(flat) - tensors
    for name, node in entries.values.items():
        assert repr(decode_value(node)) == repr(flat[name])
    # And Everystep itself builds the same state of it.
    built = unflatten(tree, dict.fromkeys(tensors, TENSOR))
    assert isinstance(built, OrderedDict)
    assert set(flatten_state_dict(dict(built))[1].items()) == set(paths.items())


def test_equal_values_are_pickled_once_and_apart_from_others() -> None:
    pickler = ValuePickler()
    for value in (1, 1.0, True, "1", (1,), [1], {"a": 1}, 2**70, float("inf"), b"1"):
        node = plain_node(value)
        for _ in range(2):
            found = torch.load(pickler.bytes_of(node, {}.__getitem__), weights_only=False)
            assert (type(found), found) == (type(value), value)


def test_planner_data_of_another_kind_is_kept_as_a_value_or_refused() -> None:
    for planner_data in (None, {"a": 3}, ["x", (1, 2.5)], {1: ("a",)}):
        tree = _composed({"a": TENSOR, "b": 4}, planner_data)
        entries = entries_of(tree, "here")
        assert entries.planner_data == planner_data
        assert entries.values == {"b": 4}
    names = {f"a.{number}": ("a", number) for number in range(2000)} | {"a": ("a",)}
    tree = _composed(dict.fromkeys(names, TENSOR), names)
    assert entries_of(tree, "here").planner_data == names
    with pytest.raises(everystep.UnsupportedState, match="planner_data"):
        _composed({"a": TENSOR}, object())


@pytest.mark.parametrize(
    "value",
    [
        object(),
        torch.ones(2),
        [torch.ones(2)],
        {"x": object()},
        "x" * 100_000,
        ["x" * 1000] * 100,
        1 << (1 << 20),
        list(range(2000)),
        Subclass("x"),
    ],
    ids=["object", "tensor", "tensors", "inside", "text", "texts", "number", "many", "subclass"],
)
def test_what_is_more_than_a_value_is_left_to_pickle(value: object) -> None:
    with pytest.raises(NotPlain):
        plain_node(value)


def test_records_that_no_writer_made_are_damage() -> None:
    tree = _composed({"a": TENSOR, "b": 4}, {"a": ("a",), "b": ("b",)})
    for change in (
        {"values": [["b", ["elsewhere"]]]},
        {"values": [["b", []]]},
        {"values": 3},
        {"planner": "pickle"},
        {"bytes": [1]},
        {"properties": [["a", {"layout": "x"}]]},
        {"unknown": 1},
    ):
        damaged = copy.deepcopy(tree)
        damaged["$state_dict"][0]["everystep.integrations.dcp"].update(change)
        with pytest.raises(everystep.CorruptCheckpoint, match="here"):
            entries_of(damaged, "here")
