"""What a save reports durable can be read: whatever readers refuse, writers refuse first."""

from __future__ import annotations

import datetime as dt
import io
import itertools
import sys
import tempfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everystep
from everystep.errors import UnsupportedState
from everystep.format import manifest, shard
from everystep.format.shard import HeaderEntry, build_header


@pytest.mark.parametrize("limit", [0, 2**53, 2**53 + 1, sys.maxsize])
def test_a_deque_of_any_limit_comes_back(tmp_path: Path, limit: int) -> None:
    everystep.save(tmp_path / "c", {"d": deque(maxlen=limit)})
    assert everystep.load(tmp_path / "c")["d"].maxlen == limit


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones((1,) * 65), "an array of 65 dimensions, more than 64"),
        (torch.empty(2**62, 0), "an empty array of shape"),
        (torch.empty(2**60, 0, dtype=torch.complex128), "an empty array of shape"),
    ],
)
def test_shapes_that_no_reader_takes_are_refused(tmp_path: Path, tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(UnsupportedState, match=f"'model.w': {reason}"):
        everystep.save(tmp_path / "c", {"model": {"w": tensor}})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("tensor", [torch.ones((1,) * 64), torch.empty(2**60, 0)])
def test_the_largest_shapes_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    everystep.save(tmp_path / "c", {"w": tensor})
    assert everystep.load(tmp_path / "c")["w"].shape == tensor.shape


@pytest.mark.parametrize("small_nbytes", [0, 1 << 20])
def test_punctuation_in_texts_is_not_counted_as_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_nbytes: int
) -> None:
    monkeypatch.setattr(manifest, "MAX_NODES", 1000)
    options = everystep.Options(small_nbytes=small_nbytes)
    state = {"log": ',[{"\\' * 1000, "w": np.zeros(3)}
    everystep.save(tmp_path / "c", state, options=options)
    assert everystep.load(tmp_path / "c")["log"] == state["log"]
    with pytest.raises(UnsupportedState, match="more than 1000 values"):
        everystep.save(tmp_path / "d", {"log": [1] * 1001}, options=options)


def test_a_manifest_longer_than_readers_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_ROOT_NBYTES", 4096)
    with pytest.raises(UnsupportedState, match="exceeds the limit"):
        everystep.save(tmp_path / "c", {"log": "x" * 5000}, options=everystep.Options(small_nbytes=0))


def test_a_header_with_more_braces_than_readers_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_ENTRIES", 10)
    with pytest.raises(UnsupportedState, match="more than readers accept"):
        build_header([HeaderEntry("{" * 20, "U8", (0,), 0, 0)], {})


def test_a_time_zone_that_only_this_process_knows_is_refused() -> None:
    utc = io.BytesIO(b"TZif" + b"\0" * 16 + b"".join(n.to_bytes(4, "big") for n in (0, 0, 0, 0, 1, 4)))
    utc.seek(0, io.SEEK_END)
    utc.write(b"\0" * 6 + b"UTC\0")
    utc.seek(0)
    with pytest.raises(UnsupportedState, match="time zone database"):
        everystep.state.flatten({"zone": ZoneInfo.from_file(utc, key="Our/Own")})


# --- any state that can be saved can be loaded --------------------------------------------------------------

texts = st.text(st.characters(), max_size=5) | st.sampled_from(["", "$leaf", "$", "@0", "@3.a", "~1", "a.b"])
numbers = (
    st.integers()
    | st.integers(50, 2200).map(lambda bits: 1 - (1 << bits))
    | st.floats()
    | st.complex_numbers()
)
times = st.datetimes(timezones=st.timezones() | st.none()) | st.timedeltas() | st.dates() | st.times()
small = st.sampled_from(
    [
        None,
        True,
        np.float32("nan"),
        np.longdouble(3),
        np.datetime64("NaT"),
        np.timedelta64(3, "s"),
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.dtype("S0"),
        torch.float8_e5m2,
        torch.Size([2**53, 1]),
        torch.device("cuda:127"),
        dt.timezone(dt.timedelta(hours=3), "\ud800"),
        Path("a"),
    ]
)
values = small | numbers | texts | times | st.binary(max_size=5)
keys = st.deferred(
    lambda: st.recursive(
        values, lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2)
    )
)
ARRAYS: list[Any] = [
    np.zeros((3, 0, 2)),
    np.zeros((), "S3"),
    np.zeros(2, "M8[ns]"),
    np.ones((1,) * 64, ">c16"),
    torch.empty(2**60, 0),
    torch.empty(2**62, 0),
    torch.ones((1,) * 65),
    torch.ones((1,) * 64, dtype=torch.complex128),
    torch.ones(1).expand(3),
    torch.arange(6).reshape(2, 3).t(),
]
arrays = st.integers(0, len(ARRAYS) - 1).map(ARRAYS.__getitem__)  # what they are makes no names


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.dictionaries(keys, inner, max_size=3)
    limits = st.none() | st.integers(3, sys.maxsize) | st.just(sys.maxsize)
    return (
        items
        | items.map(tuple)
        | st.builds(deque, items, limits)
        | st.dictionaries(texts, inner, max_size=3)
        | pairs
        | pairs.map(OrderedDict)
        | pairs.map(lambda found: Counter(found) if all(map(_is_number, found.values())) else found)
        | st.sets(keys, max_size=3)
    )


def _is_number(value: object) -> bool:
    return type(value) is int


def nested(value: object, depth: int, kinds: tuple[int, ...]) -> object:
    """The value inside of so many containers, of kinds that take turns."""
    wraps = [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {"a": inner},
        lambda inner: {3: inner},
        lambda inner: deque([inner], 1),
        lambda inner: OrderedDict(a=inner),
    ]
    for kind in itertools.islice(itertools.cycle(kinds), depth):
        value = wraps[kind](value)
    return value


@given(
    inner=st.recursive(values | arrays, containers, max_leaves=8),
    depth=st.integers(0, 4) | st.integers(95, 101),
    kinds=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    way=st.sampled_from(["one file", "two files", "volume"]),
    per_rank=st.booleans(),
)
@settings(max_examples=70, deadline=None)
def test_whatever_is_saved_can_be_loaded(
    inner: Any, depth: int, kinds: tuple[int, ...], way: str, per_rank: bool
) -> None:
    state = {"state": nested(inner, depth, kinds)}
    if per_rank:
        state = {"state": everystep.per_rank(state["state"])}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "c"
        options = everystep.Options(
            small_nbytes=1 << 20 if way == "one file" else 0, volumes=[directory] if way == "volume" else []
        )
        try:
            everystep.save(path, state, options=options)
        except UnsupportedState:
            return
        assert set(everystep.load(path)) == {"state"}
        everystep.verify(path)
        everystep.load(path, into=state)
