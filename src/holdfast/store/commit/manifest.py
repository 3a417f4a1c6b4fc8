"""What a checkpoint says about itself: its manifest, from a state taken apart and placed in a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from holdfast import engine
from holdfast.engine import CHUNK_NBYTES
from holdfast.format.embedded import EMBEDDING_SHARD, embed_root
from holdfast.format.records import EMBEDDED, Alias, Fragment, Leaf, Part, Root, ShardFile
from holdfast.plan import Layout, ShardPlan
from holdfast.state import Flat, LeafSource


class Identity(Struct, frozen=True):
    """What tells a checkpoint from all others."""

    id: str
    step: int
    created: float
    metrics: Mapping[str, float]


def leaf_records(
    leaves: Sequence[LeafSource], offsets: Sequence[int], checksums: Sequence[str]
) -> Iterator[Leaf]:
    """The records of leaves that lie whole at these offsets of one shard."""
    for leaf, offset, chunks in zip(leaves, offsets, checksums, strict=True):
        fragment = Fragment((0,) * len(leaf.shape), leaf.shape, 0, offset, leaf.source.nbytes, chunks)
        yield Leaf(leaf.name, leaf.dtype, leaf.shape, leaf.framework, (fragment,))


def describe(identity: Identity, flat: Flat, shard: ShardFile, leaves: Iterable[Leaf] = ()) -> Root:
    """The manifest of a state that is stored in one shard."""
    aliases = tuple([Alias(name, of) for name, of in (*flat.aliases, *flat.local_aliases)])
    return Root(
        id=identity.id,
        step=identity.step,
        created=identity.created,
        metrics=dict(identity.metrics),
        tree=flat.tree,
        part=Part(0, CHUNK_NBYTES, (shard,), tuple(leaves), aliases, dict(flat.local)),
    )


class OneFile(Struct, frozen=True):
    """A checkpoint that is one file, all of it in memory: `plan.header`, then `packed.data`."""

    plan: ShardPlan
    packed: Any  # Packed; msgspec does not look inside


def one_file(identity: Identity, flat: Flat, layout: Layout, limit_nbytes: int) -> OneFile | None:
    """A small state as one file. None when that has more than so many bytes, or too long a header."""
    packed = engine.pack(layout.pieces(), layout.nbytes)
    checksums = packed.checksums()

    def describe_behind(header_nbytes: int) -> Root:
        shard = ShardFile(EMBEDDING_SHARD, header_nbytes + layout.nbytes, header_nbytes, EMBEDDED)
        offsets = [header_nbytes + begin for begin in layout.begins]
        return describe(identity, flat, shard, leaf_records(layout.leaves, offsets, checksums))

    header = embed_root(describe_behind, layout.table, layout.metadata, limit_nbytes - layout.nbytes)
    return None if header is None else OneFile(layout.behind(header), packed)
