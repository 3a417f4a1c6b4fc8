from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.dtypes import SAFETENSORS_ITEMSIZE
from everystep.format.shard import (
    Header,
    HeaderEntry,
    build_header,
    entry_name,
    header_nbytes,
    is_pad,
    pad_name,
    parse_header,
)
from support.states import handmade_checkpoints as making


@st.composite
def contents(draw: st.DrawFn) -> list[HeaderEntry]:
    entries = []
    at = 0
    names = st.text().filter(lambda name: name != "__metadata__")
    for name in draw(st.lists(names, unique=True, max_size=8)):
        dtype = draw(st.sampled_from(sorted(SAFETENSORS_ITEMSIZE)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        end = at + SAFETENSORS_ITEMSIZE[dtype] * math.prod(shape)
        entries.append(HeaderEntry(name, dtype, shape, at, end))
        at = end
    return entries


metadata = st.dictionaries(st.text(), st.text(), max_size=3)


@given(contents(), metadata)
def test_a_header_comes_back_as_it_was(entries: list[HeaderEntry], notes: dict[str, str]) -> None:
    header = build_header(entries, notes)
    assert len(header) % 4096 == 0
    nbytes = len(header) + (entries[-1].end if entries else 0)
    parsed = parse_header(header + b"beyond the header", nbytes, "here")
    in_order = tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))
    assert parsed == Header(in_order, notes, len(header))
    assert header_nbytes(header[:8], nbytes, "here") == len(header)


@given(contents(), metadata)
def test_the_safetensors_library_reads_every_header_we_build(
    entries: list[HeaderEntry], notes: dict[str, str]
) -> None:
    header = build_header(entries, notes)
    data = bytes(i % 251 for i in range(entries[-1].end if entries else 0))
    found = dict(safetensors.deserialize(header + data))
    assert set(found) == {entry.name for entry in entries}
    for entry in entries:
        info = found[entry.name]
        assert tuple(info["shape"]) == entry.shape
        assert info["dtype"] == entry.dtype
        assert bytes(info["data"]) == data[entry.begin : entry.end]


def test_a_shard_with_pads_opens_with_safetensors(tmp_path: Path) -> None:
    arrays = {
        "model.w": np.arange(12, dtype="<f4").reshape(3, 4),
        "scalar": np.array(7, dtype="<i8"),
        "empty": np.zeros((0, 3), dtype="<f8"),
        "__metadata__": np.array([1, 2, 3], dtype="u1"),
        "": np.array([True, False]),
        "__pad__.0": np.array([5], dtype="<u2"),
    }
    data, _ = making.shard(arrays)
    path = tmp_path / "r00000.v0.safetensors"
    path.write_bytes(data)
    loaded = safetensors.numpy.load_file(path)
    pads = {name for name in loaded if is_pad(name)}
    assert pads
    assert all(loaded[name].dtype == np.uint8 and not loaded[name].any() for name in pads)
    assert set(loaded) - pads == {entry_name(name) for name in arrays}
    for name, array in arrays.items():
        got = loaded[entry_name(name)]
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
    with safetensors.safe_open(path, framework="numpy") as opened:
        assert opened.metadata() == {"format": "everystep/1"}
        assert np.array_equal(opened.get_slice("model.w")[1:], arrays["model.w"][1:])


def test_every_type_we_name_opens_with_safetensors_in_torch(tmp_path: Path) -> None:
    import torch

    at = 0
    entries = []
    for dtype, size in SAFETENSORS_ITEMSIZE.items():
        entries.append(HeaderEntry(f"a.{dtype}", dtype, (2, 3), at, at + 6 * size))
        at += 6 * size
    path = tmp_path / "r00000.v0.safetensors"
    data = bytes(i % 2 for i in range(at))
    path.write_bytes(build_header(entries, {}) + data)
    with safetensors.safe_open(path, framework="torch") as opened:
        for entry in entries:
            if entry.dtype == "F8_E8M0":
                # The library names this type, but its torch face may not know it yet: its raw face must.
                continue
            tensor = opened.get_tensor(entry.name)
            assert tuple(tensor.shape) == (2, 3)
            raw = tensor.view(torch.uint8) if tensor.dtype != torch.bool else tensor.to(torch.uint8)
            assert bytes(raw.flatten().tolist()) == data[entry.begin : entry.end]
    assert dict(safetensors.deserialize(path.read_bytes()))["a.F8_E8M0"]["dtype"] == "F8_E8M0"


tricky = st.builds(
    "".join,
    st.lists(st.sampled_from(["leaf:", "frag:", "__pad__.", "__metadata__", "1:", "2:", "w"]), max_size=4),
)


@given(st.tuples(tricky, st.integers(0, 3)), st.tuples(tricky, st.integers(0, 3)))
def test_no_two_fragments_share_an_entry_name(one: tuple[str, int], other: tuple[str, int]) -> None:
    name = entry_name(*one)
    assert name != "__metadata__"
    assert not is_pad(name)
    assert (name == entry_name(*other)) == (one == other)


def test_ordinary_names_stay_as_they_are() -> None:
    assert entry_name("model.h.0.weight") == "model.h.0.weight"
    assert entry_name("__metadata__") == "leaf:__metadata__"
    assert entry_name("__pad__.3") == "leaf:__pad__.3"
    assert entry_name("w", 2) == "frag:2:w"
    assert pad_name(3) == "__pad__.3"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([HeaderEntry("a", "F32", (2,), 4, 12)], "do not follow"),
        ([HeaderEntry("a", "F32", (2,), 0, 9)], "do not follow"),
        ([HeaderEntry("a", "U8", (2,), 0, 2), HeaderEntry("b", "U8", (2,), 3, 5)], "do not follow"),
        ([HeaderEntry("a", "C128", (1,), 0, 16)], "no element type"),
        ([HeaderEntry("a", "U8", (1,), 0, 1), HeaderEntry("a", "U8", (1,), 1, 2)], "same name"),
        ([HeaderEntry("__metadata__", "U8", (1,), 0, 1)], "same name"),
    ],
)
def test_a_header_that_would_lie_is_not_built(entries: list[HeaderEntry], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_header(entries, {"format": "everystep/1"})


def test_a_header_too_long_for_other_readers_is_not_built() -> None:
    with pytest.raises(UnsupportedState, match="more than readers accept"):
        build_header([HeaderEntry("x" * 100_000_000, "U8", (0,), 0, 0)], {})


def test_a_header_formatted_by_another_writer_is_read() -> None:
    tensors = {"b": np.ones((2, 2), "<f4"), "a": np.arange(3)}
    data = safetensors.numpy.save(tensors, {"who": "somebody"})
    parsed = parse_header(data, len(data), "here")
    assert {entry.name: entry.shape for entry in parsed.entries} == {"a": (3,), "b": (2, 2)}
    assert parsed.metadata == {"who": "somebody"}
    text = json.dumps(json.loads(data[8 : parsed.data_start]), indent=2).encode()
    spaced = len(text).to_bytes(8, "little") + text + data[parsed.data_start :]
    assert parse_header(spaced, len(spaced), "here").entries == parsed.entries


def test_every_truncation_of_a_shard_is_found() -> None:
    data, _ = making.shard({"w": np.arange(5, dtype="<f4")})
    for nbytes in range(len(data)):
        with pytest.raises(CorruptCheckpoint):
            parse_header(data[:nbytes], nbytes, "here")
