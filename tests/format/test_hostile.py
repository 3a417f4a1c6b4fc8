"""Attacks on the parsers. Every file here carries a right digest: an attacker made it.

Each must be refused with `CorruptCheckpoint`, naming the file, in bounded time and memory.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.manifest import (
    Part,
    PartRef,
    decode_part,
    decode_root,
    encode_part,
    encode_root,
    part_ref,
)
from everystep.format.shard import parse_header
from support.states import handmade_checkpoints as making

WHERE = "runs/a/step-000000000120/manifest.json"
MIB = 1 << 20


@contextmanager
def refused(match: str, *, nbytes: int = 0, seconds: float = 10.0) -> Iterator[None]:
    """Inside, `CorruptCheckpoint` must come up, having taken little memory beyond a few times the input."""
    tracemalloc.start()
    begun = time.thread_time()  # of this thread's work: others may have the processor meanwhile
    try:
        with pytest.raises(CorruptCheckpoint, match=match) as caught:
            yield
        taken = time.thread_time() - begun
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.path == WHERE
    assert len(str(caught.value)) < 3000
    assert taken < seconds
    assert peak < 48 * nbytes + 8 * MIB


def honest() -> dict[str, Any]:
    """The JSON of a valid root with two leaves, an alias, and a tree of some depth."""
    arrays = {"w": np.arange(12, dtype="<f4").reshape(3, 4), "b": np.arange(4.0)}
    _, part = making.shard(arrays)
    value = making.as_json(making.root(part, tree={"m": {"w": {"$leaf": "w"}, "n": [1, 2.5, "x"]}}))
    value["part"]["aliases"] = [{"name": "tied", "of": "w"}]
    return value


def test_the_honest_root_is_accepted() -> None:
    root = decode_root(making.seal(honest()), WHERE)
    assert root.tree == honest()["tree"]
    assert root.part is not None
    assert [leaf.name for leaf in root.part.leaves] == ["w", "b"]


Attack = Callable[[dict[str, Any]], object]


def leaf(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["part"]["leaves"][0]
    return found


def fragment(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = leaf(value)["fragments"][0]
    return found


def file(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["part"]["files"][0]
    return found


def ref(**changes: Any) -> dict[str, Any]:
    return {"rank": 1, "file": "r00001.json", "nbytes": 4096, "xxh3": "0" * 16, **changes}


def nest(depth: int) -> Any:
    node: Any = 0
    for _ in range(depth):
        node = [node]
    return node


def cut(value: dict[str, Any], *boxes: tuple[list[int], list[int]]) -> None:
    """Give the first leaf (3 x 4, F32) these fragments, each in bytes of its own."""
    file(value)["nbytes"] = 10 * MIB
    leaf(value)["fragments"] = [
        {
            "start": start,
            "shape": shape,
            "file": 0,
            "offset": MIB + 4096 * i,
            "nbytes": 4 * int(np.prod(shape)),
            "chunks": "0" * 16 * bool(np.prod(shape)),
        }
        for i, (start, shape) in enumerate(boxes)
    ]


FIELDS: dict[str, tuple[str, Attack]] = {
    # paths
    "path up": ("not one that rank", lambda v: file(v).update(name="../r00000.v0.safetensors")),
    "absolute path": ("not one that rank", lambda v: file(v).update(name="/etc/passwd")),
    "dot": ("not one that rank", lambda v: file(v).update(name=".")),
    "nul in name": ("not one that rank", lambda v: file(v).update(name="r00000.v0.safetensors\0")),
    "newline after name": ("not one that rank", lambda v: file(v).update(name="r00000.v0.safetensors\n")),
    "other digits": ("not one that rank", lambda v: file(v).update(name="r0000\u0660.v0.safetensors")),
    "another rank's file": ("not one that rank", lambda v: file(v).update(name="r00001.v0.safetensors")),
    "second spelling": ("not one that rank", lambda v: file(v).update(name="r00000.v00.safetensors")),
    "the manifest as shard": ("not one that rank", lambda v: file(v).update(name="manifest.json")),
    "file twice": ("listed twice", lambda v: v["part"]["files"].append(file(v))),
    "part path": ("part file name", lambda v: v.update(world=2, parts=[ref(file="../r00001.json")])),
    # ranks
    "no world": ("world", lambda v: v.update(world=0)),
    "gigantic world": ("world", lambda v: v.update(world=10**9)),
    "rank of the root": ("rank 1", lambda v: v["part"].update(rank=1)),
    "part of rank 0": ("beyond", lambda v: v.update(world=2, parts=[ref(rank=0, file="r00000.json")])),
    "part beyond world": ("beyond", lambda v: v.update(world=1, parts=[ref()])),
    "part twice": ("repeated", lambda v: v.update(world=3, parts=[ref(), ref()])),
    "digest of a part": ("xxh3", lambda v: v.update(world=2, parts=[ref(xxh3="Z" * 16)])),
    # single fields
    "negative step": ("step", lambda v: v.update(step=-1)),
    "gigantic step": ("step", lambda v: v.update(step=2**63)),
    "fraction of a step": ("step", lambda v: v.update(step=1.5)),
    "no id": ("id", lambda v: v.update(id="")),
    "id with newline": ("id", lambda v: v.update(id="0" * 31 + "\n")),
    "field missing": ("aliases", lambda v: v["part"].pop("aliases")),
    "unknown field": ("unknown field", lambda v: v.update(then="rm -rf /")),
    "metric of text": ("metrics", lambda v: v.update(metrics={"loss": "import os"})),
    "null metric": ("metrics", lambda v: v.update(metrics={"loss": None})),
    "part is a list": ("part", lambda v: v.update(part=[])),
    "unknown framework": ("framework", lambda v: leaf(v).update(framework="os")),
    "chunk of nothing": ("chunk size", lambda v: v["part"].update(chunk_nbytes=0)),
    "chunk of everything": ("chunk size", lambda v: v["part"].update(chunk_nbytes=2**62)),
    "odd chunk": ("chunk size", lambda v: v["part"].update(chunk_nbytes=MIB + 1)),
    # names
    "leaf name twice": ("twice", lambda v: v["part"]["leaves"].append(leaf(v))),
    "alias of nothing": ("not a leaf", lambda v: v["part"]["aliases"].append({"name": "x", "of": "y"})),
    "alias of an alias": ("not a leaf", lambda v: v["part"]["aliases"].append({"name": "x", "of": "tied"})),
    "alias of itself": ("not a leaf", lambda v: v["part"]["aliases"].append({"name": "x", "of": "x"})),
    "alias over a leaf": ("taken", lambda v: v["part"]["aliases"].append({"name": "b", "of": "w"})),
    "tree refers to nothing": ("not there", lambda v: v.update(tree=[{"$leaf": "x"}])),
    "tree refers by number": ("not there", lambda v: v.update(tree=[{"$leaf": 3}])),
    "tree refers by list": ("not there", lambda v: v.update(tree=[{"$leaf": ["w"]}])),
    "tree refers and more": ("not there", lambda v: v.update(tree=[{"$leaf": "w", "x": 1}])),
    # types and shapes
    "unknown type": ("element type", lambda v: leaf(v).update(dtype="F33")),
    "object type": ("element type", lambda v: leaf(v).update(dtype="NP:|O")),
    "structured type": ("element type", lambda v: leaf(v).update(dtype="NP:f4,(1000000000,)f8")),
    "gigantic type": ("element type", lambda v: leaf(v).update(dtype="NP:|S" + "9" * MIB)),
    "negative shape": ("shape", lambda v: leaf(v).update(shape=[-3, -4])),
    "gigantic shape": ("beyond", lambda v: leaf(v).update(shape=[2**40, 2**40])),
    "gigantic empty shape": ("beyond", lambda v: leaf(v).update(shape=[0, 2**62, 2**62], fragments=[])),
    "overflow to the right size": ("beyond", lambda v: leaf(v).update(shape=[3, 4, 2**62 + 1, 4])),
    "gigantic number": ("shape|range", lambda v: leaf(v).update(shape=[10**4000])),
    "too many dimensions": ("shape", lambda v: leaf(v).update(shape=[1] * 65)),
    "a million dimensions": ("shape", lambda v: leaf(v).update(shape=[1] * MIB)),
    "another shape": ("elements", lambda v: leaf(v).update(shape=[4, 4])),
    "another type": ("takes", lambda v: leaf(v).update(dtype="F64")),
    # fragments
    "nothing there": ("0 elements", lambda v: leaf(v).update(fragments=[])),
    "outside": ("outside", lambda v: fragment(v).update(start=[1, 0])),
    "fewer dimensions": ("dimensions", lambda v: fragment(v).update(shape=[12])),
    "more dimensions of start": ("dimensions", lambda v: fragment(v).update(start=[0, 0, 0])),
    "wrong bytes": ("takes", lambda v: fragment(v).update(nbytes=47)),
    "no such file": ("file number", lambda v: fragment(v).update(file=1)),
    "file from the end": ("file", lambda v: fragment(v).update(file=-1)),
    "in the header": ("not in the data", lambda v: fragment(v).update(offset=0)),
    "last byte of the header": (
        "not in the data",
        lambda v: fragment(v).update(offset=file(v)["header_nbytes"] - 1),
    ),
    "beyond the end": ("not in the data", lambda v: fragment(v).update(offset=file(v)["nbytes"] - 47)),
    "offset near overflow": ("not in the data", lambda v: fragment(v).update(offset=2**63 - 1)),
    "offset beyond overflow": ("offset", lambda v: fragment(v).update(offset=2**64)),
    "header beyond the file": ("header", lambda v: file(v).update(header_nbytes=file(v)["nbytes"] + 1)),
    "no header": ("header", lambda v: file(v).update(header_nbytes=0)),
    "header checksum": ("header_xxh3", lambda v: file(v).update(header_xxh3="x" * 16)),
    "same bytes for two leaves": (
        "overlap at byte",
        lambda v: v["part"]["leaves"][1]["fragments"][0].update(offset=fragment(v)["offset"] + 4),
    ),
    "no checksum": ("checksums", lambda v: fragment(v).update(chunks="")),
    "one checksum too many": ("checksums", lambda v: fragment(v).update(chunks="0" * 32)),
    "upper-case checksum": ("hexadecimal", lambda v: fragment(v).update(chunks="A" * 16)),
    "checksum of other digits": ("hexadecimal", lambda v: fragment(v).update(chunks="\u0663" * 16)),
    "same elements twice": ("same elements|elements", lambda v: cut(v, ([0, 0], [3, 4]), ([0, 0], [1, 1]))),
    "overlap of the right volume": ("same elements", lambda v: cut(v, ([0, 0], [2, 4]), ([1, 0], [1, 4]))),
    "hole of the right volume": (
        "same elements",
        lambda v: cut(v, ([0, 0], [1, 4]), ([0, 0], [1, 4]), ([2, 0], [1, 4])),
    ),
    "a part missing": ("8 elements", lambda v: cut(v, ([0, 0], [2, 4]))),
    # trees
    "integer beyond 2^53": ("2\\^53", lambda v: v.update(tree={"x": 2**53 + 1})),
    "deep list": ("nested", lambda v: v.update(tree=nest(400))),
    "depth one too many": ("nested", lambda v: v.update(tree=nest(330))),
}


def many(value: dict[str, Any]) -> dict[str, Any]:
    """The same root as one of three ranks: with a layout, another tree, volumes and state of its own."""
    value.update(
        world=3,
        parts=[ref(), ref(rank=2, file="r00002.json")],
        trees=[2],
        layout={"format": "any", "leaves": [[1, "x"]]},
    )
    file(value).update(volume="/mnt/ssd1/run", host="node-7")
    value["part"]["local"] = {"rng": {"draws": {"$leaf": "@0.rng"}, "n": 3}, "": None}
    own = copy.deepcopy(value["part"]["leaves"][1])
    own["name"] = "@0.rng"
    own["fragments"][0]["offset"] += 64
    file(value)["nbytes"] += 4096
    value["part"]["leaves"].append(own)
    value["part"]["aliases"].append({"name": "elsewhere", "of": "a leaf of others"})
    return value


def test_an_honest_root_of_several_ranks_is_accepted_and_stays_as_it_is() -> None:
    root = decode_root(making.seal(many(honest())), WHERE)
    assert root.trees == (2,)
    assert json.loads(root.layout) == {"format": "any", "leaves": [[1, "x"]]}
    assert root.part.files[0].volume == "/mnt/ssd1/run"
    assert root.part.local == {"rng": {"draws": {"$leaf": "@0.rng"}, "n": 3}, "": None}
    again = encode_root(root)
    assert encode_root(decode_root(again, WHERE)) == again


def own(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["part"]["leaves"][-1]
    return found


def volume(path: Any) -> Attack:
    return lambda v: file(v).update(volume=path)


MANY: dict[str, tuple[str, Attack]] = {
    "volume up": ("plain absolute path", volume("/mnt/../etc")),
    "volume that ends up": ("plain absolute path", volume("/mnt/..")),
    "relative volume": ("plain absolute path", volume("mnt/ssd")),
    "no volume": ("plain absolute path", volume("")),
    "the root directory": ("plain absolute path", volume("/")),
    "volume with a dot": ("plain absolute path", volume("/mnt/./ssd")),
    "volume with two slashes": ("plain absolute path", volume("/mnt//ssd")),
    "nul in volume": ("no path that a directory", volume("/mnt/\0ssd")),
    "endless volume": ("no path that a directory", volume("/m" * 5000)),
    "volume as number": ("volume", volume(5)),
    "endless host": ("no name that a host", lambda v: file(v).update(host="h" * 256)),
    "nul in host": ("no name that a host", lambda v: file(v).update(host="a\0b")),
    "tree of rank 0": ("out of order", lambda v: v.update(trees=[0])),
    "tree of no part": ("no part there is", lambda v: v.update(world=9, trees=[5])),
    "tree twice": ("repeated", lambda v: v.update(trees=[2, 2])),
    "trees backwards": ("out of order", lambda v: v.update(trees=[2, 1])),
    "gigantic rank of a tree": ("trees", lambda v: v.update(trees=[10**9])),
    "second tree in the root": ("second tree", lambda v: v["part"].update(tree={"a": 1})),
    "local as list": ("local", lambda v: v["part"].update(local=[1])),
    "local of others": ("not there", lambda v: v["part"]["local"].update(x={"$leaf": "@1.rng"})),
    "local of nobody": ("not there", lambda v: v["part"]["local"].update(x={"$leaf": 5})),
    "integer in local": ("2\\^53", lambda v: v["part"]["local"].update(x=[2**60])),
    "deep local": ("nested", lambda v: v["part"]["local"].update(x=nest(400))),
    "leaf of another rank": ("belongs to rank 1", lambda v: own(v).update(name="@1.rng")),
    "part of a leaf that is one rank's": (
        "fragments hold 4 elements",
        lambda v: own(v).update(shape=[8]),
    ),
    "alias of another rank": (
        "belongs to rank 2",
        lambda v: v["part"]["aliases"].append({"name": "@2.x", "of": "w"}),
    ),
    "own alias of what others have": (
        "not a leaf",
        lambda v: v["part"]["aliases"].append({"name": "@0.x", "of": "a leaf of others"}),
    ),
    "alias of what is another rank's": (
        "not a leaf",
        lambda v: v["part"]["aliases"].append({"name": "x", "of": "@2.rng"}),
    ),
}


@pytest.mark.parametrize("attack", MANY)
def test_a_field_of_several_ranks_that_lies_is_refused(attack: str) -> None:
    match, change = MANY[attack]
    value = many(honest())
    change(value)
    data = making.seal(value)
    with refused(match, nbytes=len(data)):
        decode_root(data, WHERE)


def test_a_part_keeps_the_same_rules() -> None:
    value = many(honest())["part"]
    value["rank"] = 1
    value["files"][0]["name"] = "r00001.v0.safetensors"
    value["leaves"][-1]["name"] = "@1.rng"
    value["local"]["rng"]["draws"]["$leaf"] = "@1.rng"

    def sealed(**changes: Any) -> bytes:
        return making.seal({"xxh3": "", "format": "everystep/1", "part": {**value, **changes}})

    part = decode_part(sealed(tree={"any": {"$leaf": "of any rank"}}), WHERE)
    assert part.tree == {"any": {"$leaf": "of any rank"}}
    assert decode_part(encode_part(part), WHERE) == part
    for match, changes in [
        ("nested", {"tree": nest(400)}),
        ("2\\^53", {"tree": {"n": -(2**60)}}),
        ("not there", {"local": {"x": {"$leaf": "of any rank"}}}),
        ("belongs to rank 1", {"rank": 2, "files": [{**value["files"][0], "name": "r00002.v0.safetensors"}]}),
    ]:
        data = sealed(**changes)
        with refused(match, nbytes=len(data)):
            decode_part(data, WHERE)


@pytest.mark.parametrize("attack", FIELDS)
def test_a_field_that_lies_is_refused(attack: str) -> None:
    match, change = FIELDS[attack]
    value = copy.deepcopy(honest())
    change(value)
    data = making.seal(value)
    with refused(match, nbytes=len(data)):
        decode_root(data, WHERE)


def test_the_depth_limit_is_where_it_says() -> None:
    assert decode_root(making.seal({**honest(), "tree": nest(329)}), WHERE).tree == nest(329)


def raw(tree: bytes) -> bytes:
    """A root, sealed, whose tree is any bytes at all."""
    text = json.dumps({**honest(), "xxh3": "0" * 16, "tree": "TREE"}, separators=(",", ":")).encode()
    return making.seal(text.replace(b'"TREE"', tree))


SYNTAX: dict[str, tuple[str, bytes]] = {
    "deep arrays": ("nested", b"[" * 5_000_000),
    "deep closed arrays": ("nested", b"[" * 1_000_000 + b"]" * 1_000_000),
    "deep objects": ("nested", b'{"a":' * 1_000_000),
    "deep tags": ("nested", b'{"$tuple":[' * 300_000),
    "deep among strings": ("nested", b'["]]]]\\"]]",' * 300_000),
    "duplicate key": ("twice", b'{"a":1,"a":1}'),
    "duplicate key, escaped": ("twice", b'{"a":1,"\\u0061":2}'),
    "duplicate key, far below": ("twice", b'[[[{"x":{"y":[{"k":1,"z":3,"k":2}]}}]]]'),
    "duplicate among many": (
        "twice",
        b'{"dup":0,' + b",".join(b'"k%d":0' % i for i in range(100_000)) + b',"dup":1}',
    ),
    "duplicate field": ("twice", b'null,"step":7'),
    "invalid utf-8": ("utf-8", b'"\xff\xfe"'),
    "invalid utf-8 in key": ("utf-8", b'{"\xc0\x80":1}'),
    "surrogate in utf-8": ("utf-8", b'"\xed\xa0\x80"'),
    "lone surrogate": ("surrogate|truncated|malformed", b'"\\ud800"'),
    "infinite float": ("range", b"1e999"),
    "gigantic integer": ("range", b"9" * 5_000_000),
    "not a number": ("malformed", b"NaN"),
    "unfinished string": ("truncated|malformed", b'"' + b"x" * 100_000),
    "two documents": ("part|trailing", b'0},{"x":1'),
    "control character": ("malformed", b'"a\x00b"'),
    "a billion laughs": ("not there", b"[" + b'{"$leaf":"lol"},' * 100_000 + b"0]"),
}


@pytest.mark.parametrize("attack", SYNTAX)
def test_malformed_json_is_refused(attack: str) -> None:
    match, tree = SYNTAX[attack]
    data = raw(tree)
    with refused(match, nbytes=len(data)):
        decode_root(data, WHERE)


@pytest.fixture
def _fewer_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of what a manifest may hold, which takes an eighth of the time to go beyond."""
    monkeypatch.setattr("everystep.format.manifest.MAX_NODES", 1 << 21)


@pytest.mark.usefixtures("_fewer_nodes")
def test_a_wide_tree_is_refused_before_it_takes_memory() -> None:
    tree = b"[" + b"[]," * 1_062_500 + b"0]"
    data = raw(tree)
    with refused("JSON values", nbytes=2 * len(data) // 48):
        decode_root(data, WHERE)
    # And never written: a checkpoint that cannot be read again is none.
    with pytest.raises(UnsupportedState, match="more than 2097152 values"):
        encode_root(making.root(tree=json.loads(tree)))


@pytest.mark.usefixtures("_fewer_nodes")
@pytest.mark.parametrize("string", [b'"', b'\\"', b'"a', b'"\\'], ids=["bare", "escaped", "open", "cut"])
def test_counting_values_takes_linear_time_whatever_the_strings(string: bytes) -> None:
    data = raw(b"[" + b"," * 2_125_000 + b'"' + string * 250_000)
    with refused("JSON values", nbytes=len(data) // 24):
        decode_root(data, WHERE)


def test_a_manifest_beyond_the_size_limit_is_not_even_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystep.format.manifest.MAX_ROOT_NBYTES", MIB)
    with refused("more than a manifest may have"):
        decode_root(b"[" * 2 * MIB, WHERE)
    with pytest.raises(UnsupportedState, match="exceeds the limit"):
        encode_root(making.root(tree="x" * 2 * MIB))


def test_a_caller_deep_in_recursion_does_not_read_that_its_checkpoint_is_corrupt() -> None:
    data = making.seal({**honest(), "tree": nest(300)})

    def descend(levels: int) -> None:
        if levels:
            return descend(levels - 1)
        decode_root(data, WHERE)

    frame, used = sys._getframe(), 0
    while frame is not None:
        frame, used = frame.f_back, used + 1  # type: ignore[assignment]
    # Later Pythons count calls of C by themselves.
    with pytest.raises(RecursionError) if sys.version_info < (3, 12) else nullcontext():
        descend(sys.getrecursionlimit() - used - 100)
    decode_root(data, WHERE)


def test_overlaps_among_many_fragments_are_found_in_bounded_time() -> None:
    count = 50_000
    value = honest()
    leaf(value).update(shape=[count, 4])
    cut(value, *[([i, 0], [1, 4]) for i in range(count - 1)], ([0, 0], [1, 4]))
    file(value)["nbytes"] = 1 << 40
    data = making.seal(value)
    with refused("same elements", nbytes=len(data)):
        decode_root(data, WHERE)


def test_a_tangle_of_fragments_is_given_up_in_bounded_time() -> None:
    side = 60
    boxes = []
    for i in range(0, side, 2):
        for j in range(1, side, 2):
            boxes += [([0, i, j], [side, 1, 1]), ([j, 0, i], [1, side, 1]), ([i, j, 0], [1, 1, side])]
    value = honest()
    leaf(value).update(shape=[side, side, side])
    cut(value, *boxes)
    file(value)["nbytes"] = 1 << 40
    # In a world of one the volume is wrong already; with more ranks the others might hold the rest.
    value.update(world=2, parts=[ref()])
    data = making.seal(value)
    with refused("tangled", nbytes=len(data)):
        decode_root(data, WHERE)


def test_a_part_that_is_not_the_one_referred_to_is_refused() -> None:
    mine = Part(1, MIB, (), (), ())
    data = encode_part(mine)
    right = part_ref(mine, data)
    assert decode_part(data, WHERE, right) == mine
    swapped = encode_part(Part(2, MIB, (), (), ()))
    with refused("digest differs"):
        decode_part(swapped, WHERE, right)
    with refused("rank 2"):
        decode_part(swapped, WHERE, PartRef(1, right.file, right.nbytes, swapped[9:25].decode()))
    with refused("the root says"):
        decode_part(data + data, WHERE, right)
    with refused("unknown field"):
        decode_part(encode_root(making.root()), WHERE)


# ---- shard headers


def header(
    text: bytes | dict[str, Any], data_nbytes: int = 0, length: int | None = None
) -> tuple[bytes, int]:
    """The start of a shard file around any JSON, and the size the file claims to have."""
    if isinstance(text, dict):
        text = json.dumps(text).encode()
    word = (len(text) if length is None else length).to_bytes(8, "little")
    return word + text, 8 + len(text) + data_nbytes


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **changes}


HEADERS: dict[str, tuple[str, tuple[bytes, int]]] = {
    "no bytes": ("too short", (b"", 0)),
    "seven bytes": ("too short", (b"\0" * 7, 7)),
    "length of everything": ("more than any", header({}, 0, 2**64 - 1)),
    "length just over the limit": ("more than any", (b"\x01\xe1\xf5\x05\0\0\0\0{}", 2**40)),
    "length beyond the file": ("in a file of", header({}, 0, 3)),
    "length beyond what was read": ("ends after", (b"\xff\0\0\0\0\0\0\0{}", 300)),
    "no header at all": ("not a JSON object", header(b"")),
    "an array": ("not a JSON object", header(b"[]")),
    "leading space": ("not a JSON object", header(b" {}")),
    "deep nesting": ("Expected|truncated|malformed", header(b'{"a":' * 1_000_000)),
    "deep shape": ("Expected|truncated|malformed", header(b'{"a":{"dtype":"U8","shape":' + b"[" * 1_000_000)),
    "overlap": ("overlaps", header({"a": entry(0, 4), "b": entry(2, 6)}, 6)),
    "the same bytes twice": ("overlaps", header({"a": entry(0, 4), "b": entry(0, 4)}, 4)),
    "hole": ("hole", header({"a": entry(0, 4), "b": entry(5, 6)}, 6)),
    "hole at the start": ("hole", header({"a": entry(1, 4)}, 4)),
    "bytes left over": ("the file at", header({"a": entry(0, 4)}, 5)),
    "bytes missing": ("the file at", header({"a": entry(0, 4)}, 3)),
    "backwards": ("shape takes|overlaps", header({"a": entry(4, 0, shape=[4])}, 4)),
    "negative offset": (">= 0", header({"a": entry(-4, 0)}, 4)),
    "size of the type": ("shape takes", header({"a": entry(0, 4, dtype="F32")}, 4)),
    "unknown type": ("unknown type", header({"a": entry(0, 4, dtype="F33")}, 4)),
    "type of ours, not of safetensors": (
        "unknown type",
        header({"a": entry(0, 16, dtype="C128", shape=[1])}, 16),
    ),
    "gigantic shape": ("beyond", header({"a": entry(0, 0, shape=[2**40, 2**40, 0])})),
    "shape that wraps to the size": ("beyond", header({"a": entry(0, 4, shape=[4, 2**62 + 1, 4])}, 4)),
    "a million dimensions": ("length", header({"a": entry(0, 1, shape=[1] * 1_000_000)}, 1)),
    "gigantic number": ("range", header(b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b"]}}")),
    "three offsets": ("is not dtype", header({"a": entry(0, 4, data_offsets=[0, 4, 4])}, 4)),
    "field missing": ("is not dtype", header({"a": {"dtype": "U8", "shape": []}})),
    "field too many": ("is not dtype", header({"a": entry(0, 4, extra="x")}, 4)),
    "entry is a number": ("Expected", header({"a": 3})),
    "shape is text": ("is not dtype", header({"a": entry(0, 4, shape="4")}, 4)),
    "metadata of numbers": ("not text", header({"__metadata__": {"a": [1]}})),
    "duplicate entry": (
        "twice",
        header(
            json.dumps({"a": entry(0, 4)}).encode()[:-1] + b',"a":' + json.dumps(entry(0, 4)).encode() + b"}",
            4,
        ),
    ),
    "duplicate field": (
        "twice",
        header(b'{"a":{"dtype":"F32","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
    ),
    "duplicate metadata": ("twice", header(b'{"__metadata__":{"k":"1","k":"2"}}')),
    "metadata twice": ("twice", header(b'{"__metadata__":{"k":"1"},"__metadata__":{}}')),
    "invalid utf-8": ("utf-8", header(b'{"__metadata__":{"k":"\xff"}}')),
    "invalid utf-8 in a name": ("utf-8", header(b'{"\xff":{}}')),
    "trailing bytes": ("malformed", header(b"{}\0\0")),
    "second document": ("malformed", header(b"{}{}")),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_hostile_header_is_refused(attack: str) -> None:
    match, (data, file_nbytes) = HEADERS[attack]
    with refused(match, nbytes=len(data)):
        parse_header(data, file_nbytes, WHERE)


def test_a_header_of_countless_entries_is_refused_before_it_takes_memory() -> None:
    data, nbytes = header(b"{" + b'"":{},' * 5_000_000 + b'"":{}}')
    with refused("more entries", nbytes=len(data) // 4):
        parse_header(data, nbytes, WHERE)
