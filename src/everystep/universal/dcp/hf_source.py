"""Shards of torch's ``HuggingFaceStorageWriter(save_distributed=True)``: safetensors files without an index.

Each rank wrote ``shard-R-model-I-of-N.safetensors`` with its pieces. The metadata in the header of a file
says where each piece begins in its tensor; the shape of a tensor is where its last pieces end. (If these were
lost with the file of the last rank, nothing tells. All other losses are noticed.) A consolidated directory
has an index, so it is one of Hugging Face's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.format.geometry import Box
from everystep.format.shard import HeaderEntry, is_pad
from everystep.universal.dcp.directory import not_all_of
from everystep.universal.safetensors.source import read_header
from everystep.universal.source import Source, SourceFragment, SourceLeaf
from everystep.universal.state_tree import source_of

KIND = "dcp-hf"
WANTED = "a directory with shard-XXXXX-model-XXXXX-of-XXXXX.safetensors"
_SHARD = re.compile(r"shard-(\d{5,})-model-\d{5,}-of-\d{5,}\.safetensors")
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def looks_like(path: str | os.PathLike[str]) -> str | None:
    found = _shards(os.fspath(path)) if os.path.isdir(path) else []
    return f"{len(found)} shards of HuggingFaceStorageWriter" if found else None


def describe(path: str | os.PathLike[str], spec: object = None, as_training: bool | None = None) -> Source:
    """The weights of a model."""
    where = os.path.abspath(path)
    names = _shards(where)
    _require_ranks(where, names)
    pieces: dict[str, list[SourceFragment]] = {}
    types: dict[str, str] = {}
    for name in names:
        file = os.path.join(where, name)
        header = read_header(file)
        starts = _starts(header.metadata, file)
        for entry in header.entries:
            if is_pad(entry.name):
                continue
            if types.setdefault(entry.name, entry.dtype) != entry.dtype:
                raise CorruptCheckpoint("other shards have another type of it", path=file, leaf=entry.name)
            box = Box(_start(starts, entry, file), entry.shape)
            pieces.setdefault(entry.name, []).append(
                SourceFragment(file, header.data_start + entry.begin, box)
            )
    model = {name: _leaf(where, name, types[name], held) for name, held in pieces.items()}
    facts = {"written by": "HuggingFaceStorageWriter", "shards": str(len(names))}
    return source_of(where, KIND, {"model": model}, facts=facts)


def _shards(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if _SHARD.fullmatch(name))
    except OSError:
        return []


def _require_ranks(where: str, names: list[str]) -> None:
    ranks = {int(found[1]) for name in names if (found := _SHARD.fullmatch(name)) is not None}
    missing = set(range(1, max(ranks, default=1) + 1)) - ranks
    if missing:
        raise IncompleteCheckpoint(f"the file shard-{min(missing):05d}-... is missing", path=where)


def _starts(metadata: Mapping[str, str], file: str) -> Mapping[str, object]:
    try:
        found = json.loads(metadata[_INFO])
    except (KeyError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"its header does not say where its pieces belong ({_INFO})", path=file)
    return found


def _start(starts: Mapping[str, object], entry: HeaderEntry, file: str) -> tuple[int, ...]:
    known = starts.get(entry.name)
    start = known.get(_OFFSETS) if isinstance(known, dict) else None
    if (
        not isinstance(start, list)
        or len(start) != len(entry.shape)
        or not all(type(n) is int and 0 <= n < 2**62 for n in start)
    ):
        raise CorruptCheckpoint("its header does not say where the piece belongs", path=file, leaf=entry.name)
    return tuple(start)


def _leaf(where: str, name: str, dtype: str, held: list[SourceFragment]) -> SourceLeaf:
    boxes = [fragment.box for fragment in held]
    if len({len(box.shape) for box in boxes}) != 1:
        raise CorruptCheckpoint("its pieces have different numbers of dimensions", path=where, leaf=name)
    shape = tuple(max(ends) for ends in zip(*(box.stop for box in boxes), strict=True))
    problem = not_all_of(shape, boxes)
    if problem is not None:
        raise CorruptCheckpoint(problem, path=where, leaf=name)
    return SourceLeaf(name, dtype, shape, tuple(held))
