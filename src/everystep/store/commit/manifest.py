"""The records that describe a checkpoint: the one builder of parts and root manifests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from everystep import engine
from everystep.engine import CHUNK_NBYTES
from everystep.errors import UnsupportedState
from everystep.format.embedded import EMBEDDING_SHARD, embed_root
from everystep.format.records import EMBEDDED, Alias, Fragment, Leaf, Part, PartRef, Root, ShardFile
from everystep.plan import Layout, ShardPlan
from everystep.state import Flat, LeafSource
from everystep.state.node import Node, unmatched


class Identity(Struct, frozen=True):
    """What tells a checkpoint from all others."""

    id: str
    step: int
    created: float
    metrics: Mapping[str, float]


def require_complete(trees: Iterable[Node], names: set[str], elsewhere: Collection[str] = ()) -> None:
    """`UnsupportedState` unless trees refer to exactly these leaves and aliases, and so readers accept them.

    Every way to a committed checkpoint comes by here before its manifest is written. They may also refer to
    leaves that are `elsewhere`, on other ranks.
    """
    problem = unmatched(trees, names, elsewhere)
    if problem is not None:
        raise UnsupportedState(
            f"cannot save this state: {problem}. Nothing was committed, and earlier checkpoints are "
            "untouched. This is an error of Everystep or of the program that took the state apart"
        )


def leaf_records(
    leaves: Sequence[LeafSource], offsets: Sequence[int], checksums: Sequence[str]
) -> Iterator[Leaf]:
    """The records of leaves that lie at these offsets of one shard, whole or in several boxes."""
    boxed: dict[str, tuple[LeafSource, list[Fragment]]] = {}
    for leaf, offset, chunks in zip(leaves, offsets, checksums, strict=True):
        if leaf.fragment is None:
            fragment = Fragment((0,) * len(leaf.shape), leaf.shape, 0, offset, leaf.source.nbytes, chunks)
            yield Leaf(leaf.name, leaf.dtype, leaf.shape, leaf.framework, (fragment,))
        else:
            fragment = Fragment(leaf.fragment.start, leaf.shape, 0, offset, leaf.source.nbytes, chunks)
            boxed.setdefault(leaf.name, (leaf, []))[1].append(fragment)
    for name, (leaf, fragments) in boxed.items():
        yield Leaf(name, leaf.dtype, leaf.whole_shape, leaf.framework, tuple(fragments))


def part_of(
    rank: int,
    files: Iterable[ShardFile],
    leaves: Iterable[Leaf],
    aliases: Iterable[tuple[str, str]],
    local: Mapping[str, Any] | None = None,
    tree: Any = None,
) -> Part:
    """What one rank wrote. `tree`: its own, where that differs from the one in the root."""
    found = tuple([Alias(name, of) for name, of in aliases])
    return Part(rank, CHUNK_NBYTES, tuple(files), tuple(leaves), found, dict(local or {}), tree)


def root_of(
    identity: Identity,
    tree: Any,
    part: Part,
    *,
    world: int = 1,
    others: Iterable[PartRef] = (),
    trees: Iterable[int] = (),
    layout: bytes = b"",
) -> Root:
    """The root manifest. `part` is the coordinator's own, `others` those of the other ranks.

    `trees`: the ranks whose parts have a tree of their own. `layout`: the plan of who wrote what, if one was
    made.
    """
    return Root(
        id=identity.id,
        step=identity.step,
        created=identity.created,
        world=world,
        metrics=dict(identity.metrics),
        tree=tree,
        part=part,
        parts=tuple(others),
        trees=tuple(trees),
        layout=layout,
    )


def root_of_one(identity: Identity, flat: Flat, shard: ShardFile, leaves: Iterable[Leaf] = ()) -> Root:
    """The manifest of a state that one process stored in one shard."""
    part = part_of(0, [shard], leaves, (*flat.aliases, *flat.local_aliases), flat.local)
    return root_of(identity, flat.tree, part)


class OneFile(Struct, frozen=True):
    """A checkpoint that is one file, all of it in memory: `plan.header`, then `packed.data`."""

    plan: ShardPlan
    packed: Any  # Packed; msgspec does not look inside


def one_file(identity: Identity, flat: Flat, layout: Layout, limit_nbytes: int) -> OneFile | None:
    """A small state as one file. None when that has more than so many bytes, or too long a header."""
    packed = engine.pack(layout.pieces(), layout.nbytes)
    checksums = packed.checksums()

    def root_behind(header_nbytes: int) -> Root:
        shard = ShardFile(EMBEDDING_SHARD, header_nbytes + layout.nbytes, header_nbytes, EMBEDDED)
        offsets = [header_nbytes + begin for begin in layout.begins]
        return root_of_one(identity, flat, shard, leaf_records(layout.leaves, offsets, checksums))

    header = embed_root(root_behind, layout.table, layout.metadata, limit_nbytes - layout.nbytes)
    return None if header is None else OneFile(layout.behind(header), packed)
