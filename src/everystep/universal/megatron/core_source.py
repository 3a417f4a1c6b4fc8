"""Megatron-Core's distributed checkpoints in their ``torch_dist`` form: ``iter_N`` with ``metadata.json``.

Beside ``.metadata`` and ``*.distcp``, as DCP writes them, ``common.pt`` has all that is not a tensor.
Newer versions have it as the object ``common_state``. Tensors are whole already: the pieces of ranks, stages
and experts are boxes. Two things differ from names and shapes of the model:

- Layers of one kind are stacked: ``decoder.layers.mlp.linear_fc2.weight`` has the layers as its first
  dimension. Here it is a leaf for each layer, ``model.decoder.layers.0.mlp.linear_fc2.weight``.
- ``optimizer.state.<state>.<name>`` becomes ``optimizer.<name>.<state>``; the master copy is ``fp32``. Older
  versions (``fully_sharded_model_space``) store it flat, as ranges of each rank's part: these are put back.

The distributed optimizer's own buckets (``dp_reshardable``, ``dp_zero_gather_scatter``) do not say which
parameter an element belongs to. They are left out, and so are objects such as the states of random numbers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.format.dtypes import itemsize
from everystep.format.geometry import Box
from everystep.universal.dcp.directory import METADATA, DcpDirectory
from everystep.universal.megatron.source import INERT, checkpoint_directory
from everystep.universal.source import Source, SourceFragment, SourceLeaf, flat_fragments
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.reading import read_torch_file
from everystep.universal.training_state import TrainingState, plain

KIND = "megatron-core"
WANTED = "metadata.json with a sharded_backend, or latest_checkpointed_iteration.txt beside such directories"
_CONFIG = "metadata.json"
_COMMON = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
_CONFIG_NBYTES = 1 << 20
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([A-Za-z0-9_]+)\.(.+)", re.DOTALL)
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.", re.DOTALL)
_STACKED = re.compile(r"((?:.*?\.)?layers\.)(?!\d+\.)(.+)", re.DOTALL)
_MASTERS = ("param", "fp32_param")
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found there, for messages; None if `describe` does not read it."""
    try:
        config = _read_config(checkpoint_directory(os.fspath(path)))
    except (OSError, ValueError, CorruptCheckpoint):
        return None
    return None if config is None else f"{_CONFIG} with sharded_backend {config.get('sharded_backend')!r}"


def describe(path: str | os.PathLike[str], spec: object = None, as_training: bool | None = None) -> Source:
    """The leaves and values of a distributed checkpoint."""
    where = checkpoint_directory(os.path.abspath(path))
    backend = (_read_config(where) or {}).get("sharded_backend")
    if backend != "torch_dist" or not os.path.isfile(os.path.join(where, METADATA)):
        raise UnsupportedSource(
            f"{where}: a distributed checkpoint of Megatron-Core with backend {str(backend)!r}; only "
            "'torch_dist' is read. Megatron can convert it: load it, and save with --ckpt-format torch_dist"
        )
    directory = DcpDirectory(where)
    made = TrainingState(where)
    states: set[str] = set()
    buckets = 0
    for name in directory.tensors:
        matched = _STATE.fullmatch(name)
        if _BUCKETS.match(name):
            buckets += 1
            continue
        leaf = _leaf(directory, name)
        for parameter, single in _unstacked(matched[2] if matched else name, leaf):
            if matched is None:
                made.model[parameter] = single
                continue
            kind = "fp32" if matched[1] in _MASTERS else matched[1]
            states.add(kind)
            kept = made.states.setdefault(parameter, {})
            if kind in kept:
                raise UnsupportedSource(f"{where}: two optimizers hold {kind!r} of {parameter!r}")
            kept[kind] = single
    common = _read_common(directory)
    for key, value in common.items():
        if key == "optimizer":
            _add_optimizer(made, value)
        else:
            made.rest[key] = plain(value, where)
    facts = {
        "written by": "Megatron-Core, torch_dist",
        "optimizer state": _told(states, buckets),
        "checkpoint version": str(common.get("checkpoint_version", "")),
    }
    skipped = sorted({name.partition("/")[0] for name in directory.objects if name != _COMMON_OBJECT})
    if skipped:
        facts["objects left out"] = f"{len(skipped)}, such as {skipped[0]}"
    return source_of(os.path.abspath(path), KIND, made.tree(), step=common.get("iteration"), facts=facts)


def _read_config(directory: str) -> Mapping[str, Any] | None:
    """The description of the format; None if there is none."""
    file = os.path.join(directory, _CONFIG)
    if not os.path.isfile(file):
        return None
    with open(file, "rb") as opened:
        found = json.loads(opened.read(_CONFIG_NBYTES))
    return found if isinstance(found, dict) and "sharded_backend" in found else None


def _read_common(directory: DcpDirectory) -> dict[str, Any]:
    file = os.path.join(directory.path, _COMMON)
    if _COMMON_OBJECT in directory.objects:
        found = directory.read_object(_COMMON_OBJECT, INERT)
        found = found[0] if isinstance(found, list) and found else found
    else:
        found = read_torch_file(file, INERT)
    if not isinstance(found, dict):
        raise CorruptCheckpoint("it is not the dictionary that Megatron saves", path=file)
    return {key: value for key, value in found.items() if isinstance(key, str)}


def _told(states: set[str], buckets: int) -> str:
    if states:
        return ", ".join(sorted(states))
    return "in the buckets of a distributed optimizer, not read" if buckets else "none"


def _add_optimizer(made: TrainingState, saved: object) -> None:
    """The options of the groups. Parameters are counted per rank, so only a single group has known ones."""
    inner = saved.get("optimizer") if isinstance(saved, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict):
        made.groups = [{**plain(groups[0], made.path), "params": list(made.states)}]
    else:
        made.rest["megatron_optimizer"] = plain(saved, made.path)


# --- shapes


def _leaf(directory: DcpDirectory, name: str) -> SourceLeaf:
    known = directory.attributes.get("mcore_data")
    extra = known.get(name) if isinstance(known, dict) else None
    shape = extra.get(_ORIGINAL_SHAPE) if isinstance(extra, dict) else None
    return directory.leaf(name, name) if shape is None else _flat_leaf(directory, name, shape)


def _flat_leaf(directory: DcpDirectory, name: str, shape: object) -> SourceLeaf:
    """A tensor whose parts on each rank were flattened and cut.

    What is stored has a dimension for each one of the tensor, which counts the parts, and a last one with the
    elements of a part, in C order.
    """
    dtype, stored = directory.describe(name)
    if (
        not isinstance(shape, (tuple, list))
        or not all(type(n) is int and n > 0 for n in shape)
        or len(shape) + 1 != len(stored)
        or any(n % parts for n, parts in zip(shape, stored[:-1], strict=True))
    ):
        raise CorruptCheckpoint(
            f"a flattened tensor of shape {stored} is not one of {shape!r}",
            path=directory.metadata_path,
            leaf=name,
        )
    part = tuple(n // parts for n, parts in zip(shape, stored[:-1], strict=True))
    if math.prod(part) != stored[-1]:
        raise CorruptCheckpoint(
            f"its parts have {stored[-1]} elements, but {part} is the shape of one",
            path=directory.metadata_path,
            leaf=name,
        )
    fragments: list[SourceFragment] = []
    for held, stored_tensor in directory.stored_boxes(name):
        if any(n != 1 for n in held.shape[:-1]):
            raise UnsupportedSource(f"{directory.metadata_path}: {name!r} has a piece of several parts")
        corner = tuple(n * at for n, at in zip(part, held.start[:-1], strict=True))
        flat = (stored_tensor.file, stored_tensor.offset, held.start[-1], held.stop[-1])
        for fragment in flat_fragments(*flat, part, itemsize(dtype)):
            start = tuple(a + b for a, b in zip(corner, fragment.box.start, strict=True))
            fragments.append(replace(fragment, box=Box(start, fragment.box.shape)))
    return SourceLeaf(name, dtype, tuple(shape), tuple(fragments))


def _unstacked(name: str, leaf: SourceLeaf) -> Iterator[tuple[str, SourceLeaf]]:
    """A tensor with a dimension for the layers, as one for each layer; any other as it is."""
    matched = _STACKED.fullmatch(name)
    if matched is None or not leaf.shape:
        yield name, leaf
        return
    rest = leaf.shape[1:]
    nbytes = itemsize(leaf.dtype)
    layers: list[list[SourceFragment]] = [[] for _ in range(leaf.shape[0])]
    for fragment in leaf.fragments:
        box = Box(fragment.box.start[1:], fragment.box.shape[1:])
        for number in range(fragment.box.shape[0]):
            at = fragment.offset + number * nbytes * box.volume
            layers[fragment.box.start[0] + number].append(SourceFragment(fragment.file, at, box))
    for number, fragments in enumerate(layers):
        yield f"{matched[1]}{number}.{matched[2]}", replace(leaf, shape=rest, fragments=tuple(fragments))
