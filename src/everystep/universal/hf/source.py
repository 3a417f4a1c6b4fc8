"""Hugging Face directories: weights in one file, or in shards with an index.

The files are safetensors, or of `torch.save` (``pytorch_model.bin``). If a directory has only files of a
variant (``model.fp16.safetensors``), these are read. Small files beside the weights (``config.json``, the
tokenizer) are carried along to a Hugging Face target.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.store.read.read_errors import open_stored, read_up_to, reading
from everystep.universal.safetensors.source import MetadataNames, read_leaves
from everystep.universal.source import Source, SourceLeaf
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file
from everystep.universal.training_state import arranged_names

KIND = "hf"
WANTED = (
    "a directory with model.safetensors, or model.safetensors.index.json and its shards; "
    "the same with pytorch_model.bin"
)
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

# In the order in which transformers looks for them.
_FILES = (FILE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_VARIANT = re.compile(
    r"model\.(?P<a>\w+)\.safetensors|model\.safetensors\.index\.(?P<b>\w+)\.json"
    r"|pytorch_model\.(?P<c>\w+)\.bin|pytorch_model\.bin\.index\.(?P<d>\w+)\.json"
)
_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_CARRIED = frozenset({"trainer_state.json", "latest_checkpointed_iteration.txt"})
_CARRIED_NBYTES = 256 << 20
_INDEX_NBYTES = 256 << 20
_CONFIG_NBYTES = 16 << 20
_PREFIX = "model."
T = TypeVar("T")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The file that holds the weights, or the index of those that do. `variant` is empty as a rule."""

    name: str
    variant: str = ""

    @property
    def is_index(self) -> bool:
        return self.name.endswith(".json")

    @property
    def is_torch(self) -> bool:
        return ".bin" in self.name


def looks_like(path: str) -> str | None:
    try:
        found = find_weights(path)
    except UnsupportedSource:
        return "weights of several variants"
    except OSError:
        return None
    return None if found is None else found.name


def describe(path: str, spec: object = None, as_training: bool | None = None) -> Source:
    weights = find_weights(path)
    if weights is None:
        raise IncompleteCheckpoint(f"the directory has none of {', '.join(_FILES)}", path=path)
    facts = {"files": weights.name}
    state, step, shards = read_weights(path, weights)
    if shards > 1:
        facts["files"] = f"{shards} shards"
    if weights.variant:
        facts["variant"] = weights.variant
    kind = model_type_of(os.path.join(path, CONFIG))
    if kind is not None:
        facts["model type"] = kind[:80]
    return source_of(path, KIND, state, step=step, facts=facts, carried=carried_files(path))


def find_weights(path: str) -> WeightFiles | None:
    """The weights in a directory; None if there are none."""
    for name in _FILES:
        if os.path.isfile(os.path.join(path, name)):
            return WeightFiles(name)
    if not os.path.isdir(path):
        return None
    variants: dict[str, list[str]] = {}
    for name in os.listdir(path):
        matched = _VARIANT.fullmatch(name)
        if matched is not None and os.path.isfile(os.path.join(path, name)):
            variants.setdefault(next(filter(None, matched.groups())), []).append(name)
    if len(variants) > 1:
        raise UnsupportedSource(
            f"{path}: it has no {FILE}, but weights of several variants ({', '.join(sorted(variants))}): "
            "name the file to read"
        )
    for variant, names in variants.items():
        return WeightFiles(min(names, key=lambda name: (name.startswith("pytorch"), name)), variant)
    return None


def read_weights(path: str, weights: WeightFiles) -> tuple[dict[str, Any], int | None, int]:
    """The state that the files of a directory hold, the step that they state, and how many files there are.

    Tensors are in the order of the files; those of `torch.save` are in the order of the model.
    """
    if weights.is_torch:
        torch_files = _read_files(path, weights, _read_torch_weights)
        model = {name: tensor for held in torch_files for name, tensor in held.items()}
        return {"model": model}, None, len(torch_files)
    said: dict[str, MetadataNames] = {}

    def read(file: str) -> dict[str, SourceLeaf]:
        said[file], leaves = read_leaves(file, _PREFIX)
        return leaves

    files = _read_files(path, weights, read)
    leaves = {leaf.name: leaf for held in files for leaf in held.values()}
    for file, names in said.items():
        leaves = names.tied(leaves, file)
    steps = [names.step for names in said.values() if names.step is not None]
    return arranged_names(path, leaves), max(steps, default=None), len(files)


def _read_files(path: str, weights: WeightFiles, read: Callable[[str], dict[str, T]]) -> list[dict[str, T]]:
    """What each file holds by name; of shards, what the index says is in them."""
    where = os.path.join(path, weights.name)
    if not weights.is_index:
        return [read(where)]
    placed = _read_index(where)
    by_shard: dict[str, list[str]] = {}
    for name, shard in placed.items():
        by_shard.setdefault(shard, []).append(name)
    found: list[dict[str, T]] = []
    for shard, names in sorted(by_shard.items()):
        file = _beside(path, where, shard)
        try:
            held = read(file)
        except IncompleteCheckpoint as error:
            raise IncompleteCheckpoint(error.reason, path=file, leaf=names[0]) from error
        for name in names:
            if name not in held:
                raise CorruptCheckpoint(
                    "the index says that it is in this file, but it is not", path=file, leaf=name
                )
        found.append({name: value for name, value in held.items() if placed.get(name) == shard})
    return found


def carried_files(path: str) -> tuple[str, ...]:
    """The files of a model that are no weights: what it is made of, and its tokenizer. No code.

    `path` may be such a file itself.
    """
    if not os.path.isdir(path):
        return (path,)
    found: list[str] = []
    nbytes = 0
    for name in sorted(os.listdir(path)):
        file = os.path.join(path, name)
        if not name.endswith(_CARRIED) or name in _NOT_CARRIED or ".index." in name:
            continue
        if os.path.isfile(file):
            nbytes += os.path.getsize(file)
            if nbytes <= _CARRIED_NBYTES:
                found.append(file)
    return tuple(found)


def read_config(file: str) -> Mapping[str, object]:
    """A ``config.json``; empty if it cannot be read."""
    try:
        with open(file, "rb") as config:
            found = msgspec.json.decode(config.read(_CONFIG_NBYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def model_type_of(file: str) -> str | None:
    """The kind of the model that a ``config.json`` names."""
    found = read_config(file).get("model_type")
    return found if isinstance(found, str) else None


def _read_torch_weights(file: str) -> dict[str, StoredTensor]:
    tree = read_torch_file(file)
    if not isinstance(tree, dict):
        raise UnsupportedSource(f"{file}: a {type(tree).__name__}, not the weights of a model")
    for name, tensor in tree.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise UnsupportedSource(f"{file}: {name!r} is a {type(tensor).__name__}, not a tensor")
    return tree


def _beside(path: str, index: str, shard: str) -> str:
    if shard in ("", ".", "..") or os.path.basename(shard) != shard:
        raise CorruptCheckpoint(f"{shard[:80]!r} is not a file beside the index", path=index)
    return os.path.join(path, shard)


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
