"""Fuzz of the parsers: anything at all is either accepted and stays accepted, or refused as corrupt.

No other exception may ever come up, whatever the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import CorruptCheckpoint
from everystep.format.manifest import decode_root, encode_root
from everystep.format.shard import parse_header
from format.test_hostile import WHERE, header, honest, many
from support.states import handmade_checkpoints as making


def decodes_or_is_refused(data: bytes) -> bool:
    try:
        root = decode_root(data, WHERE)
    except CorruptCheckpoint:
        return False
    again = encode_root(root)
    assert encode_root(decode_root(again, WHERE)) == again
    return True


def parses_or_is_refused(data: bytes) -> bool:
    try:
        parsed = parse_header(data, len(data), WHERE)
    except CorruptCheckpoint:
        return False
    assert sum(e.end - e.begin for e in parsed.entries) == len(data) - parsed.data_start
    return True


VALID_ROOT = encode_root(
    making.root(metrics={"loss": 0.5, "grad": float("inf")}, tree={"w": [{"$leaf": "w"}, 1.5]})
)
VALID_SHARD, _ = making.shard({"w": np.arange(5, dtype="<f4"), "b": np.ones(2, "<i8")}, alignment=8)


@given(st.binary(max_size=3000))
def test_fuzz_arbitrary_bytes(data: bytes) -> None:
    decodes_or_is_refused(data)
    decodes_or_is_refused(making.seal(b'{"xxh3":"' + b"0" * 16 + b'"' + data))
    parses_or_is_refused(data)
    parses_or_is_refused(header(b"{" + data)[0])


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    """A valid file in which a few stretches have been overwritten, cut out, doubled or swapped for others."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        # Most of a file may be padding: damage belongs where the content is.
        end = len(bytes(data).rstrip(b" \n")) + 2
        at = draw(st.integers(0, end))
        length = draw(st.integers(0, 12))
        kind = draw(st.sampled_from(["overwrite", "cut", "double", "insert"]))
        if kind == "overwrite":
            data[at : at + length] = draw(st.binary(min_size=length, max_size=length))
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + 8 * length]
        else:
            token = st.sampled_from(
                [b"[", b"]", b"{", b"}", b",", b":", b'"', b"0", b"-1", b"1e9", b"null", b"\\"]
            )
            data[at:at] = b"".join(draw(st.lists(token, max_size=4)))
    return bytes(data)


@given(mutated(VALID_ROOT) | mutated(making.seal(many(honest()))))
@settings(max_examples=150)
def test_fuzz_mutated_manifests(data: bytes) -> None:
    decodes_or_is_refused(data)
    if data.startswith(b'{"xxh3":"'):
        decodes_or_is_refused(making.seal(data.rstrip(b" \n")))


@given(mutated(VALID_SHARD))
@settings(max_examples=150)
def test_fuzz_mutated_headers(data: bytes) -> None:
    parses_or_is_refused(data)
    parses_or_is_refused(len(data[8:4096]).to_bytes(8, "little") + data[8:])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict):
        for key, below in value.items():
            yield from paths(below, (*at, key))
    elif isinstance(value, list):
        for i, below in enumerate(value):
            yield from paths(below, (*at, i))


HONEST_PATHS = sorted((path for path in paths(many(honest())) if path not in [(), ("xxh3",)]), key=repr)
ODD = st.sampled_from(
    [0, 1, -1, 2**53, 2**63 - 1, 2**63, 2**64, 4096, 1e308, "", "w", "0" * 16, [], [0], {}, None]
)


@given(
    st.lists(st.tuples(st.sampled_from(HONEST_PATHS), ODD | json_values), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=200)
def test_fuzz_any_value_in_any_field(changes: list[tuple[tuple[Any, ...], Any]], alone: bool) -> None:
    value = honest() if alone else many(honest())
    for path, new in changes:
        node = value
        try:
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = copy.deepcopy(new)  # examples share their containers
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    decodes_or_is_refused(making.seal(value))


def test_the_fuzz_does_reach_acceptance() -> None:
    # Otherwise the properties above would hold of a parser that refuses everything.
    assert decodes_or_is_refused(VALID_ROOT)
    assert parses_or_is_refused(VALID_SHARD)
    assert decodes_or_is_refused(making.seal({**honest(), "step": 0}))
    assert decodes_or_is_refused(making.seal({**many(honest()), "step": 0}))
