"""The JSON form of a state tree: what a node may look like, and the few questions every reader asks of one.

Owns the shape of nodes (docs/format.md has their grammar). `value_encoder` owns the form of single
values, `flatten` builds nodes from a state, `unflatten` and `restore` build a state from nodes.

A node is a JSON value. Anything JSON cannot say exactly is a *tagged* node: an object with one key that
starts with ``$``. Nodes come from files, so nothing here trusts them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import msgspec

from everystep.errors import CorruptCheckpoint

Node: TypeAlias = "bool | int | float | str | list[Node] | dict[str, Node] | None"

MAX_DEPTH = 100
"""Containers within containers, counted in the state. One of them takes up to three levels of JSON."""

_MAX_JSON_DEPTH = 3 * MAX_DEPTH + 3

MAX_COLLISIONS = 1000
"""Keys of one dict or set with the same hash: such integers can be made up, and each is compared with all."""

_MANY = 16

MAX_EXACT_INT = 2**53
"""Integers beyond this are tagged: many JSON readers would round them."""

_MAX_LENGTH = 2**63 - 1
_LARGE_LENGTH = re.compile(r"[0-9]{1,19}", re.ASCII)

ZONE_KEY = re.compile(r"[A-Za-z0-9_+\-]{1,40}(?:/[A-Za-z0-9_+\-]{1,40}){0,3}", re.ASCII)
"""Keys of the time zone database; nothing that could climb out of it."""

LEAF = "$leaf"
TENSOR = "$tensor"
BLOBS = ("$bytes", "$bytearray")
"""What they hold is text, or a reference to the leaf that it is stored as."""
TUPLE = "$tuple"
DEQUE = "$deque"
DICT = "$dict"
ORDERED = "$odict"
COUNTER = "$counter"
DEFAULT_DICT = "$defaultdict"
NAMESPACE = "$namespace"
STATE_DICT = "$state_dict"
HEADED = {STATE_DICT: "its metadata", DEFAULT_DICT: "what makes its values"}
"""Mappings with something before their pairs."""
FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}
"""What may make the values of a `defaultdict`, by name."""
PER_RANK = "$per_rank"
UNORDERED = ("$set", "$frozenset")

NAMELESS = "_"
"""Name of a leaf or value that has no path: the state itself, or one under an empty key."""


def corrupt(reason: str, place: str = "") -> NoReturn:
    at = f" at {shorten(place)!r}" if place else ""
    raise CorruptCheckpoint(f"the state tree is malformed{at}: {reason}")


def shorten(text: object, limit: int = 120) -> str:
    """Text for an error message, bounded however long a hostile file made it."""
    try:
        whole = text if isinstance(text, str) else repr(text)
    except ValueError:  # integers of thousands of digits, numpy's times without a unit
        whole = type(text).__name__
    return whole if len(whole) <= limit else whole[:limit] + "..."


def tag_of(node: Node) -> str | None:
    """The tag of a tagged node, None for any other."""
    if type(node) is dict and len(node) == 1:
        (key,) = node
        if key[:1] == "$":
            return key
    return None


def leaf_of(node: Node) -> str | None:
    """The leaf name a node refers to, None when it is not a reference."""
    if type(node) is dict and len(node) == 1:
        if LEAF in node:
            name = node[LEAF]
            if type(name) is not str:
                corrupt(f"a leaf reference holds {shorten(name)} where a name belongs")
            return name
        if TENSOR in node:
            return tensor_body(node[TENSOR])[0]
    return None


def tensor_body(body: Node) -> tuple[str, bool, bool]:
    """The name of a leaf that is more than a plain tensor, whether it is a parameter, and `requires_grad`."""
    if type(body) is list and len(body) == 3:
        name, is_parameter, requires_grad = body
        if type(name) is str and type(is_parameter) is bool and type(requires_grad) is bool:
            return name, is_parameter, requires_grad
    corrupt(f"{TENSOR} holds {shorten(body)} where a name and two flags belong")


def blob_of(node: Node) -> str | None:
    """The name of the leaf that holds the bytes of a large bytes or bytearray; None for any other node."""
    if type(node) is dict and len(node) == 1:
        ((tag, body),) = node.items()
        if tag in BLOBS and type(body) is dict:
            name = leaf_of(body) if LEAF in body else None
            if name is None:
                corrupt(f"{tag} holds {shorten(body)} where base64 or a leaf belongs")
            return name
    return None


def reference_of(node: Node) -> str | None:
    """The name of the leaf that a node is, or that holds its bytes."""
    name = leaf_of(node)
    return blob_of(node) if name is None else name


def per_rank_of(node: Node) -> str | None:
    """The place under which each rank keeps its own node, None when the node is not such a reference."""
    if type(node) is dict and len(node) == 1 and PER_RANK in node:
        place = node[PER_RANK]
        if type(place) is not str:
            corrupt(f"{PER_RANK} holds {shorten(place)} where a place belongs")
        return place
    return None


def localized(tree: Node, local: Mapping[str, Node] | None) -> Node:
    """The tree, with this rank's own nodes (from `local`) in the places that each rank fills itself.

    Nodes without such a place are not copied.
    """
    return _localized(tree, local, 0) if local else tree


def _localized(node: Node, local: Mapping[str, Node], depth: int) -> Node:
    if depth > _MAX_JSON_DEPTH:
        corrupt(f"nested deeper than {MAX_DEPTH} levels")
    if type(node) is dict:
        place = per_rank_of(node)
        if place is not None:
            return local.get(place, node)
        changed: dict[str, Node] = {}
        for key, item in node.items():
            if type(item) is dict or type(item) is list:
                found = _localized(item, local, depth + 1)
                if found is not item:
                    changed[key] = found
        return {**node, **changed} if changed else node
    if type(node) is list:
        items = [
            _localized(item, local, depth + 1) if type(item) is dict or type(item) is list else item
            for item in node
        ]
        return items if any(new is not old for new, old in zip(items, node, strict=True)) else node
    return node


def per_rank_places(tree: Node) -> Iterator[str]:
    """The places of a tree at which each rank has its own node."""
    return _per_rank_places(tree, 0)


def holds_per_rank(node: Node) -> bool:
    return next(_per_rank_places(node, 0), None) is not None


def _per_rank_places(node: Node, depth: int) -> Iterator[str]:
    if depth > _MAX_JSON_DEPTH:
        corrupt(f"nested deeper than {MAX_DEPTH} levels")
    place = per_rank_of(node)
    if place is not None:
        yield place
        return
    inner = node.values() if type(node) is dict else node if type(node) is list else ()
    for item in inner:
        if type(item) is dict or type(item) is list:
            yield from _per_rank_places(item, depth + 1)


def pairs_of(node: Node) -> Iterator[tuple[Node, Node]] | None:
    """Key nodes and value nodes of any kind of mapping, None when the node is not a mapping."""
    if type(node) is not dict:
        return None
    tag = tag_of(node)
    if tag is None:
        return _plain_pairs(node)
    if tag in (DICT, ORDERED, COUNTER, NAMESPACE):
        return _tagged_pairs(tag, node[tag])
    if tag in HEADED:
        return _tagged_pairs(tag, headed_body(tag, node[tag])[1])
    return None


def items_of(node: Node) -> list[Node] | None:
    """Element nodes of a list, tuple or deque, None for anything else."""
    if type(node) is list:
        return node
    tag = tag_of(node)
    if tag == TUPLE:
        assert type(node) is dict
        body = node[TUPLE]
        if type(body) is not list:
            corrupt(f"{TUPLE} needs a list")
        return body
    if tag == DEQUE:
        assert type(node) is dict
        return deque_body(node[DEQUE])[0]
    return None


def deque_body(body: Node) -> tuple[list[Node], int | None]:
    if type(body) is not list or len(body) != 2 or type(body[0]) is not list:
        corrupt(f"{DEQUE} needs a list of items and a length limit")
    items, limit_node = body
    assert type(items) is list
    limit = None if limit_node is None else _length(limit_node)
    if limit is not None and len(items) > limit:
        corrupt(f"{DEQUE} holds {len(items)} items, more than its limit of {limit}")
    return items, limit


def _length(node: Node) -> int:
    """The length limit of a deque: tagged if it is large, as the `sys.maxsize` by which some say "none"."""
    if type(node) is int and 0 <= node <= MAX_EXACT_INT:
        return node
    text = node.get("$int") if type(node) is dict and len(node) == 1 else None
    if type(text) is str and _LARGE_LENGTH.fullmatch(text) is not None and int(text) <= _MAX_LENGTH:
        return int(text)
    corrupt(f"{DEQUE} has the length limit {shorten(node)}")


def state_dict_body(body: Node) -> tuple[Node, list[Node]]:
    """The metadata node and the pairs of an ordered dict that torch made."""
    return headed_body(STATE_DICT, body)


def headed_body(tag: str, body: Node) -> tuple[Node, list[Node]]:
    """The head of a mapping that has one, and its pairs."""
    if type(body) is not list or not body:
        corrupt(f"{tag} needs {HEADED[tag]} and then pairs")
    return body[0], body[1:]


def collide(keys: Collection[Hashable]) -> bool:
    """Whether so many keys have one hash that a dict or set of them would take forever to fill."""
    return len(keys) > MAX_COLLISIONS and max(Counter(map(hash, keys)).values()) > MAX_COLLISIONS


def without_order(node: Node, tags: Collection[str] = UNORDERED) -> Node:
    """The node with the members of sets sorted, because their order differs between processes.

    `tags`: which nodes to sort.
    """
    if type(node) is list:
        return [without_order(item, tags) for item in node]
    if type(node) is not dict:
        return node
    inner = {key: without_order(item, tags) for key, item in node.items()}
    tag = tag_of(node)
    body = inner[tag] if tag in tags and tag is not None else None
    if tag is not None and type(body) is list:
        return {tag: sorted(body, key=msgspec.json.encode)}
    return inner


def leaf_names(tree: Node) -> Iterator[str]:
    """Every leaf name the tree refers to, in its order (a name may come twice in a damaged tree).

    Leaves that each rank has for itself are not among them: the tree refers to their place only.
    """
    return _names(tree, reference_of, 0)


def references(node: Node, found: list[str]) -> None:
    """Adds every leaf name that a tree refers to, as `leaf_names` gives them, of a tree that can be trusted.

    On the path of every save: large containers of a large state hold leaves only, and these are read at once.
    """
    items: Any = node.values() if type(node) is dict else node
    if len(items) > _MANY:
        try:
            found += [item[LEAF] for item in items]
            return
        except (KeyError, TypeError):  # there is something else, too
            pass
    for item in items:
        kind = type(item)
        if kind is dict:
            if LEAF in item:
                found.append(item[LEAF])
            elif TENSOR in item:
                found.append(item[TENSOR][0])
            else:
                references(item, found)
        elif kind is list:
            references(item, found)


def unmatched(trees: Iterable[Node], names: set[str], elsewhere: Collection[str] = ()) -> str | None:
    """A message if trees do not refer to exactly the leaves and aliases of these names; otherwise None.

    They may also refer to leaves that are `elsewhere`, on other ranks.
    """
    found: list[str] = []
    for tree in trees:
        references([tree], found)
    lost = names.difference(found)
    if lost:
        return f"the leaf {shorten(min(lost))!r} has no place in the tree"
    for name in found if len(found) > len(names) else ():
        if name not in names and name not in elsewhere:
            return f"the tree refers to the leaf {shorten(name)!r}, which is not there"
    return None


def blob_names(tree: Node) -> Iterator[str]:
    """The names of those leaves that hold bytes, and are no arrays of the state."""
    return _names(tree, blob_of, 0)


def _names(node: Node, name_of: Callable[[Node], str | None], depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        corrupt(f"nested deeper than {MAX_DEPTH} levels")
    name = name_of(node)
    if name is not None:
        yield name
        return
    items = items_of(node)
    if items is not None:
        for item in items:
            if type(item) is dict or type(item) is list:
                yield from _names(item, name_of, depth + 1)
        return
    pairs = pairs_of(node)
    if pairs is not None:
        for _, value in pairs:
            if type(value) is dict or type(value) is list:
                yield from _names(value, name_of, depth + 1)


def holds_leaves(node: Node) -> bool:
    """Whether something of the node is stored as leaves: arrays, or large bytes."""
    return next(_names(node, reference_of, 0), None) is not None


def holds_arrays(node: Node) -> bool:
    """Whether there are arrays in what the node describes."""
    return next(_names(node, leaf_of, 0), None) is not None


def _plain_pairs(node: dict[str, Node]) -> Iterator[tuple[Node, Node]]:
    for key, value in node.items():
        if key[:1] == "$":
            corrupt(f"key {shorten(key)!r} among others: tags stand alone")
        yield key, value


def _tagged_pairs(tag: str, body: Node) -> Iterator[tuple[Node, Node]]:
    if type(body) is not list:
        corrupt(f"{tag} needs a list of pairs")
    for pair in body:
        if type(pair) is not list or len(pair) != 2:
            corrupt(f"{tag} holds {shorten(pair)} where a pair belongs")
        yield pair[0], pair[1]
