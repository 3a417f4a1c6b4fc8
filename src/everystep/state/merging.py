"""State trees of several ranks made one: what each of them has, at the place where it has it.

Ranks of a pipeline hold other layers, ranks of a sharded optimizer other parameters, and each says in its
tree what it holds. Together they are the tree of the whole state. Where two say something about one place
that cannot be joined (values, arrays, lists of other lengths), the first one counts. No save makes such
trees: `everystep.store.ranks.checks.values` compares what ranks say by the rules that are here.

Nodes come from files: the walk is bounded, and what makes no sense is `CorruptCheckpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from everystep.state.node import (
    COUNTER,
    DEFAULT_DICT,
    DICT,
    HEADED,
    MAX_DEPTH,
    NAMESPACE,
    ORDERED,
    STATE_DICT,
    TUPLE,
    Node,
    corrupt,
    headed_body,
    items_of,
    pairs_of,
    tag_of,
)

_PLAIN = "plain"
_LIST = "list"
_MAPPINGS = (DICT, ORDERED, COUNTER, NAMESPACE, STATE_DICT, DEFAULT_DICT)
_STATE, GROUPS, PARAMETERS = "state", "param_groups", "params"


def merge_trees(trees: Sequence[Node]) -> Node:
    """The union of the trees, in order of appearance. Linear in their size."""
    return _merge(trees, 0)


def _merge(nodes: Sequence[Node], depth: int) -> Node:
    first = nodes[0]
    if depth > MAX_DEPTH:
        corrupt(f"nested deeper than {MAX_DEPTH} levels")
    kind = kind_of(first)
    if len(nodes) == 1 or kind is None:
        return first
    alike = [node for node in nodes if kind_of(node) == kind]
    if kind in (_LIST, TUPLE):
        return _rebuilt(first, kind, _merge_items([items_of(node) or [] for node in alike], depth))
    return _rebuilt(first, kind, _merge_pairs([_entries(node) for node in alike], depth))


def kind_of(node: Node) -> str | None:
    """The kind of a node that can be merged with nodes of the same kind; None for all others."""
    if type(node) is list:
        return _LIST
    if type(node) is not dict:
        return None
    tag = tag_of(node)
    if tag is None:
        return _PLAIN
    return tag if tag in _MAPPINGS or tag == TUPLE else None


def _rebuilt(first: Node, kind: str, body: list[Node]) -> Node:
    """A node of the kind of `first`: elements of a sequence, or pairs of a mapping."""
    if kind == _LIST:
        return body
    if kind == _PLAIN:
        return {str(pair[0]): pair[1] for pair in body if type(pair) is list}
    if kind in HEADED:
        assert type(first) is dict
        return {kind: [headed_body(kind, first[kind])[0], *body]}
    return {kind: body}


def _entries(node: Node) -> dict[object, tuple[Node, Node]]:
    """Key node and value node of every entry, by something to compare keys with."""
    return {_identity(key): (key, value) for key, value in pairs_of(node) or ()}


def _merge_items(lists: Sequence[list[Node]], depth: int) -> list[Node]:
    alike = [items for items in lists if len(items) == len(lists[0])]
    return [_merge(nodes, depth + 1) for nodes in zip(*alike, strict=True)]


def _merge_pairs(mappings: Sequence[dict[object, tuple[Node, Node]]], depth: int) -> list[Node]:
    found: dict[object, tuple[Node, list[Node]]] = {}
    for entries in mappings:
        for identity, (key, value) in entries.items():
            found.setdefault(identity, (key, []))[1].append(value)
    # Who has no groups says nothing about them.
    optimizers = all(
        is_optimizer({key: value for key, (_, value) in its.items()}) for its in mappings if GROUPS in its
    )
    return [
        [
            key,
            _merge_groups(values, depth + 1) if optimizers and key == GROUPS else _merge(values, depth + 1),
        ]
        for key, values in found.values()
    ]


def is_optimizer(entries: Mapping[Any, Node]) -> bool:
    """Whether this is an optimizer's state: state by parameter, and groups that list their parameters."""
    groups = entries.get(GROUPS)
    if _STATE not in entries or pairs_of(entries[_STATE]) is None or type(groups) is not list:
        return False
    return all(
        kind_of(group) == _PLAIN and type(group) is dict and type(group.get(PARAMETERS)) is list
        for group in groups
    )


def _merge_groups(lists: Sequence[Node], depth: int) -> Node:
    """Groups by position: their parameters united, all else from the first. Further groups follow."""
    if depth + 2 > MAX_DEPTH:
        corrupt(f"nested deeper than {MAX_DEPTH} levels")
    merged: list[Node] = []
    groups = [groups for groups in lists if type(groups) is list]
    for position in range(max(map(len, groups))):
        here = [found for its in groups if position < len(its) and type(found := its[position]) is dict]
        names = [its for group in here if type(its := group[PARAMETERS]) is list]
        united = {_identity(name): name for its in reversed(names) for name in reversed(its)}
        order = dict.fromkeys(_identity(name) for its in names for name in its)
        rest: dict[str, Node] = {}
        for group in here:
            for key, value in group.items():
                rest.setdefault(key, value)
        rest[PARAMETERS] = [united[identity] for identity in order]
        merged.append(rest)
    return merged


def _identity(node: Node) -> object:
    """Equal for equal nodes only: to Python, 1 and 1.0 and True are equal as well."""
    if type(node) is str:
        return node
    try:
        return msgspec.json.encode(node)
    except (RecursionError, ValueError):
        corrupt("a key that cannot be one")
