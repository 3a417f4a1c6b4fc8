"""Whether the trees of a checkpoint say something that can be loaded, and where they do not.

Checksums show that a manifest is the one that was written, not that it makes sense. Loading finds out when it
decodes the trees; here they are decoded by the same code, without the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.records import Part
from everystep.state import Node
from everystep.state.leaf_table import component
from everystep.state.node import blob_names, items_of, localized, pairs_of, shorten
from everystep.state.unflatten import decode, decode_key, is_blob
from everystep.store.read.shard_reader import VerifyProblem
from everystep.store.read.stored_checkpoint import StoredCheckpoint

_MANY = 20
"""Problems of one tree beyond this are not looked for."""


def problems_of_part(checkpoint: StoredCheckpoint, part: Part) -> list[VerifyProblem]:
    """What is wrong in the trees that one part has: its own (of rank 0: the root's), and its local ones."""
    file = checkpoint.parts.file_of(part.rank)
    found = _problems(checkpoint.root.tree if part.rank == 0 else part.tree, "", file)
    for place, node in part.local.items():
        found += _problems(node, place, file)
    return found


def problems_of_whole(checkpoint: StoredCheckpoint) -> list[VerifyProblem]:
    """What shows only in the tree that one process loads: those of all ranks, with what rank 0 has alone."""
    tree = localized(checkpoint.tree, checkpoint.local(0))
    return _problems(tree, "", checkpoint.manifest_path) or _no_bytes(checkpoint, tree)


def _no_bytes(checkpoint: StoredCheckpoint, tree: Node) -> list[VerifyProblem]:
    """Leaves that should hold the bytes of a value, and are arrays."""
    metas = checkpoint.metas_for(0)
    aliases = {**checkpoint.aliases, **checkpoint.parts.local_aliases(0)}
    found = [
        name
        for name in blob_names(tree)
        if (meta := metas.get(aliases.get(name, name))) is not None and not is_blob(meta.dtype, meta.shape)
    ]
    return [
        VerifyProblem(checkpoint.manifest_path, "an array, where bytes belong", name)
        for name in found[:_MANY]
    ]


def _problems(tree: Node, place: str, file: str) -> list[VerifyProblem]:
    found = islice(_malformed(tree, place, 0), _MANY)
    return [
        VerifyProblem(file, f"at {shorten(place)!r}: {reason}" if place else reason)
        for place, reason in found
    ]


def _malformed(node: Node, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Place and reason of everything that cannot be decoded, as deep in the tree as possible."""
    try:
        decode(node, _any_leaf, depth)
    except UnsupportedState:
        # A value that needs a library which is not here: no damage, but it has hidden what comes after it.
        yield from _malformed_inside(node, place, depth)
    except CorruptCheckpoint as error:
        deeper = False
        for found in _malformed_inside(node, place, depth):
            deeper = True
            yield found
        if not deeper:
            yield place, error.reason


def _malformed_inside(node: Node, place: str, depth: int) -> Iterator[tuple[str, str]]:
    prefix = f"{place}." if place else ""
    try:
        pairs = list(pairs_of(node) or ())
        items = items_of(node) or []
    except CorruptCheckpoint:
        return
    for key, item in pairs:
        yield from _malformed(item, prefix + _name(key, depth + 1), depth + 1)
    for index, item in enumerate(items):
        yield from _malformed(item, f"{prefix}{index}", depth + 1)


def _name(key: Node, depth: int) -> str:
    try:
        return component(decode_key(key, depth))
    except (CorruptCheckpoint, UnsupportedState):
        return shorten(key)


def _any_leaf(name: str) -> object:
    return None
