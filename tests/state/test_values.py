"""Promise: a value comes back with the same type and the same bits, or is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import math
import random
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import everystep
from everystep.errors import UnsupportedState
from everystep.state import flatten, unflatten, values
from support.states.memory_store import round_trip, through_json


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(*keys) and same(one[keys[0]], other[keys[1]]) for keys in zip(one, other, strict=True)
        )
    if isinstance(one, Namespace):
        return same(vars(one), vars(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, set | frozenset):
        # NaN is unequal to itself, so sets are compared by what their members look like.
        return sorted(map(described, one)) == sorted(map(described, other))
    if isinstance(one, dt.datetime | dt.time):
        return repr(one) == repr(other) and one.fold == other.fold and same(one.tzinfo, other.tzinfo)
    return bool(one == other)


def described(value: Any) -> str:
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex()}"
    if isinstance(value, np.generic):
        return f"{type(value)} {value.dtype} {value.tobytes().hex()}"
    if isinstance(value, complex):
        return f"complex {described(value.real)} {described(value.imag)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(described, value))}"
    return f"{type(value)} {value!r}"


floats_with_payload = st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0]
)
any_text = st.text(st.characters(codec=None, categories=None))  # lone surrogates too
zones = st.one_of(
    st.none(),
    st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone),
    st.just(dt.timezone(dt.timedelta(hours=1), "half past")),
    st.sampled_from(["Europe/Rome", "UTC", "America/Argentina/Buenos_Aires"]).map(ZoneInfo),
)
numpy_scalars = st.one_of(
    st.tuples(
        st.sampled_from(["?", *"bBhHiIlLqQefdFD", "m8[us]", "M8[ns]"]), st.binary(min_size=16, max_size=16)
    ).map(lambda made: np.frombuffer(made[1], made[0])[0] if made[0] != "?" else np.bool_(made[1][0] & 1)),
    st.floats().map(np.longdouble),
    any_text.filter(lambda text: "\0" not in text).map(np.str_),
    st.binary().map(np.bytes_),
    st.sampled_from([np.datetime64("2024-02-29T12:00", "ns"), np.datetime64("NaT"), np.timedelta64(3, "W")]),
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**60), 2**60),
    st.floats(),
    floats_with_payload,
    st.complex_numbers(),
    any_text,
    st.binary(),
    st.dates(),
    st.datetimes(timezones=zones),
    st.times().flatmap(lambda time: zones.map(lambda zone: time.replace(tzinfo=zone, fold=1))),
    st.timedeltas(),
    numpy_scalars,
    st.sampled_from(
        [
            Path("a/b"),
            PurePosixPath("/x"),
            PureWindowsPath("C:\\x"),
            torch.bfloat16,
            torch.Size([2, 3]),
            torch.device("cuda:1"),
            dt.timezone.utc,
            ZoneInfo("Europe/Rome"),
        ]
    ),
)


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except ValueError:  # numpy's time spans without a unit
        return False
    return True


def attributes(namespace: Namespace, held: dict[str, Any]) -> Namespace:
    """Attributes of any name, "self" too."""
    vars(namespace).update(held)
    return namespace


hashables = st.recursive(
    atoms.filter(is_hashable),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=5,
)
any_value = st.recursive(
    st.one_of(
        atoms,
        st.binary().map(bytearray),
        st.sampled_from([np.dtype("<f4"), np.dtype("M8[ns]"), np.dtype("q")]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(any_text, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4).map(OrderedDict),
        st.dictionaries(hashables, st.integers(), max_size=4).map(Counter),
        st.dictionaries(any_text, inner, max_size=4).map(lambda held: attributes(Namespace(), held)),
        st.builds(
            defaultdict,
            st.sampled_from([None, list, int, frozenset]),
            st.dictionaries(hashables, inner, max_size=4),
        ),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.lists(inner, max_size=4).flatmap(
            lambda items: st.sampled_from([None, 4, 10]).map(lambda limit: deque(items, limit))
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(any_value)
@example({"$leaf": "model.w"})
@example({"$": 1, "a": 2})
@example({1: "a", (True, None): [float("nan")]})
@example([-0.0, 1e22, 5e-324, math.inf, 2**53, 2**53 + 1, -(2**53) - 1])
@example(10**5000)
def test_any_value_comes_back_with_its_type_and_bits(value: Any) -> None:
    flat = flatten({"v": value})
    assert flat.leaves == ()
    back = unflatten(through_json(flat.tree), {})
    assert same(back, {"v": value})


@settings(max_examples=100)
@given(any_value)
def test_any_value_survives_any_json_library(value: Any) -> None:
    import json

    tree = json.loads(json.dumps(flatten([value]).tree, allow_nan=False))
    assert same(unflatten(tree, {}), [value])


def test_numpy_text_keeps_trailing_nul_characters() -> None:
    for value in (np.str_("ab\0"), np.bytes_(b"ab\0\0")):
        assert same(round_trip(value), value)
        assert len(round_trip(value)) == len(value)


def test_signalling_nan_keeps_its_payload() -> None:
    quiet_bit_clear = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]
    assert struct.pack(">d", round_trip(quiet_bit_clear)).hex() == "7ff0000000000001"
    narrow = np.frombuffer(bytes.fromhex("0100a0ff"), "<f4")[0]
    assert round_trip(narrow).tobytes().hex() == "0100a0ff"


def test_numpy_integers_of_equal_size_keep_their_own_type() -> None:
    for kind in (np.intc, np.int_, np.longlong, np.uintc, np.uint, np.ulonglong):
        assert type(round_trip(kind(7))) is kind


def test_utc_comes_back_as_the_singleton() -> None:
    assert round_trip(dt.timezone.utc) is dt.timezone.utc


def test_times_without_a_unit_and_huge_integers_can_be_values_and_keys() -> None:
    unitless = np.frombuffer(bytes(7) + b"\1", "<m8")[0]
    assert round_trip([unitless])[0].tobytes() == unitless.tobytes()
    assert round_trip({10**5000: np.zeros(1)}).keys() == {10**5000}
    assert values(flatten({10**5000: 1}).tree) == {"int": 1}


def test_ambiguous_hour_keeps_its_fold() -> None:
    late = dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Rome"), fold=1)
    assert round_trip(late).utcoffset() == late.utcoffset() != late.replace(fold=0).utcoffset()


def test_order_of_dicts_is_kept() -> None:
    state = {"z": 1, "a": 2, "m": {3: 1, 1: 2}}
    back = round_trip(state)
    assert list(back) == ["z", "a", "m"]
    assert list(back["m"]) == [3, 1]


def test_every_torch_dtype_is_a_value() -> None:
    for dtype in {found for found in vars(torch).values() if isinstance(found, torch.dtype)}:
        assert round_trip(dtype) is dtype


def test_numpy_dtypes_are_values_and_ml_dtypes_too() -> None:
    import ml_dtypes

    for dtype in (
        *map(np.dtype, ("f4", ">f8", "U7", "S3", "V5", "m8[25s]", "O", "?", "g", "q")),
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(ml_dtypes.float8_e5m2),
    ):
        assert round_trip(dtype) == dtype
        assert round_trip(dtype).char == dtype.char


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Name("x"),
        Point(1, 2),
        defaultdict(lambda: 0),
        defaultdict(collections.OrderedDict),
        collections.UserDict(),
        object(),
        int,
        np.float32,
        lambda: None,
        range(3),
        slice(1),
        Ellipsis,
        dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()),
        np.zeros(1, [("a", "f4")])[0],
        np.dtype([("a", "f4")]),
        torch.strided,
        memoryview(b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_as_itself_is_refused_by_place_and_type(value: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"run\.0\.odd") as caught:
        flatten({"run": [{"odd": value}]})
    assert isinstance(caught.value, TypeError)


@dataclasses.dataclass
class Options:
    rate: float = 0.5


class Easy(dict[str, Any]):
    """As EasyDict and others: dicts of their own kind, all the way down."""


class Locked:
    """As ml_collections.ConfigDict."""

    def to_dict(self) -> dict[str, Any]:
        return {"rate": 0.5}


@pytest.mark.parametrize(
    ("value", "said", "instead"),
    [
        (Options(), r"dataclasses\.asdict\(\.\.\.\) of it", dataclasses.asdict),
        (Colour.RED, "its name or its value", lambda value: [value.name, value.value]),
        (Point(1, 2), r"its _asdict\(\)", lambda value: value._asdict()),
        (Locked(), r"its to_dict\(\)", lambda value: value.to_dict()),
        (Easy(a=Easy(b=1)), r"dict\(\.\.\.\) of it instead, and of those inside", lambda _: {"a": {"b": 1}}),
        (Easy(a=1), r"dict\(\.\.\.\) of it instead$", dict),
        (SimpleNamespace(a=1), r"vars\(\.\.\.\) of it instead$", vars),
        (collections.UserDict(a=1), r"dict\(\.\.\.\) of it instead$", dict),
        (MappingProxyType({"a": 1}), r"dict\(\.\.\.\) of it instead$", dict),
        (defaultdict(lambda: 0), r"by <lambda>, .*dict\(\.\.\.\) of it instead$", dict),
        (defaultdict(partial(int, 3)), r"by functools\.partial, .*dict\(\.\.\.\) of it instead$", dict),
        (np.random.default_rng(), r"everystep\.rng\(\.\.\.\) of it", everystep.rng),
        (np.random.RandomState(), r"everystep\.rng\(\.\.\.\) of it", everystep.rng),
        (random.Random(), r"everystep\.rng\(\.\.\.\) of it", everystep.rng),
        (torch.Generator(), r"everystep\.rng\(\.\.\.\) of it", everystep.rng),
    ],
)
def test_a_refusal_says_what_to_store_and_that_can_be_stored(value: Any, said: str, instead: Any) -> None:
    with pytest.raises(UnsupportedState, match=said):
        flatten({"odd": value})
    flatten({"odd": instead(value)})


def test_a_refused_attrs_instance_says_what_to_store() -> None:
    attrs = pytest.importorskip("attrs")
    value = attrs.make_class("Options", ["rate"])(0.5)
    with pytest.raises(UnsupportedState, match=r"attrs\.asdict\(\.\.\.\) of it"):
        flatten({"odd": value})
    assert round_trip(attrs.asdict(value)) == {"rate": 0.5}


@pytest.mark.parametrize(
    "value", [{Colour.RED: 1}, {Point(1, 2): 1}, {torch.zeros(1): 1}, {object()}, {Name("k"): 1}]
)
def test_odd_keys_and_members_are_refused_by_place(value: Any) -> None:
    with pytest.raises(UnsupportedState, match="at 'odd"):
        flatten({"odd": value})


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {1: x}, lambda x: OrderedDict(a=x), deque]
)
def test_a_hundred_levels_are_fine_and_more_are_refused(wrap: Any) -> None:
    def nested(levels: int) -> Any:
        value: Any = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
        for _ in range(levels):
            value = wrap([value]) if wrap is deque else wrap(value)
        return value

    tree = flatten(nested(100)).tree
    assert depth(tree) <= 320, "format allows 330 levels of JSON"
    back = unflatten(through_json(tree), {})
    for _ in range(100):
        (back,) = back.values() if isinstance(back, dict) else back
    assert back == dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
    with pytest.raises(UnsupportedState, match="100 levels"):
        flatten(nested(101))


def depth(node: Any) -> int:
    if isinstance(node, dict):
        return 1 + max(map(depth, node.values()), default=0)
    if isinstance(node, list):
        return 1 + max(map(depth, node), default=0)
    return 0


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop += [loop, loop]
    with pytest.raises(UnsupportedState, match="holds itself"):
        flatten(loop)


def test_values_are_listed_by_dotted_name() -> None:
    state = {
        "epoch": 3,
        "cfg": {"lr": 0.1, "betas": (0.9, 0.99), "empty": {}},
        "mixed": [np.zeros(2), 7, {"deep": "x"}],
        "tags": ["a", "b"],
        5: None,
    }
    listed = values(through_json(flatten(state).tree))
    assert listed == {
        "epoch": 3,
        "cfg.lr": 0.1,
        "cfg.betas": (0.9, 0.99),
        "cfg.empty": {},
        "mixed.1": 7,
        "mixed.2.deep": "x",
        "tags": ["a", "b"],
        "5": None,
    }


def test_values_with_the_same_dotted_name_are_all_listed() -> None:
    assert values(flatten({"a": {"b": 1}, "a.b": 2, 3: "int", "3": "str"}).tree) == {
        "a.b": 1,
        "a.b~1": 2,
        "3": "int",
        "3~1": "str",
    }


def test_a_bare_value_is_a_state() -> None:
    assert round_trip(7) == 7
    assert values(flatten(7).tree) == {"_": 7}


def test_nodes_are_what_the_format_page_says() -> None:
    def text(value: Any) -> str:
        return msgspec.json.encode(flatten(value).tree).decode()

    assert text({"a": 1, "b": [True, None, "x", 1.5, 1.0]}) == '{"a":1,"b":[true,null,"x",1.5,1.0]}'
    assert text({"a": (1, 2)}) == '{"a":{"$tuple":[1,2]}}'
    assert text(2**53 + 1) == '{"$int":"9007199254740993"}'
    assert text(math.inf) == '{"$float":"7ff0000000000000"}'
    assert text(b"hi") == '{"$bytes":"aGk="}'
    assert text({1: 2}) == '{"$dict":[[1,2]]}'
    assert text(OrderedDict(a=1)) == '{"$odict":[["a",1]]}'
    assert text(Counter("a")) == '{"$counter":[["a",1]]}'
    assert text(Namespace(lr=1)) == '{"$namespace":[["lr",1]]}'
    assert text(defaultdict(list, a=1)) == '{"$defaultdict":["list",["a",1]]}'
    assert text(defaultdict(None, a=1)) == '{"$defaultdict":[null,["a",1]]}'
    assert text(deque([1], 3)) == '{"$deque":[[1],3]}'
    assert text(np.float32(1)) == '{"$np":["<f4","0000803f"]}'
    assert text(torch.bfloat16) == '{"$torch.dtype":"bfloat16"}'
    assert text(torch.device("cuda", 0)) == '{"$torch.device":"cuda:0"}'
    assert text(np.zeros(1)) == '{"$leaf":"_"}'
