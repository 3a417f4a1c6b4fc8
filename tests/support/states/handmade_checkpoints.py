"""Checkpoints made by hand for the tests of this layer: records, bytes of shards, whole directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everystep.format.checksums import digest
from everystep.format.dtypes import carrier
from everystep.format.manifest import (
    MANIFEST_NAME,
    Alias,
    Fragment,
    Leaf,
    Part,
    Root,
    ShardFile,
    encode_root,
    shard_name,
)
from everystep.format.shard import HeaderEntry, build_header, entry_name, pad_name

CHUNK = 1 << 20
ID = "0123456789abcdef0123456789abcdef"

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "C128",
}


def checksums(data: bytes, chunk_nbytes: int = CHUNK) -> str:
    return "".join(digest(data[i : i + chunk_nbytes]) for i in range(0, len(data), chunk_nbytes))


def logical_name(array: np.ndarray[Any, Any]) -> str:
    own = NAMES.get(array.dtype.name) if array.dtype.isnative else None
    return own or f"NP:{array.dtype.str}"


def shard(arrays: Mapping[str, np.ndarray[Any, Any]], alignment: int = 512) -> tuple[bytes, Part]:
    """The bytes of a shard that holds these arrays, each at an aligned offset, and the part describing it."""
    entries: list[HeaderEntry] = []
    blobs: list[bytes] = []
    at = 0
    for number, (name, array) in enumerate(arrays.items()):
        gap = -at % alignment
        if gap:
            entries.append(HeaderEntry(pad_name(number), "U8", (gap,), at, at + gap))
            blobs.append(bytes(gap))
            at += gap
        blob = array.tobytes()
        how = carrier(logical_name(array))
        entries.append(HeaderEntry(entry_name(name), how.name, array.shape + how.tail, at, at + len(blob)))
        blobs.append(blob)
        at += len(blob)
    header = build_header(entries, {"format": "everystep/1"})
    places = {entry.name: entry.begin for entry in entries}
    leaves = []
    for name, array in arrays.items():
        blob = array.tobytes()
        fragment = Fragment(
            start=(0,) * array.ndim,
            shape=array.shape,
            file=0,
            offset=len(header) + places[entry_name(name)],
            nbytes=len(blob),
            chunks=checksums(blob),
        )
        leaves.append(Leaf(name, logical_name(array), array.shape, "numpy", (fragment,)))
    data = b"".join([header, *blobs])
    file = ShardFile(shard_name(0, 0), len(data), len(header), digest(header))
    return data, Part(rank=0, chunk_nbytes=CHUNK, files=(file,), leaves=tuple(leaves), aliases=())


def root(part: Part | None = None, **changes: Any) -> Root:
    """A valid root; of one F32 leaf `w` of shape [3, 4] unless a part is given."""
    if part is None:
        _, part = shard({"w": np.arange(12, dtype="<f4").reshape(3, 4)})
    fields: dict[str, Any] = {
        "id": ID,
        "step": 120,
        "created": 1.75e9,
        "metrics": {"loss": 0.25},
        "tree": {name: {"$leaf": name} for name in [leaf.name for leaf in part.leaves]},
        "part": part,
    }
    return Root(**{**fields, **changes})


def write_checkpoint(
    directory: Path,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    tree: Any,
    aliases: Mapping[str, str] | None = None,
    step: int = 120,
) -> None:
    """A committed checkpoint of one process, by hand."""
    data, part = shard(arrays)
    ties = tuple(Alias(name, of) for name, of in (aliases or {}).items())
    part = Part(part.rank, part.chunk_nbytes, part.files, part.leaves, ties)
    directory.mkdir(parents=True)
    (directory / shard_name(0, 0)).write_bytes(data)
    (directory / MANIFEST_NAME).write_bytes(encode_root(root(part, tree=tree, step=step)))


def many_leaves(count: int) -> Root:
    """A root as large as a state of many small tensors makes it."""
    nbytes = 4096
    file = ShardFile(shard_name(0, 0), 4096 + count * nbytes, 4096, "1" * 16)
    leaves = tuple(
        Leaf(
            f"model.layers.{i // 16}.block.{i % 16}.weight",
            "F32",
            (32, 32),
            "torch",
            (Fragment((0, 0), (32, 32), 0, 4096 + i * nbytes, nbytes, f"{i:016x}"),),
        )
        for i in range(count)
    )
    part = Part(0, CHUNK, (file,), leaves, ())
    return root(part)


def as_json(record: Root) -> dict[str, Any]:
    """The JSON value of an encoded root, to be tampered with."""
    value: dict[str, Any] = json.loads(encode_root(record))
    return value


def seal(text: bytes | dict[str, Any]) -> bytes:
    """Pad and give a right digest to anything, as a hostile writer would. Written from docs/format.md."""
    if isinstance(text, dict):
        text = json.dumps({**text, "xxh3": "0" * 16}, separators=(",", ":")).encode()
    assert text.startswith(b'{"xxh3":"')
    zeroed = text[:9] + b"0" * 16 + text[25:]
    zeroed += b" " * (-(len(zeroed) + 1) % 4096) + b"\n"
    return zeroed[:9] + digest(zeroed).encode() + zeroed[25:]
