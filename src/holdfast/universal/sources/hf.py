"""Hugging Face directories: one ``model.safetensors``, or shards and an index that says what is in which.

Small files beside the weights (``config.json``, the tokenizer) are carried along to a Hugging Face target.
"""

from __future__ import annotations

import os

import msgspec

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint
from holdfast.format.shard import Header, HeaderEntry, is_pad
from holdfast.store.os_errors import open_stored, read_up_to, reading
from holdfast.universal.source import Source, SourceLeaf
from holdfast.universal.sources.safetensors import Names, leaf_of, read_header

KIND = "hf"
WANTED = "a directory with model.safetensors, or model.safetensors.index.json and its shards"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_CARRIED_NBYTES = 256 << 20
_INDEX_NBYTES = 256 << 20


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def looks_like(path: str) -> str | None:
    return next((name for name in (INDEX, FILE) if os.path.isfile(os.path.join(path, name))), None)


def describe(path: str, spec: object) -> Source:
    if os.path.isfile(os.path.join(path, INDEX)):
        leaves, names, shards = _sharded(path)
    else:
        leaves, names, shards = _whole(path)
    carried = _carried(path)
    facts = {"files": f"{shards} shards" if shards > 1 else FILE}
    facts.update(_config_facts(path))
    aliases = {name: of for found in names for name, of in found.aliases.items()}
    step = max((found.step for found in names), default=0)
    return Source(path, KIND, step, leaves, aliases=aliases, facts=facts, carried=carried)


def _whole(path: str) -> tuple[tuple[SourceLeaf, ...], list[Names], int]:
    file = os.path.join(path, FILE)
    header = read_header(file)
    names = Names(header.metadata, file)
    leaves = tuple(leaf_of(file, header, entry, names) for entry in header.entries if not is_pad(entry.name))
    return leaves, [names], 1


def _sharded(path: str) -> tuple[tuple[SourceLeaf, ...], list[Names], int]:
    where = os.path.join(path, INDEX)
    found: dict[str, tuple[Header, dict[str, HeaderEntry], Names]] = {}
    leaves: list[SourceLeaf] = []
    for name, shard in _read_index(where).items():
        file = os.path.join(path, shard)
        if shard not in found:
            if shard in ("", ".", "..") or os.path.basename(shard) != shard:
                raise CorruptCheckpoint(f"{shard[:80]!r} is not a file beside the index", path=where)
            try:
                header = read_header(file)
            except IncompleteCheckpoint as error:
                raise IncompleteCheckpoint(error.reason, path=file, leaf=name) from error
            found[shard] = (
                header,
                {entry.name: entry for entry in header.entries},
                Names(header.metadata, file),
            )
        header, entries, names = found[shard]
        if name not in entries:
            raise CorruptCheckpoint(
                "the index says that it is in this file, but it is not", path=file, leaf=name
            )
        leaves.append(leaf_of(file, header, entries[name], names))
    return tuple(leaves), [names for _, _, names in found.values()], len(found)


def _read_index(where: str) -> dict[str, str]:
    with reading(where), open_stored(where, where) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > _INDEX_NBYTES:
            raise CorruptCheckpoint(f"an index of {nbytes} bytes is longer than any may be", path=where)
        data = read_up_to(file, nbytes + 1)
    try:
        return msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"the index cannot be read: {error}", path=where) from None


def _carried(path: str) -> tuple[str, ...]:
    """The files of the model that are no weights: what it is made of, and its tokenizer. No code."""
    found: list[str] = []
    nbytes = 0
    for name in sorted(os.listdir(path)):
        file = os.path.join(path, name)
        if name.endswith(_CARRIED) and not name.endswith(".index.json") and os.path.isfile(file):
            nbytes += os.path.getsize(file)
            if nbytes <= _CARRIED_NBYTES:
                found.append(file)
    return tuple(found)


def _config_facts(path: str) -> dict[str, str]:
    """The kind of the model, if its configuration can be read. Nothing depends on it."""
    file = os.path.join(path, "config.json")
    try:
        with open(file, "rb") as config:
            found = msgspec.json.decode(config.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return {}
    kind = found.get("model_type") if isinstance(found, dict) else None
    return {"model type": kind[:80]} if isinstance(kind, str) else {}
