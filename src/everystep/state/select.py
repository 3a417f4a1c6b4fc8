"""A tree cut down to some of its leaves, for loading part of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from everystep.state.leaf_table import component
from everystep.state.node import (
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
from everystep.state.unflatten import decode_key

_NOTHING: Node = {"$nothing": None}
"""In the place of a node that is left out; compared by identity."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Part of a state: leaves by name, and everything at or below some places, including values.

    A place is the dotted name of a subtree or a value, such as ``optimizer`` or ``epoch``.
    """

    leaves: frozenset[str]
    places: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.leaves

    def covers(self, place: str) -> bool:
        """Whether everything at a place is selected."""
        return any(_is_within(place, chosen) for chosen in self.places)

    def reaches(self, place: str) -> bool:
        """Whether something at or below a place may be selected by place."""
        return any(_is_within(place, chosen) or _is_within(chosen, place) for chosen in self.places)


def _is_within(place: str, outer: str) -> bool:
    return not outer or place == outer or place.startswith(f"{outer}.")


def nodes_at(tree: Node, place: str) -> list[Node]:
    """The subtree or value of that dotted name. (There may be several: keys may have dots.)"""
    return list(_nodes_at(tree, "", place))


def prune(tree: Node, keep: Collection[str] | Selection, place: str = "") -> Node:
    """The tree at a place with only what is selected; an empty mapping when there is nothing.

    Mappings lose their other entries; in sequences, where the place of an element matters, None stands for
    what was left out.
    """
    chosen = keep if isinstance(keep, Selection) else Selection(frozenset(keep))
    return _prune(tree, place, chosen) if _holds(tree, place, chosen) else {}


def with_keys(tree: Node, keys: Collection[str]) -> Node:
    """A mapping with only the entries of these keys; any other tree as it is."""
    if type(tree) is not dict or tag_of(tree) not in (None, DICT, ORDERED):
        return tree
    tag = tag_of(tree)
    entries = [(key, value) for key, value in pairs_of(tree) or () if isinstance(key, str) and key in keys]
    return dict(entries) if tag is None else {tag: [[key, value] for key, value in entries]}


def _inner(node: Node, place: str) -> Iterator[tuple[str, Node]]:
    """The nodes right inside of a container, each with its place."""
    prefix = f"{place}." if place else ""
    items = items_of(node)
    if items is not None:
        yield from ((f"{prefix}{index}", item) for index, item in enumerate(items))
        return
    for key, value in pairs_of(node) or ():
        yield prefix + component(key if type(key) is str else decode_key(key)), value


def _nodes_at(node: Node, place: str, wanted: str) -> Iterator[Node]:
    if reference_of(node) is None:
        for inner, value in _inner(node, place):
            if inner == wanted:
                yield value
            elif _is_within(wanted, inner):
                yield from _nodes_at(value, inner, wanted)


def _holds(node: Node, place: str, keep: Selection) -> bool:
    name = reference_of(node)
    if name is not None:
        return name in keep or keep.covers(place)
    if keep.covers(place):
        return True
    return any(_holds(value, inner, keep) for inner, value in _inner(node, place))


def _prune(node: Node, place: str, keep: Selection) -> Node:
    """Prunes a node that holds something to keep."""
    if reference_of(node) is not None or keep.covers(place):
        return node
    tag = tag_of(node)
    inner = [
        _prune(value, at, keep) if _holds(value, at, keep) else _NOTHING for at, value in _inner(node, place)
    ]
    if items_of(node) is not None:
        kept: list[Node] = [None if value is _NOTHING else value for value in inner]
        if tag is None:
            return kept
        assert type(node) is dict
        body = node[tag]
        if tag == DEQUE:
            assert type(body) is list
            return {tag: [kept, body[1]]}
        return {tag: kept}
    keys = [key for key, _ in pairs_of(node) or ()]
    entries = [(key, value) for key, value in zip(keys, inner, strict=True) if value is not _NOTHING]
    if tag is None:
        return {str(key): value for key, value in entries}
    assert type(node) is dict
    body = node[tag]
    rows: list[Node] = [[key, value] for key, value in entries]
    if tag == STATE_DICT:
        assert type(body) is list
        return {tag: [body[0], *rows]}
    return {tag: rows}
