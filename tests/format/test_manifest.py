from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import CorruptCheckpoint
from everystep.format.dtypes import itemsize
from everystep.format.manifest import (
    Alias,
    Fragment,
    Leaf,
    Part,
    Root,
    ShardFile,
    decode_part,
    decode_root,
    encode_part,
    encode_root,
    part_ref,
    shard_name,
)
from support.states import handmade_checkpoints as making

# What JSON can carry without loss: the tree's own grammar is the state layer's.
nodes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), below, max_size=4)
        | st.builds(lambda value: {"$tuple": value}, st.lists(below, max_size=3))
    ),
    max_leaves=20,
)


@st.composite
def parts(draw: st.DrawFn, rank: int = 0) -> Part:
    """Leaves cut along their first dimension, laid one after the other into up to three shards."""
    chunk = draw(st.sampled_from([4096, 1 << 20]))
    headers = [draw(st.integers(8, 5000)) for _ in range(draw(st.integers(1, 3)))]
    ends = list(headers)
    leaves = []
    for name in draw(st.lists(st.text(), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(["F32", "BF16", "BOOL", "C128", "NP:<U7", "NP:>i4", "F8_E8M0"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        fragments = []
        at = 0
        while shape and at < shape[0]:
            rows = draw(st.integers(1, shape[0] - at))
            fragments.append(((at, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
            at += rows
        placed = []
        for start, box in fragments if shape else [((), ())]:
            file = draw(st.integers(0, len(ends) - 1))
            nbytes = itemsize(dtype) * math.prod(box)
            hashes = [draw(st.integers(0, 2**64 - 1)) for _ in range(-(-nbytes // chunk))]
            offset = ends[file] + draw(st.integers(0, 70))
            ends[file] = offset + nbytes
            placed.append(
                Fragment(start, box, file, offset, nbytes, "".join(f"{found:016x}" for found in hashes))
            )
        leaves.append(Leaf(name, dtype, shape, draw(st.sampled_from(["torch", "numpy"])), tuple(placed)))
    aliases = tuple(Alias(f"tied.{i}.{leaf.name}", leaf.name) for i, leaf in enumerate(leaves[:2]))
    taken = {leaf.name for leaf in leaves}
    files = tuple(
        ShardFile(shard_name(rank, i), end + 4096, header, f"{i + 1:016x}")
        for i, (header, end) in enumerate(zip(headers, ends, strict=True))
    )
    return Part(rank, chunk, files, tuple(leaves), tuple(a for a in aliases if a.name not in taken))


roots = st.builds(
    Root,
    id=st.text("0123456789abcdef", min_size=32, max_size=32),
    step=st.integers(0, 2**63 - 1),
    created=st.floats(0, 1e12),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    tree=nodes,
    part=parts(),
)


@given(roots)
def test_a_root_comes_back_as_it_was(root: Root) -> None:
    data = encode_root(root)
    assert decode_root(data, "here") == root
    assert encode_root(decode_root(data, "here")) == data
    # Object order carries meaning: dicts come back in the order they were saved in.
    assert json.dumps(decode_root(data, "here").tree) == json.dumps(root.tree)


@given(parts(rank=7))
def test_a_part_comes_back_as_it_was_and_only_the_one_referred_to(part: Part) -> None:
    data = encode_part(part)
    ref = part_ref(part, data)
    assert ref.file == "r00007.json"
    assert decode_part(data, "here", ref) == part == decode_part(data, "here")
    other = encode_part(Part(7, 8192, (), (), ()))
    with pytest.raises(CorruptCheckpoint, match="root"):
        decode_part(other, "r00007.json", ref)


@given(st.floats())
def test_metrics_may_be_any_float(value: float) -> None:
    back = decode_root(encode_root(making.root(metrics={"loss": value})), "here").metrics["loss"]
    assert math.isnan(back) if math.isnan(value) else back == value
    assert type(back) is float


@given(roots)
def test_the_file_is_one_json_object_with_its_digest_at_a_fixed_place(root: Root) -> None:
    data = encode_root(root)
    assert len(data) % 4096 == 0
    assert data.endswith(b"\n")
    value = json.loads(data)
    assert next(iter(value)) == "xxh3"
    assert value["format"] == "everystep/1"
    assert data[9:25].decode() == value["xxh3"]
    assert xxhash.xxh3_64_hexdigest(data[:9] + b"0" * 16 + data[25:]) == value["xxh3"]


@pytest.mark.parametrize("what", ["root", "part"])
def test_every_flipped_bit_is_found_and_named(what: str) -> None:
    data = encode_root(making.root()) if what == "root" else encode_part(making.root().part)
    assert len(data) == 4096
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpoint) as caught:
            (decode_root if what == "root" else decode_part)(bytes(damaged), "runs/a/manifest.json")
        assert caught.value.path == "runs/a/manifest.json"


def test_every_truncation_is_found() -> None:
    data = encode_root(making.many_leaves(100))
    assert len(data) > 3 * 4096
    for nbytes in [*range(0, 4200), *range(0, len(data), 4096)]:
        with pytest.raises(CorruptCheckpoint):
            decode_root(data[:nbytes], "here")


def test_a_file_formatted_by_another_writer_is_read_all_the_same() -> None:
    root = making.many_leaves(50)
    value = making.as_json(root)
    text = json.dumps(value, indent=1, ensure_ascii=True).encode()
    head = b'{"xxh3":"' + b"0" * 16 + b'"'
    foreign = making.seal(head + text[text.index(b",") :])
    assert foreign != encode_root(root)
    assert decode_root(foreign, "here") == root


def test_a_format_of_the_future_is_named_in_the_error() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"everystep/2.*newer"):
        decode_root(encode_root(making.root(format="everystep/2")), "here")


def test_what_cannot_be_written_is_refused_when_encoding() -> None:
    for created in (math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            encode_root(making.root(created=created))


def test_leaves_over_four_gibibytes_keep_their_offsets() -> None:
    rows, columns = 1 << 20, 1 << 12
    nbytes = 8 * rows * columns
    chunks = "f" * 16 * (nbytes // making.CHUNK)
    huge = Leaf(
        "w", "F64", (rows, columns), "torch", (Fragment((0, 0), (rows, columns), 0, 4096, nbytes, chunks),)
    )
    after = Leaf("b", "U8", (1,), "torch", (Fragment((0,), (1,), 0, 4096 + nbytes, 1, "0" * 16),))
    files = (ShardFile(shard_name(0, 0), 4096 + nbytes + 1, 4096, "1" * 16),)
    root = making.root(Part(0, making.CHUNK, files, (huge, after), ()))
    assert nbytes == 1 << 35
    assert decode_root(encode_root(root), "here") == root


def test_a_world_of_several_ranks_may_hold_a_leaf_in_pieces() -> None:
    part = making.root().part
    piece = Leaf("w", "F32", (6, 4), "numpy", part.leaves[0].fragments)
    cut = Part(0, making.CHUNK, part.files, (piece,), ())
    ref = part_ref(Part(1, making.CHUNK, (), (), ()), encode_part(Part(1, making.CHUNK, (), (), ())))
    root = making.root(cut, world=2, parts=(ref,))
    assert decode_root(encode_root(root), "here") == root
    with pytest.raises(CorruptCheckpoint, match="elements"):
        decode_root(encode_root(making.root(cut)), "here")


def test_the_depth_that_state_allows_fits() -> None:
    node: Any = {"$complex": [1.0, 2.0]}
    for _ in range(100):
        node = {"$dict": [["key", node]]}
    root = making.root(tree=node)
    assert decode_root(encode_root(root), "here").tree == node


def test_empty_arrays_may_have_a_fragment_or_none() -> None:
    data, part = making.shard({"e": np.zeros((3, 0, 2)), "w": np.ones(3)})
    assert len(part.leaves[0].fragments) == 1
    none = Part(0, making.CHUNK, part.files, (Leaf("e", "F64", (3, 0, 2), "numpy", ()), part.leaves[1]), ())
    for some in (part, none):
        root = making.root(some)
        assert decode_root(encode_root(root), "here") == root
    assert len(data) == part.files[0].nbytes
