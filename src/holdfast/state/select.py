"""A tree cut down to some of its leaves, for loading part of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.state.node import (
    DEQUE,
    DICT,
    ORDERED,
    STATE_DICT,
    Node,
    items_of,
    pairs_of,
    reference_of,
    tag_of,
)


def prune(tree: Node, keep: Collection[str]) -> Node:
    """The tree with only the leaves named in `keep`; an empty mapping when there are none.

    Mappings lose their other entries; in sequences, where the place of an element matters, None stands for
    what was left out.
    """
    return _prune(tree, keep) if _holds(tree, keep) else {}


def with_keys(tree: Node, keys: Collection[str]) -> Node:
    """A mapping with only the entries of these keys; any other tree as it is."""
    if type(tree) is not dict or tag_of(tree) not in (None, DICT, ORDERED):
        return tree
    tag = tag_of(tree)
    entries = [(key, value) for key, value in pairs_of(tree) or () if isinstance(key, str) and key in keys]
    return dict(entries) if tag is None else {tag: [[key, value] for key, value in entries]}


def _holds(node: Node, keep: Collection[str]) -> bool:
    name = reference_of(node)
    if name is not None:
        return name in keep
    items = items_of(node)
    if items is not None:
        return any(_holds(item, keep) for item in items)
    pairs = pairs_of(node)
    return pairs is not None and any(_holds(value, keep) for _, value in pairs)


def _prune(node: Node, keep: Collection[str]) -> Node:
    """Of a node that holds something to keep."""
    if reference_of(node) is not None:
        return node
    tag = tag_of(node)
    items = items_of(node)
    if items is not None:
        kept: list[Node] = [_prune(item, keep) if _holds(item, keep) else None for item in items]
        if tag is None:
            return kept
        assert type(node) is dict
        body = node[tag]
        if tag == DEQUE:
            assert type(body) is list
            return {tag: [kept, body[1]]}
        return {tag: kept}
    entries = [(key, _prune(value, keep)) for key, value in pairs_of(node) or () if _holds(value, keep)]
    if tag is None:
        return {str(key): value for key, value in entries}
    assert type(node) is dict
    body = node[tag]
    rows: list[Node] = [[key, value] for key, value in entries]
    if tag == STATE_DICT:
        assert type(body) is list
        return {tag: [body[0], *rows]}
    return {tag: rows}
