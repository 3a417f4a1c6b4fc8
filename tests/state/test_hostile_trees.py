"""Promise: a tree from a damaged or hostile file is a typed error, in bounded time, and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import CorruptCheckpoint, EverystepError, UnsupportedState
from everystep.state import LeafMeta, Restore, flatten, leaf_names, unflatten, values
from everystep.state.unflatten import _CONTAINERS
from everystep.state.value_decoder import DECODERS


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):
        return False
    return True


TAGS = sorted({*DECODERS, *_CONTAINERS, "$leaf", "$new", "$"})

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**64), 2**64),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(
            ["a", "00", "ff" * 8, "AAAA", "str", "bytes", "<f4", "|O", "<f8", "posix", "cuda:0", "w", "0x1f"]
        ),
        st.integers(-5, 3000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=9),
        st.dictionaries(st.one_of(st.text(max_size=4), st.sampled_from(TAGS)), inner, max_size=3),
        st.sampled_from(TAGS).flatmap(lambda tag: inner.map(lambda body: {tag: body})),
        st.sampled_from(TAGS).flatmap(lambda tag: st.lists(inner, max_size=9).map(lambda body: {tag: body})),
    ),
    max_leaves=15,
)


def complaint(work: Callable[[], object], kind: type[Exception]) -> str:
    """What an allowed error says, or nothing. Any other error fails the test."""
    try:
        work()
    except kind as error:
        return str(error)
    return ""


@settings(max_examples=150)
@given(json_values)
def test_any_json_decodes_or_is_corrupt(tree: Any) -> None:
    arrays = {"w": np.zeros(2), "a": np.zeros(1)}
    for use in (
        lambda: unflatten(tree, arrays),
        lambda: values(tree),
        lambda: list(leaf_names(tree)),
    ):
        assert len(complaint(use, CorruptCheckpoint)) < 2000


@settings(max_examples=150)
@given(json_values)
def test_any_json_restores_or_is_a_everystep_error(tree: Any) -> None:
    leaves = {"w": LeafMeta("w", "F64", (2,), "numpy"), "a": LeafMeta("a", "F64", (1,), "numpy")}
    target = {"a": np.zeros(1), "": {"w": np.zeros(2), "n": 1}, "l": [np.zeros(1), 2]}

    def put_back() -> None:
        plan = Restore(target, tree, leaves, {})
        plan.finish({name: np.zeros(leaves[name].shape) for name in plan.fresh})

    assert len(complaint(put_back, EverystepError)) < 5000


@pytest.mark.parametrize(
    "tree",
    [
        {"$leaf": 1},
        {"$leaf": ["w"]},
        {"$leaf": "absent"},
        {"$unknown": 1},
        {"$tuple": {"a": 1}},
        {"$tuple": [1], "b": 2},
        {"a": 1, "$b": 2},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [[{"$dict": []}, 1]]},
        {"$dict": [[1, 2], [True, 3]]},
        {"$dict": [[{"$leaf": "w"}, 1]]},
        {"$set": [[1]]},
        {"$set": [1, 1.0]},
        {"$set": [{"$leaf": "w"}]},
        {"$frozenset": 3},
        *([] if _hashable(np.timedelta64(1)) else [{"$set": [{"$np": ["<m8", "0100000000000000"]}]}]),
        {"$deque": [[1, 2], 1]},
        {"$deque": [[], -1]},
        {"$deque": [[], True]},
        {"$deque": [1, None]},
        {"$state_dict": []},
        {"$state_dict": [{"$leaf": "w"}]},
        {"$int": "12a"},
        {"$int": 12},
        {"$int": "١٢"},
        {"$int": "9" * 5000},
        {"$float": "00"},
        {"$float": "zz" * 8},
        {"$complex": [1, 2]},
        {"$complex": [1.0]},
        {"$str": "____"},
        {"$str": "/w=="},
        {"$bytes": "é"},
        {"$bytes": [1]},
        {"$datetime": [2024, 13, 1, 0, 0, 0, 0, 0, None]},
        {"$datetime": [2024, 1, 1]},
        {"$datetime": [2024, 1, 1, 0, 0, 0, 0, 2, None]},
        {"$datetime": [2024, 1, 1, 0, 0, 0, 0, 0, {"$zoneinfo": "../../etc/passwd"}]},
        {"$zoneinfo": "/etc/passwd"},
        {"$zoneinfo": "No/Such_Zone"},
        {"$timezone": [5, 0, 0, None]},
        {"$timedelta": [10**12, 0, 0]},
        {"$date": [0, 1, 1]},
        {"$time": [25, 0, 0, 0, 0, None]},
        {"$path": 3},
        {"$purepath": ["mac", "x"]},
        {"$np": ["|O", "00" * 8]},
        {"$np": ["<f4", "00"]},
        {"$np": ["i4,i4", "00" * 8]},
        {"$np": ["(1000000000,)f8", ""]},
        {"$np": ["|V999999999", "00"]},
        {"$np": ["__import__", "00"]},
        {"$npdtype": "i4,i4"},
        {"$npdtype": "object"},
        {"$npdtype": 5},
        {"$torch.dtype": "load"},
        {"$torch.dtype": "__name__"},
        {"$torch.device": "cuda:0; import os"},
        {"$torch.device": "toaster"},
        {"$torch.size": ["1"]},
        {"$torch.size": 4},
        2**53 + 1,
        float("nan"),
        float("inf"),
    ],
    ids=str,
)
def test_each_malformed_node_is_corrupt(tree: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="tree is malformed"):
        unflatten({"x": tree} if not isinstance(tree, dict) else tree, {"w": np.zeros(2)})


def test_the_error_names_the_given_file() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"run/step-1/manifest\.json") as caught:
        unflatten({"$nope": 1}, {}, where="run/step-1/manifest.json")
    assert caught.value.path == "run/step-1/manifest.json"
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        values({"$nope": 1}, where="manifest.json")


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: {"$tuple": [x]}, lambda x: {"$dict": [[1, x]]}]
)
def test_deep_nesting_is_corrupt_and_not_a_recursion_error(wrap: Any) -> None:
    tree: Any = {"$leaf": "w"}
    for _ in range(5000):
        tree = wrap(tree)
    for use in (lambda: unflatten(tree, {"w": 0}), lambda: list(leaf_names(tree)), lambda: values(tree)):
        with pytest.raises(CorruptCheckpoint, match="deeper"):
            use()


def test_a_huge_hexadecimal_integer_takes_linear_time() -> None:
    assert unflatten({"$int": "-0x" + "f" * 1_000_000}, {}) == -(16**1_000_000 - 1)


def _same_hash(count: int) -> list[dict[str, str]]:
    return [{"$int": str(n * (2**61 - 1))} for n in range(1, count + 1)]


@pytest.mark.parametrize(
    "tree",
    [
        {"$set": _same_hash(200_000)},
        {"$frozenset": _same_hash(200_000)},
        {"$dict": [[key, 0] for key in _same_hash(200_000)]},
        {"$odict": [[key, 0] for key in _same_hash(200_000)]},
        {"$dict": [[{"$frozenset": _same_hash(200_000)}, 0]]},
    ],
)
def test_keys_made_to_collide_are_refused_before_they_are_compared(tree: Any) -> None:
    """Filling a set with them would take minutes: each is compared with all before it."""
    with pytest.raises(CorruptCheckpoint, match="more than 1000 keys with the same hash"):
        unflatten(tree, {})


def test_what_readers_refuse_for_its_hashes_is_not_saved() -> None:
    some, many = ([n * (2**61 - 1) for n in range(1, count)] for count in (1001, 1002))
    assert unflatten(flatten({"x": set(some)}).tree, {}) == {"x": set(some)}
    for state in ({"x": set(many)}, {"x": frozenset(many)}, {"x": dict.fromkeys(many)}):
        with pytest.raises(UnsupportedState, match=r"x.*same hash"):
            flatten(state)
