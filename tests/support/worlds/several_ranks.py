"""Checkpoints of several ranks, written by one process: each rank's files as it would write them itself.

What a rank has in memory is cut out of the whole arrays with numpy (`support.worlds.simulated_worlds`), as
torch would cut it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everystep import engine
from everystep.engine import CHUNK_NBYTES, Memory, Tuning
from everystep.format.checksums import digest
from everystep.format.manifest import encode_part, encode_root, part_name, part_ref, shard_name
from everystep.format.records import Alias, Fragment, Leaf, Part, Root, ShardFile
from everystep.plan import plan_shard
from everystep.plan.description import encode_plan
from everystep.plan.fragments import sources
from everystep.plan.ranks import WritePlan
from everystep.plan.replica_groups import Owned
from everystep.plan.volumes import stripe
from everystep.state import LeafSource
from support.worlds.simulated_worlds import Array, memory_of

ID = "0123456789abcdef0123456789abcdef"
NUMPY_NAMES = {"uint8": "U8", "float16": "F16", "float32": "F32", "int64": "I64"}


@dataclass(frozen=True)
class Own:
    """What one rank has for itself, beside the leaves it shares with others."""

    tree: Any = None
    local: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


def write_several(
    directory: Path,
    plan: WritePlan,
    state: Mapping[str, Array],
    *,
    tree: Any = None,
    own: Mapping[int, Own] | None = None,
    volumes: Sequence[Path] = (),
    layout: bytes | None = None,
    step: int = 7,
) -> None:
    """A committed checkpoint. `volumes`: further directories over which every rank stripes its fragments."""
    own = own or {}
    directory.mkdir(parents=True)
    parts = [
        _write_rank(directory, plan, state, rank, own.get(rank, Own()), volumes)
        for rank in range(plan.topology.world)
    ]
    refs = []
    for part in parts[1:]:
        encoded = encode_part(part)
        (directory / part_name(part.rank)).write_bytes(encoded)
        refs.append(part_ref(part, encoded))
    root = Root(
        id=ID,
        step=step,
        created=1.75e9,
        world=len(parts),
        metrics={"loss": 0.5},
        tree={leaf.name: {"$leaf": leaf.name} for leaf in plan.leaves} if tree is None else tree,
        part=parts[0],
        parts=tuple(refs),
        trees=tuple(part.rank for part in parts[1:] if part.tree is not None),
        layout=encode_plan(plan) if layout is None else layout,
    )
    (directory / "manifest.json").write_bytes(encode_root(root))


def _write_rank(
    directory: Path, plan: WritePlan, state: Mapping[str, Array], rank: int, own: Own, volumes: Sequence[Path]
) -> Part:
    places = [directory, *volumes]
    striped = stripe(plan.fragments(rank), [1.0] * len(places), block_nbytes=1)
    files: list[ShardFile] = []
    fragments: dict[str, list[Fragment]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    for volume, (place, owned) in enumerate(zip(places, striped, strict=True)):
        leaves = _cut(plan, state, rank, owned, volume)
        if volume == 0:
            leaves += [_source(name, array) for name, array in own.arrays.items()]
        shard = plan_shard([leaves])
        name = shard_name(rank, volume)
        job = engine.write(place / name, shard.nbytes, shard.pieces(), tuning=Tuning(), header=shard.header)
        job.wait()
        far = {} if place == directory else {"volume": str(place), "host": "elsewhere"}
        files.append(ShardFile(name, shard.nbytes, len(shard.header), digest(shard.header), **far))
        for leaf, offset, chunks in zip(shard.leaves, shard.offsets, job.checksums(), strict=True):
            start = (0,) * len(leaf.shape) if leaf.fragment is None else leaf.fragment.start
            fragments.setdefault(leaf.name, []).append(
                Fragment(start, leaf.shape, volume, offset, leaf.nbytes, chunks)
            )
            kinds[leaf.name] = leaf.dtype, leaf.whole_shape, leaf.framework
        job.abandon()
    described = tuple(Leaf(name, *kinds[name], tuple(found)) for name, found in fragments.items())
    aliases = tuple(Alias(name, of) for name, of in own.aliases.items())
    return Part(rank, CHUNK_NBYTES, tuple(files), described, aliases, dict(own.local), own.tree)


def _cut(
    plan: WritePlan, state: Mapping[str, Array], rank: int, owned: Sequence[Owned], volume: int
) -> list[LeafSource]:
    """The fragments of a rank, spread by spread: its array for one is another than for the next."""
    memory = memory_of(plan.leaves, state, rank)
    found: list[LeafSource] = []
    counts: dict[str, int] = {}
    for item in owned:
        leaf = plan.leaves[item.leaf]
        array = memory[leaf.name, item.placement]
        here = LeafSource(leaf.name, leaf.dtype, array.shape, leaf.framework, _memory(array))
        (cut,) = sources([item], plan.leaves, [here], volume)
        index = counts[leaf.name] = counts.get(leaf.name, -1) + 1
        fragment = (
            type(cut.fragment)(cut.fragment.start, leaf.shape, index, volume)
            if cut.fragment is not None
            else None
        )
        found.append(LeafSource(leaf.name, leaf.dtype, cut.shape, leaf.framework, cut.source, None, fragment))
    return found


def _source(name: str, array: Array) -> LeafSource:
    array = np.ascontiguousarray(array).reshape(array.shape)
    return LeafSource(name, NUMPY_NAMES[array.dtype.name], array.shape, "numpy", _memory(array))


def _memory(array: Array) -> Memory:
    assert array.flags.c_contiguous
    return Memory(array.ctypes.data, array.itemsize * math.prod(array.shape), array)
