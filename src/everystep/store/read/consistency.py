"""Whether the parts of a checkpoint fit together, and whether its trees can be loaded.

Checksums show that a manifest is the one that was written, not that it makes sense. Loading finds out when it
decodes the trees; here they are decoded by the same code, without the arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.geometry import Box, TooTangled, disjoint, intersect, whole
from everystep.format.records import Part
from everystep.plan.ranks import WritePlan
from everystep.state import LeafMeta, Node
from everystep.state.leaf_table import component
from everystep.state.node import blob_names, items_of, localized, pairs_of, shorten
from everystep.state.unflatten import decode, decode_key, is_blob
from everystep.store.read.parts import MAX_SOURCES, Parts
from everystep.store.read.shard_reader import VerifyProblem

_MANY = 20
"""Problems of one tree beyond this are not looked for."""


def check_agreement(parts: Parts) -> None:
    """`CorruptCheckpoint` unless all parts, the tree and the layout fit together. Opens every part.

    Every element of each leaf must be stored once, and all parts must describe the leaf in the same way.
    """
    boxes: dict[str, dict[int, list[Box]]] = {name: {} for name in parts.metas}
    metas = dict(parts.metas)
    for part in parts:
        metas.update(parts.local_metas(part.rank))
        for leaf in part.leaves:
            held = [Box(fragment.start, fragment.shape) for fragment in leaf.fragments]
            boxes.setdefault(leaf.name, {})[part.rank] = held
    for name, meta in metas.items():
        try:
            _check_whole(meta, boxes[name])
            if parts.layout is not None and name in parts.metas:
                _check_writers(parts.layout, meta, boxes[name])
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(error.reason, path=parts.manifest_path, leaf=name) from None
    parts.merged_tree  # noqa: B018 -- checks that it refers to leaves that are there


def _check_whole(meta: LeafMeta, held: Mapping[int, Sequence[Box]]) -> None:
    boxes = [box for its in held.values() for box in its]
    try:
        once = disjoint(boxes)
    except TooTangled as error:
        raise CorruptCheckpoint(str(error)) from None
    if not once:
        raise CorruptCheckpoint("two ranks have stored the same elements")
    left = math.prod(meta.shape) - sum(box.volume for box in boxes)
    if left:
        raise CorruptCheckpoint(f"{left} of its elements are nowhere")


def _check_writers(layout: WritePlan, meta: LeafMeta, held: Mapping[int, Sequence[Box]]) -> None:
    """Every rank must have stored what a reader will look for in its part."""
    pieces = itertools.islice(layout.sources(meta.name, whole(meta.shape)), MAX_SOURCES)
    for rank, box in pieces:
        both = (intersect(box, its) for its in held.get(rank, ()))
        if sum(found.volume for found in both if found is not None) != box.volume:
            raise CorruptCheckpoint(f"rank {rank} has not stored what the layout says it has")


def problems_of_part(parts: Parts, part: Part) -> list[VerifyProblem]:
    """Problems in the trees of one part: its own (for rank 0, the root's), and its local ones."""
    file = parts.file_of(part.rank)
    found = _problems(parts.root.tree if part.rank == 0 else part.tree, "", file)
    for place, node in part.local.items():
        found += _problems(node, place, file)
    return found


def problems_of_whole(parts: Parts) -> list[VerifyProblem]:
    """Problems that show only in the whole tree: those of all ranks merged, with rank 0's own."""
    tree = localized(parts.tree, parts.local(0))
    return _problems(tree, "", parts.manifest_path) or _no_bytes(parts, tree)


def _no_bytes(parts: Parts, tree: Node) -> list[VerifyProblem]:
    """Leaves that should hold the bytes of a value but are arrays."""
    metas = parts.metas_for(0)
    aliases = parts.aliases_for(0)
    found = [
        name
        for name in blob_names(tree)
        if (meta := metas.get(aliases.get(name, name))) is not None and not is_blob(meta.dtype, meta.shape)
    ]
    return [
        VerifyProblem(parts.manifest_path, "an array, where bytes belong", name) for name in found[:_MANY]
    ]


def _problems(tree: Node, place: str, file: str) -> list[VerifyProblem]:
    found = itertools.islice(_malformed(tree, place, 0), _MANY)
    return [
        VerifyProblem(file, f"at {shorten(place)!r}: {reason}" if place else reason)
        for place, reason in found
    ]


def _malformed(node: Node, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Place and reason of every node that cannot be decoded, as deep in the tree as possible."""
    try:
        decode(node, _any_leaf, depth)
    except UnsupportedState:
        # The value needs a library that is not installed. It is not damaged, but the rest was not decoded.
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
