"""The records that describe a checkpoint: what is said of each leaf, and of what a rank wrote."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from everystep import engine
from everystep.engine import CHUNK_NBYTES
from everystep.errors import UnsupportedState
from everystep.format.embedded import EMBEDDING_SHARD, embed_root
from everystep.format.records import EMBEDDED, Alias, Fragment, Leaf, Part, Root, ShardFile
from everystep.plan import ShardLayout, ShardPlan
from everystep.state import LeafSource
from everystep.state.node import Node, unmatched
from everystep.store.commit.share import Share


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
    shards: Iterable[tuple[Sequence[LeafSource], Sequence[int], Sequence[str]]],
) -> Iterator[Leaf]:
    """The records of all leaves of a part, whole ones first. Of each shard: its leaves, where each is in it,
    and the checksums of each."""
    boxed: dict[str, tuple[LeafSource, list[Fragment]]] = {}
    for number, (leaves, offsets, checksums) in enumerate(shards):
        for leaf, offset, chunks in zip(leaves, offsets, checksums, strict=True):
            if leaf.fragment is None:
                start = (0,) * len(leaf.shape)
                fragment = Fragment(start, leaf.shape, number, offset, leaf.source.nbytes, chunks)
                yield Leaf(leaf.name, leaf.dtype, leaf.shape, leaf.framework, (fragment,))
            else:
                fragment = Fragment(
                    leaf.fragment.start, leaf.shape, number, offset, leaf.source.nbytes, chunks
                )
                boxed.setdefault(leaf.name, (leaf, []))[1].append(fragment)
    for name, (leaf, fragments) in boxed.items():
        yield Leaf(name, leaf.dtype, leaf.whole_shape, leaf.framework, tuple(fragments))


def part_of(
    rank: int,
    files: Iterable[ShardFile],
    leaves: Iterable[Leaf],
    aliases: Sequence[tuple[str, str]] = (),
    local: Mapping[str, Any] | None = None,
    tree: Any = None,
) -> Part:
    """What one rank wrote. `tree`: its own, where that differs from the one in the root."""
    found = tuple([Alias(name, of) for name, of in aliases]) if aliases else ()
    return Part(rank, CHUNK_NBYTES, tuple(files), tuple(leaves), found, dict(local or {}), tree)


def one_file(
    layout: ShardLayout, describe: Callable[[Node, Part], Root], share: Share, limit_nbytes: int
) -> tuple[ShardPlan, engine.Packed] | None:
    """A small state as one file: a shard whose header holds the manifest, and the data, copied.

    None if that takes more than so many bytes, or too long a header. `describe` makes a root.
    """
    packed = engine.pack(layout.pieces(), layout.nbytes)
    checksums = packed.checksums()

    def root_behind(header_nbytes: int) -> Root:
        shard = ShardFile(EMBEDDING_SHARD, header_nbytes + layout.nbytes, header_nbytes, EMBEDDED)
        offsets = [header_nbytes + begin for begin in layout.begins]
        leaves = leaf_records([(layout.leaves, offsets, checksums)])
        return describe(share.tree, part_of(0, [shard], leaves, share.aliases, share.local))

    header = embed_root(root_behind, layout.table, layout.metadata, limit_nbytes - layout.nbytes)
    return None if header is None else (layout.behind(header), packed)
