"""Promise: a configuration of OmegaConf comes back as it was in every attribute, or is refused by name."""

from __future__ import annotations

import copy
import enum
import math
import pickle
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import everystep
from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.state import flatten, unflatten
from support.states.memory_store import through_json

omegaconf = pytest.importorskip("omegaconf")
DictConfig, ListConfig, OmegaConf = omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.OmegaConf
HAS_TUPLES = hasattr(omegaconf, "TupleConfig")
"""Since 2.4; before, OmegaConf made lists of tuples."""


def facts(node: Any) -> Any:
    """All that OmegaConf knows of a node and of those inside it: what pickle would write."""
    its = dict(vars(vars(node)["_metadata"]))
    its["resolver_cache"] = {name: found for name, found in its["resolver_cache"].items() if found}
    held = vars(node)["_content"] if "_content" in vars(node) else vars(node)["_val"]
    if isinstance(held, dict):
        assert all(inner._get_parent() is node for inner in held.values())
        inside: Any = [(repr(key), type(key), facts(inner)) for key, inner in held.items()]
    elif isinstance(held, list) and "_content" in vars(node):
        assert all(inner._get_parent() is node for inner in held)
        inside = [facts(inner) for inner in held]
    else:
        inside = (type(held), repr(held))
    return type(node), its.pop("key"), type(its.get("key")), its, inside, sorted(vars(node))


def root(node: Any) -> Any:
    while node._get_parent() is not None:
        node = node._get_parent()
    return node


def round_trip(config: Any) -> Any:
    flat = flatten({"config": config})
    assert flat.leaves == ()
    return unflatten(through_json(flat.tree), {})["config"]  # type: ignore[call-overload]


def assert_same(found: Any, config: Any) -> None:
    assert found is not config
    assert facts(found) == facts(config)
    assert facts(root(found)) == facts(root(config))
    assert found._get_full_key(None) == config._get_full_key(None)


atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.just(math.inf),
    st.text(st.characters(exclude_characters="\\$?", categories=("L", "N", "P", "Z")), max_size=6),
    st.binary(max_size=5),
    st.sampled_from([Path("a/b"), "???", "${a}", "${..a}", "${oc.env:HOME}", "x${a}y", "${a}${b}"]),
)
keys = st.one_of(
    st.sampled_from(["a", "b", "state_dict", "load_state_dict", "_metadata", "$leaf", "a.b", ""]),
    st.text(max_size=3),
    st.integers(-5, 5),
    st.booleans(),
    st.floats(allow_nan=False),
    st.binary(max_size=2),
)
containers = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def nodes(config: Any) -> Iterator[Any]:
    yield config
    held = vars(config).get("_content")
    for inner in held.values() if isinstance(held, dict) else held if isinstance(held, list) else ():
        yield from nodes(inner)


@st.composite
def configs(draw: Any) -> Any:
    content = draw(st.one_of(st.dictionaries(keys, containers, max_size=5), st.lists(containers, max_size=4)))
    try:
        config = OmegaConf.create(content)
    except omegaconf.errors.OmegaConfBaseException:  # tuples with missing members and the like
        reject()
    everything = list(nodes(config))
    for node in draw(st.lists(st.sampled_from(everything), max_size=3)):
        flag = draw(st.sampled_from(["readonly", "struct", "allow_objects"]))
        node._set_flag(flag, draw(st.sampled_from([True, False, None])))
    inner = [node for node in everything if OmegaConf.is_config(node)]
    chosen = draw(st.sampled_from(inner))
    return copy.deepcopy(chosen) if draw(st.booleans()) else chosen


@settings(max_examples=150)
@given(configs())
def test_a_random_configuration_comes_back_as_it_was(config: Any) -> None:
    assert_same(round_trip(config), config)
    assert facts(round_trip(config)) == facts(pickle.loads(pickle.dumps(config)))


@pytest.mark.slow
@settings(max_examples=5_000)
@given(configs())
def test_many_random_configurations_come_back_as_they_were(config: Any) -> None:
    assert_same(round_trip(config), config)


def test_typed_nodes_keep_their_types() -> None:
    typed = DictConfig(
        {"a": [1], "b": [2, 3]},
        key_type=str,
        element_type=typing.List[int],  # noqa: UP006
        flags={"struct": True},
    )
    for config in (
        typed,
        DictConfig({"a": 1.5, "b": None}, element_type=typing.Optional[float]),  # noqa: UP045
        ListConfig(["a", "???"], element_type=str),
        DictConfig({1: {"x": True}}, key_type=int, element_type=typing.Dict[str, bool]),  # noqa: UP006
        DictConfig({"p": Path("a"), "q": "${p}"}, element_type=Path),
        DictConfig({"p": b"a"}, element_type=bytes),
        DictConfig(None),
        DictConfig("???"),
        ListConfig("${x}", parent=OmegaConf.create({"x": [1]})),
        OmegaConf.create({"x": None, "l": []}),
        DictConfig({}, element_type=typing.Union[int, str]),  # noqa: UP007
        OmegaConf.create({"large": b"x" * 100_000, "$leaf": "a", "$dict": {"$tuple": []}}),
    ):
        assert_same(round_trip(config), config)
    restored = round_trip(typed)
    with pytest.raises(ValueError, match="could not be converted to Integer"):
        restored.a.append("text")
    with pytest.raises(AttributeError):
        restored.c = [1]


def test_interpolations_reach_into_what_a_part_belongs_to() -> None:
    whole = OmegaConf.create({"width": 8, "model": {"layers": [{"out": "${width}"}, {"out": "${..0.out}"}]}})
    OmegaConf.set_readonly(whole, True)
    layer = round_trip(whole.model.layers[0])
    assert layer == {"out": 8}
    assert layer._get_parent().__class__ is ListConfig
    assert OmegaConf.is_readonly(layer)
    copied = round_trip(copy.deepcopy(whole.model))
    assert copied.layers[0].out == 8
    assert copied is not root(copied).model


def test_results_of_resolvers_are_remembered() -> None:
    drawn = iter(range(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the name for 2.3 and 2.4
        OmegaConf.register_new_resolver("test.draw", lambda *_: next(drawn), use_cache=True, replace=True)
        OmegaConf.register_new_resolver("test.list", lambda: [1], use_cache=True, replace=True)
    config = OmegaConf.create({"a": "${test.draw:x}", "b": "${test.draw:y}"})
    assert (config.b, config.a) == (0, 1)
    restored = round_trip(config)
    assert (restored.a, restored.b) == (1, 0)
    several = OmegaConf.create({"l": "${test.list:}"})
    assert several.l == [1]
    with pytest.raises(UnsupportedState, match=r"'config'.*'test\.list' returned.*clear_cache"):
        flatten({"config": several})


class Kind(enum.Enum):
    ONE = 1


@dataclass
class Structured:
    a: int = 1


class Mine(DictConfig):  # type: ignore[misc,valid-type]
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OmegaConf.structured(Structured), r"at 'config'.*Structured.*to_container"),
        (lambda: OmegaConf.create({"x": {"s": Structured()}}), r"at 'config\.x\.s'.*Structured"),
        (lambda: OmegaConf.create({"e": [Kind.ONE]}), r"at 'config\.e\.0'.*Kind.*its name or its value"),
        (lambda: OmegaConf.create({Kind.ONE: 1}), r"at 'config'.*Kind"),
        (lambda: DictConfig({"e": Kind.ONE}, element_type=Kind), r"at 'config'.*Kind"),
        (lambda: OmegaConf.create({"o": object()}, flags={"allow_objects": True}), r"config\.o.*object"),
        (lambda: Mine({}), r"at 'config'.*Mine"),
        (lambda: [Structured], r"config\.0.*class.*Structured"),
    ],
)
def test_classes_of_the_user_are_refused_by_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UnsupportedState, match=said):
        flatten({"config": make()})


def test_what_the_refusal_advises_can_be_stored() -> None:
    config = OmegaConf.structured(Structured)
    plain = OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True))
    assert_same(round_trip(plain), plain)


def test_the_classes_themselves_are_values() -> None:
    assert round_trip([DictConfig, ListConfig]) == [DictConfig, ListConfig]


def test_saved_and_restored(tmp_path: Path) -> None:
    config = OmegaConf.create({"lr": 0.1, "name": "run-${lr}", "missing": "???", "state_dict": 1})
    OmegaConf.set_struct(config, True)
    everystep.save(tmp_path / "c", {"config": config, "step": 1})
    assert_same(everystep.load(tmp_path / "c")["config"], config)
    for there in (OmegaConf.create({"lr": 3}), None, {}, 7):
        into = {"config": there, "step": 0}
        everystep.load(tmp_path / "c", into=into)
        assert_same(into["config"], config)
    with everystep.Shelf(tmp_path / "shelf") as shelf:
        shelf["config"] = config
        assert_same(shelf["config"], config)


def test_without_omegaconf_they_are_plain_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({"a": [1, "${b}"], "b": "???", 3: {"x": (1, None)}})
    trees = [flatten(state).tree for state in (config, config[3], copy.deepcopy(config[3]), DictConfig)]
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.warns(RuntimeWarning, match="omegaconf is not installed.*pip install omegaconf"):
        found = [unflatten(through_json(tree), {}) for tree in trees]
    inner: Any = (1, None) if HAS_TUPLES else [1, None]
    assert found == [{"a": [1, "${b}"], "b": "???", 3: {"x": inner}}, {"x": inner}, {"x": inner}, dict]


def top(content: Any, **facts: Any) -> Any:
    """A configuration that is part of no other."""
    kind = "ListConfig" if isinstance(content, list) else "DictConfig"
    return [[kind, facts, content]]


def remembering(cache: Any) -> Any:
    return top({}, resolver_cache=cache)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        ["top"],
        [None],
        [3],
        [{"a": 1}],
        {"a": 1},
        [["AnyNode", {}, 1]],
        [["DictConfig", {}]],
        [["DictConfig", None, {}]],
        [["UnionNode", {}, {}]],
        [[["DictConfig"], {}, {}]],
        [[{"a": 1}, {}, {}]],
        [["DictConfig", {}, [["a", 1]]]],
        [["ListConfig", {}, {"a": 1}]],
        top(3),
        top({"$dict": [["a"]]}),
        top({"$dict": [["a", 1], ["a", 2]]}),
        top({"$dict": [[1, 1], [True, 2]]}),
        top({"$dict": [[None, 1]]}),
        top({"$dict": [[{"$tuple": ["a"]}, 1]]}),
        top({"$dict": [[{"$leaf": "w"}, 1]]}),
        top({"a": {"$leaf": "w"}}),
        top({"a": {"b": 1}}),
        top({"a": {"$tuple": []}}),
        top({"a": {"$set": [1]}}),
        top({"a": {"$omegaconf": top({})}}),
        top({"a": {"$int": "x"}}),
        top({"a": 2**60}),
        top({"a": ["IntegerNode", {}, 1.5]}),
        top({"a": ["PathNode", {}, 1]}),
        top([["ListConfig", {}, [["nope", {}, []]]]]),
        top([["ListConfig", {}]]),
        top({}, optional=1),
        top({}, flags={"a b": True}),
        top({}, flags={"readonly": "x"}),
        top({}, flags={"$dict": [[1, True]]}),
        top({}, flags=[]),
        top({}, more=1),
        [["DictConfig", {"$dict": [[1, 1]]}, {}]],
        top({}, key=["x"]),
        top({}, key={"$complex": [1.0, 1.0]}),
        top({}, ref_type="os"),
        top({}, ref_type=[]),
        top({}, ref_type=["List"]),
        top({}, ref_type=["Dict", "str"]),
        top({}, ref_type=["Set", "str"]),
        top({}, ref_type=[["List"], "str"]),
        top({}, key_type=["List", "int"]),
        top([], element_type="..."),
        top({"a": ["IntegerNode", {"element_type": "int"}, 1]}),
        remembering(1),
        remembering({"r": [["x", 1]]}),
        remembering({"r": {"x": 1}}),
        remembering({"r": {"$dict": [[{"$tuple": [1]}, 1]]}}),
        remembering({"$dict": [[1, {}]]}),
        [*top({"a": 1}), "a"],
        [*top({"a": 1}), "b"],
        [*top([]), 0],
        [*top([["ListConfig", {}, []]]), -1],
        [*top([["ListConfig", {}, []]]), True],
        [*top(None), "a"],
        [*top({"a": 1}), {}],
        [*top({"a": 1}), None],
        [*top({"a": 1}), []],
        [*top({"a": 1}), ["AnyNode", {}, 3]],
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_hostile_node_is_damage(body: Any, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setitem(sys.modules, "omegaconf", None)
        if "key_type" in repr(body) or body == top([], element_type="..."):
            pytest.skip("only omegaconf knows which types it can check")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CorruptCheckpoint):
            unflatten({"config": {"$omegaconf": body}}, {})


def nested(levels: int, kind: str) -> Any:
    found: Any = ["ListConfig", {}, []]
    for _ in range(levels):
        found = ["ListConfig", {}, [found]] if kind == "content" else found
    return [found] * (levels if kind == "parents" else 1)


@pytest.mark.parametrize("kind", ["content", "parents"])
def test_deep_nesting_is_damage_and_no_crash(kind: str) -> None:
    unflatten({"$omegaconf": nested(20, kind)}, {})
    with pytest.raises(CorruptCheckpoint):
        unflatten({"$omegaconf": nested(5000, kind)}, {})


def test_what_nests_too_deep_for_a_reader_is_refused(tmp_path: Path) -> None:
    """Configuration and state nest together: what is saved can be read."""
    for levels, around in ((2, 91), (30, 35)):
        content: Any = {}
        for _ in range(levels):
            content = [content]
        state: Any = OmegaConf.create({"c": content})
        for _ in range(around):
            state = {"s": state}
        everystep.save(tmp_path / f"{levels}", state)
        assert everystep.load(tmp_path / f"{levels}") == state
        with pytest.raises(UnsupportedState, match="nested deeper"):
            flatten([[state]])


@pytest.mark.parametrize("name", ["DictConfig", "ListConfig"])
def test_hostile_names_of_classes(name: str) -> None:
    assert unflatten({"$omegaconf.type": name}, {}) is getattr(sys.modules["omegaconf"], name)
    for body in ("OmegaConf", "AnyNode", "os.system", None, [name], {"x": 1}):
        with pytest.raises(CorruptCheckpoint):
            unflatten({"$omegaconf.type": body}, {})


def test_flags_that_are_overridden_for_a_moment_are_those_of_the_moment() -> None:
    config = OmegaConf.create({"a": 1})
    with omegaconf.flag_override(config, "readonly", True):
        restored = round_trip(config)
    assert OmegaConf.is_readonly(restored)
    assert not OmegaConf.is_readonly(config)
