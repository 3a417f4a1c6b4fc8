"""``everystep diff``."""

from __future__ import annotations

import math
import tempfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import everystep
from everystep.inspect import comparison
from everystep.store.stream.leaf_windows import windows
from support.processes.command import command, damage_leaf, make_run, make_state, step_path


def saved(path: Path, state: Any, **options: Any) -> Path:
    everystep.save(path, state, **options)
    return path


def differences(tmp_path: Path, a: Any, b: Any) -> Any:
    outcome = command("diff", saved(tmp_path / "a", a), saved(tmp_path / "b", b), "--json")
    assert outcome.code == (0 if outcome.document["equal"] else 1)
    return outcome.document


def test_equal_states_are_equal_whatever_their_step_and_metrics(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", make_state(), step=1, metrics={"loss": 1.0})
    b = saved(tmp_path / "b", make_state(), step=2, metrics={"loss": 2.0})
    outcome = command("diff", a, b)
    assert outcome.code == 0
    assert "equal, bit for bit: 2 leaves" in outcome.out


def test_counts_and_distances(tmp_path: Path) -> None:
    a, b = make_state(), make_state()
    b["model"]["w"][3, 4] += 0.5
    b["model"]["w"][29, 19] = math.nan
    document = differences(tmp_path, a, b)
    assert set(document) == {"equal", "a", "b", "identical", "leaves", "values", "structure", "subtrees"}
    assert set(document["a"]) == {"path", "step", "created", "leaves", "nbytes"}
    assert document["identical"] == 1
    (change,) = document["leaves"]
    assert change == {
        "name": "model.w",
        "change": "bits",
        "a": None,
        "b": None,
        "elements": 600,
        "differing": 2,
        "first": [3, 4],
        "max_abs": 0.5,
        "max_rel": pytest.approx(0.5 / 64.5),
        "not_finite": 1,
    }
    outcome = command("diff", tmp_path / "a", tmp_path / "b")
    assert outcome.code == 1
    assert any(
        line.startswith("model.w first at [3, 4], 1 not finite 2 (0.3%) 0.5 ") for line in outcome.lines
    )
    assert "1 leaf differs, 1 identical, 0 values differ" in outcome.out


@pytest.mark.parametrize("columns", ["0", "20", "40", "60"])
def test_a_narrow_terminal_keeps_names_and_numbers(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", [1, 123456])
    monkeypatch.setenv("COLUMNS", columns)
    outcome = command("diff", step_path(run, 1), step_path(run, 123456))
    assert outcome.code == 1
    rows = [line.partition(" ")[2] for line in outcome.lines if line.startswith("model.b ")]
    assert " ".join(rows).endswith("20 (100%) 1.23e+05 1")


def test_leaves_on_one_side_and_changed_shapes_and_types(tmp_path: Path) -> None:
    a = {"gone": np.zeros(1), "shape": np.zeros((2, 3)), "dtype": np.zeros(2, np.float32), "same": np.ones(2)}
    b = {"new": np.zeros(1), "shape": np.zeros((3, 2)), "dtype": np.zeros(2, np.float16), "same": np.ones(2)}
    document = differences(tmp_path, a, b)
    found = {change["name"]: (change["change"], change["a"], change["b"]) for change in document["leaves"]}
    assert found == {
        "gone": ("only in a", "F64 [1]", None),
        "new": ("only in b", None, "F64 [1]"),
        "shape": ("shape", "F64 [2, 3]", "F64 [3, 2]"),
        "dtype": ("dtype", "F32 [2]", "F16 [2]"),
    }
    assert document["identical"] == 1
    text = command("diff", tmp_path / "a", tmp_path / "b").out
    for said in ("only in A: F64 [1]", "only in B: F64 [1]", "F64 [2, 3] / F64 [3, 2]", "F32 [2] / F16 [2]"):
        assert said in text


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 1.0), (1, True), (0.0, -0.0), ([1, 2], (1, 2)), ("1", 1), (math.nan, -math.nan), (None, False)],
    ids=repr,
)
def test_values_differ_by_type_and_bits(a: object, b: object, tmp_path: Path) -> None:
    document = differences(tmp_path, {"v": a, "w": np.zeros(1)}, {"v": b, "w": np.zeros(1)})
    (change,) = document["values"]
    assert (change["name"], change["change"]) == ("v", "value")
    assert document["leaves"] == []


def test_equal_values_are_equal_even_as_nan_and_as_sets_in_another_order(tmp_path: Path) -> None:
    many = [f"name {number}" for number in range(40)]
    turned = many[::-1]
    a = {"n": math.nan, "s": set(many), "d": {"f": [frozenset(many)]}}
    b = {"n": math.nan, "s": set(turned), "d": {"f": [frozenset(turned)]}}
    assert differences(tmp_path, a, b)["equal"] is True


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ({"x": np.zeros(2), "y": np.ones(2)}, {"y": np.ones(2), "x": np.zeros(2)}),
        ({"in": {"x": np.zeros(2), "y": 1}}, {"in": {"y": 1, "x": np.zeros(2)}}),
        ({1: "x", (2, "b"): {"p": 1, "q": 2}}, {(2, "b"): {"q": 2, "p": 1}, 1: "x"}),
        ({"l": [{"x": 1, 2: 2}]}, {"l": [{2: 2, "x": 1}]}),
        ({"n": Counter(x=1, y=2)}, {"n": Counter(y=2, x=1)}),
    ],
    ids=["values", "leaves", "nested", "other keys", "inside of a value", "counter"],
)
def test_keys_of_a_plain_dict_in_another_order_are_no_difference(
    a: dict[Any, Any], b: dict[Any, Any], tmp_path: Path
) -> None:
    """Python holds them equal; and a dict with arrays keeps its own order when it is restored."""
    document = differences(tmp_path, a, b)
    assert (document["equal"], document["structure"]) == (True, [])


@pytest.mark.parametrize("inside", [False, True])
def test_an_ordered_dict_in_another_order_is_a_difference_at_a_place(inside: bool, tmp_path: Path) -> None:
    a = {"in": [OrderedDict(x=np.zeros(1), y=2), 3]}
    b = {"in": [OrderedDict(y=2, x=np.zeros(1)), 3]}
    document = differences(tmp_path, a, b) if inside else differences(tmp_path, a["in"][0], b["in"][0])
    (change,) = document["structure"]
    assert document["leaves"] == document["values"] == []
    assert change["name"] == ("in.0" if inside else "_")
    assert [change["a"], change["b"]] == [f'OrderedDict with the keys "{x}", "{y}"' for x, y in ("xy", "yx")]
    shown = " ".join(command("diff", tmp_path / "a", tmp_path / "b").lines)
    assert ("in.0 OrderedDict" in shown) is inside
    assert "1 container differs" in shown


def test_an_ordered_dict_without_arrays_in_another_order_is_a_difference(tmp_path: Path) -> None:
    document = differences(tmp_path, {"l": [OrderedDict(x=1, y=2)]}, {"l": [OrderedDict(y=2, x=1)]})
    assert [change["name"] for change in document["values"]] == ["l"]


_ARRAYS = st.integers(0, 2).map(lambda number: np.full(2, number))
_VALUES = st.none() | st.integers(0, 3) | st.sampled_from(["x", "$leaf"])
_KEYS = st.sampled_from(["a", "b", "c", "$d", 1, (1, "x")])
_STATES = st.recursive(
    _ARRAYS | _VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=2).map(lambda items: deque(items, 2))
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


def python_holds_equal(a: Any, b: Any) -> bool:
    """As Python's ``==``, with arrays by their bits and types that count everywhere."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        ordered = isinstance(a, OrderedDict)
        same = list(a) == list(b) if ordered else a.keys() == b.keys()
        return same and all(python_holds_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(python_holds_equal, a, b))
    return bool(a == b)


def shuffled(state: Any, draw: Any) -> Any:
    """The same, with the keys of its dicts in another order, and now and then another container."""
    if isinstance(state, dict):
        keys = draw(st.permutations(list(state)))
        kind = draw(st.sampled_from([type(state)] * 4 + [dict, OrderedDict]))
        return kind((key, shuffled(state[key], draw)) for key in keys)
    if isinstance(state, list | tuple):
        kind = draw(st.sampled_from([type(state)] * 6 + [list, tuple]))
        return kind(shuffled(item, draw) for item in state)
    return state


@given(st.data())
@settings(max_examples=40)
def test_two_states_are_equal_where_python_holds_them_equal(data: st.DataObject) -> None:
    a = data.draw(_STATES)
    b = shuffled(a, data.draw) if data.draw(st.booleans()) else data.draw(_STATES)
    with tempfile.TemporaryDirectory() as place:
        one, other = (saved(Path(place) / name, state) for name, state in (("a", a), ("b", b)))
        found = everystep.inspect.compare(one, other)
    assert found.equal is python_holds_equal(a, b), found


def test_values_on_one_side(tmp_path: Path) -> None:
    document = differences(tmp_path, {"old": 1}, {"new": None})
    assert [(change["name"], change["change"]) for change in document["values"]] == [
        ("old", "only in a"),
        ("new", "only in b"),
    ]
    assert "1 -" in "\n".join(command("diff", tmp_path / "a", tmp_path / "b").lines)


def test_other_containers_around_the_same_leaves_are_a_difference(tmp_path: Path) -> None:
    document = differences(tmp_path, {"l": [np.zeros(1)]}, {"l": (np.zeros(1),)})
    assert document["structure"] == [{"name": "l", "a": "list of 1", "b": "tuple of 1"}]
    assert document["leaves"] == document["values"] == []


def test_tied_leaves_that_come_apart_are_a_difference(tmp_path: Path) -> None:
    tied = np.ones(3)
    document = differences(tmp_path, {"a": tied, "b": tied}, {"a": np.ones(3), "b": np.ones(3)})
    (change,) = document["leaves"]
    assert (change["name"], change["change"], change["a"], change["b"]) == ("b", "tied", "a", None)


def test_a_difference_in_tied_leaves_shows_under_every_name(tmp_path: Path) -> None:
    one, other = np.ones(3), np.array([1.0, 2.0, 1.0])
    document = differences(tmp_path, {"a": one, "b": one}, {"a": other, "b": other})
    assert [(change["name"], change["differing"]) for change in document["leaves"]] == [("a", 1), ("b", 1)]


def test_torch_and_numpy_of_the_same_bits_differ_in_framework(tmp_path: Path) -> None:
    import torch

    document = differences(tmp_path, {"a": np.ones(3)}, {"a": torch.ones(3, dtype=torch.float64)})
    (change,) = document["leaves"]
    assert (change["change"], change["a"], change["b"]) == ("framework", "numpy", "torch")


def test_leaves_larger_than_a_window_are_compared_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "windows", lambda extents: windows(extents, 1 << 20))
    a = {"w": np.zeros((1, 3_000_000), np.float32), "odd": np.array(["x" * 5] * 100_000)}
    b = {"w": a["w"].copy(), "odd": a["odd"].copy()}
    b["w"][0, 2_999_999] = 1
    b["w"][0, 700_000] = -2
    b["odd"][99_999] = "y"
    document = differences(tmp_path, a, b)
    odd, w = sorted(document["leaves"], key=lambda change: change["name"])
    assert (w["elements"], w["differing"], w["first"], w["max_abs"]) == (3_000_000, 2, [0, 700_000], 2.0)
    assert (odd["differing"], odd["first"], odd["max_abs"]) == (1, [99_999], None)


def test_empty_and_scalar_leaves(tmp_path: Path) -> None:
    a = {"empty": np.zeros((0, 3)), "scalar": np.array(1.0)}
    b = {"empty": np.zeros((0, 3)), "scalar": np.array(3.0)}
    (change,) = differences(tmp_path, a, b)["leaves"]
    assert (change["name"], change["differing"], change["first"], change["max_abs"]) == ("scalar", 1, [], 2.0)
    assert any(
        line.startswith("scalar differs 1 (100%) 2")
        for line in command("diff", tmp_path / "a", tmp_path / "b").lines
    )


def test_runs_mean_their_newest_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    document = command("diff", step_path(run, 1), run, "--json").document
    assert (document["a"]["step"], document["b"]["step"]) == (1, 2)
    assert [change["name"] for change in document["leaves"]] == ["model.b"]


def test_damage_is_an_error_and_no_difference(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", make_state())
    b = saved(tmp_path / "b", make_state())
    damage_leaf(b, "model.w")
    outcome = command("diff", a, b, "--json")
    assert outcome.code == 1
    assert (outcome.document["error"]["type"], outcome.document["error"]["leaf"]) == (
        "CorruptCheckpoint",
        "model.w",
    )
