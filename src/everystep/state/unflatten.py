"""From a tree back to a state: new objects for everything (`unflatten`), or only its values (`values`).

Owns the decoding of containers. Single values belong to `value_decoder`; filling a state that already exists
to `restore`. Trees come from files: whatever is wrong with one is a `CorruptCheckpoint`, never a crash.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from everystep.errors import CorruptCheckpoint
from everystep.state import omegaconf_values, torch_arrays
from everystep.state.arrays import convert
from everystep.state.leaf_table import component
from everystep.state.node import (
    BLOBS,
    COUNTER,
    DEFAULT_DICT,
    DEQUE,
    DICT,
    FACTORIES,
    LEAF,
    MAX_COLLISIONS,
    MAX_DEPTH,
    MAX_EXACT_INT,
    NAMELESS,
    NAMESPACE,
    ORDERED,
    PER_RANK,
    STATE_DICT,
    TENSOR,
    TUPLE,
    Node,
    blob_of,
    collide,
    corrupt,
    deque_body,
    headed_body,
    holds_leaves,
    holds_per_rank,
    items_of,
    leaf_of,
    localized,
    pairs_of,
    per_rank_of,
    reference_of,
    shorten,
    state_dict_body,
    tag_of,
    tensor_body,
)
from everystep.state.value_decoder import DECODERS
from everystep.state.value_encoder import is_value

Resolve = Callable[[str], object]


def unflatten(
    tree: Node,
    arrays: Mapping[str, object],
    *,
    local: Mapping[str, Node] | None = None,
    where: str | None = None,
) -> object:
    """Build the state a tree describes. `arrays` has an array for every leaf and alias name in it.

    Names that were given the same array come back tied. `local` has the nodes of one rank for what each rank
    has for itself: without it, None is there. `where` is the file to name when the tree is damaged.
    """

    def resolve(name: str) -> object:
        try:
            return arrays[name]
        except KeyError:
            corrupt(f"it refers to leaf {shorten(name)!r}, which the checkpoint does not hold")

    return _located(where, lambda: decode(localized(tree, local), resolve))


def values(
    tree: Node, *, local: Mapping[str, Node] | None = None, where: str | None = None
) -> dict[str, object]:
    """Every value of a tree by its dotted name. Dicts are descended; a list without leaves is one value.

    What each rank has for itself is left out where `local` does not have it.
    """
    found: dict[str, object] = {}
    _located(where, lambda: _collect(localized(tree, local), "", found, 0))
    return found


def _located(where: str | None, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except CorruptCheckpoint as error:
        if where is None or error.path is not None:
            raise
        raise CorruptCheckpoint(error.reason, path=where) from None


def decode(node: Node, resolve: Resolve, depth: int = 0) -> Any:
    """The value of a node, with `resolve` giving the array of a leaf name."""
    kind = type(node)
    if kind is dict:
        assert type(node) is dict
        if len(node) == 1 and type(name := node.get(LEAF)) is str:  # what most nodes of a large state are
            return resolve(name)
        tag = tag_of(node)
        if tag is None:
            depth = _deeper(depth)
            pairs = pairs_of(node)
            assert pairs is not None
            return {key: decode(item, resolve, depth) for key, item in pairs}
        if tag == LEAF:
            name = leaf_of(node)
            assert name is not None
            return resolve(name)
        if tag == TENSOR:
            name, is_parameter, requires_grad = tensor_body(node[tag])
            return torch_arrays.as_saved(
                resolve(name), is_parameter=is_parameter, requires_grad=requires_grad
            )
        if tag == PER_RANK:
            per_rank_of(node)
            return None  # another rank's
        if tag in BLOBS and type(node[tag]) is dict:
            name = blob_of(node)
            assert name is not None
            return _blob(tag, resolve(name), name)
        container = _CONTAINERS.get(tag)
        if container is not None:
            return container(node[tag], resolve, _deeper(depth))
        decoder = DECODERS.get(tag) or _DECODERS.get(tag)
        if decoder is None:
            corrupt(f"unknown tag {shorten(tag)!r} (a newer version of Everystep may know it)")
        return decoder(node[tag])
    if kind is list:
        assert type(node) is list
        depth = _deeper(depth)
        return [decode(item, resolve, depth) for item in node]
    if kind is str or kind is bool or node is None:
        return node
    if type(node) is int and -MAX_EXACT_INT <= node <= MAX_EXACT_INT:
        return node
    if type(node) is float and math.isfinite(node):
        return node
    corrupt(f"{shorten(node)} is not a number that is ever written untagged")


def _blob(tag: str, array: Any, name: str) -> bytes | bytearray | None:
    """Large bytes, out of the array that they were read into; None where no arrays are read."""
    if array is None:
        return None
    found = array if isinstance(array, np.ndarray) else convert(array, "numpy")
    if found.dtype != np.uint8 or found.ndim != 1:
        corrupt(f"{tag} refers to leaf {shorten(name)!r}, which is an array and not bytes")
    return found.tobytes() if tag == "$bytes" else bytearray(found.data)


def is_blob(dtype: str, shape: Sequence[int]) -> bool:
    """Whether a leaf of this type can hold bytes."""
    return dtype == "U8" and len(shape) == 1


def decode_value(node: Node) -> Any:
    """The value of a node that holds no arrays."""
    return decode(node, _no_leaf)


def _no_leaf(name: str) -> object:
    corrupt(f"leaf {shorten(name)!r} where only a value can be")


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        corrupt(f"nested deeper than {MAX_DEPTH} levels")
    return depth + 1


def decode_key(node: Node, depth: int = 0) -> Any:
    """The value of a node that is a key or a member of a set."""
    key = decode(node, _no_leaf, depth)
    try:
        hash(key)
    except (TypeError, ValueError):  # ValueError: numpy's time spans without a unit
        corrupt(f"{shorten(node)} cannot be a key or a member of a set")
    return key


def _items(body: Node, resolve: Resolve, depth: int, tag: str) -> list[Any]:
    if type(body) is not list:
        corrupt(f"{tag} needs a list")
    return [decode(item, resolve, depth) for item in body]


def _pairs(body: Node, resolve: Resolve, depth: int, tag: str) -> dict[Any, Any]:
    pairs = pairs_of({tag: body})
    assert pairs is not None
    entries = [(decode_key(key_node, depth), item) for key_node, item in pairs]
    _refuse_collisions([key for key, _ in entries], tag)
    found: dict[Any, Any] = {}
    for key, item in entries:
        if key in found:
            corrupt(f"{tag} has the key {shorten(key)} twice")
        found[key] = decode(item, resolve, depth)
    return found


def _members(body: Node, depth: int, tag: str) -> set[Any]:
    if type(body) is not list:
        corrupt(f"{tag} needs a list")
    members = [decode_key(item, depth) for item in body]
    _refuse_collisions(members, tag)
    found = set(members)
    if len(found) != len(body):
        corrupt(f"{tag} has a member twice")
    return found


def _refuse_collisions(keys: list[Any], tag: str) -> None:
    if collide(keys):
        corrupt(f"{tag} has more than {MAX_COLLISIONS} keys with the same hash")


def _tuple(body: Node, resolve: Resolve, depth: int) -> object:
    return tuple(_items(body, resolve, depth, TUPLE))


def _deque(body: Node, resolve: Resolve, depth: int) -> object:
    items, limit = deque_body(body)
    return deque(_items(items, resolve, depth, DEQUE), limit)


def _dict(body: Node, resolve: Resolve, depth: int) -> object:
    return _pairs(body, resolve, depth, DICT)


def _ordered(body: Node, resolve: Resolve, depth: int) -> object:
    return OrderedDict(_pairs(body, resolve, depth, ORDERED))


def _counter(body: Node, resolve: Resolve, depth: int) -> object:
    counter: Counter[Any] = Counter()
    dict.update(counter, _pairs(body, resolve, depth, COUNTER))
    return counter


def _namespace(body: Node, resolve: Resolve, depth: int) -> object:
    made, found = Namespace(), _pairs(body, resolve, depth, NAMESPACE)
    if not all(type(key) is str for key in found):
        corrupt(f"{NAMESPACE} has an attribute whose name is no text")
    vars(made).update(found)
    return made


def _default_dict(body: Node, resolve: Resolve, depth: int) -> object:
    name = headed_body(DEFAULT_DICT, body)[0]
    if not (name is None or (type(name) is str and name in FACTORIES)):
        corrupt(f"{DEFAULT_DICT} makes its values with {shorten(name)}")
    factory = None if name is None else FACTORIES[str(name)]
    return defaultdict(factory, _pairs(body, resolve, depth, DEFAULT_DICT))


def _state_dict(body: Node, resolve: Resolve, depth: int) -> object:
    metadata, _ = state_dict_body(body)
    found = OrderedDict(_pairs(body, resolve, depth, STATE_DICT))
    found._metadata = decode(metadata, _no_leaf, depth)  # type: ignore[attr-defined]
    return found


def _set(body: Node, resolve: Resolve, depth: int) -> object:
    return _members(body, depth, "$set")


def _frozenset(body: Node, resolve: Resolve, depth: int) -> object:
    return frozenset(_members(body, depth, "$frozenset"))


_CONTAINERS: dict[str, Callable[[Node, Resolve, int], object]] = {
    TUPLE: _tuple,
    DEQUE: _deque,
    DICT: _dict,
    ORDERED: _ordered,
    COUNTER: _counter,
    NAMESPACE: _namespace,
    DEFAULT_DICT: _default_dict,
    STATE_DICT: _state_dict,
    "$set": _set,
    "$frozenset": _frozenset,
}


_DECODERS: dict[str, Callable[[Node], object]] = {
    omegaconf_values.OMEGACONF: lambda node: omegaconf_values.together(decode_value(node), is_value),
    omegaconf_values.OMEGACONF_TYPE: omegaconf_values.class_of_name,
}


def _collect(node: Node, place: str, found: dict[str, object], depth: int) -> None:
    if reference_of(node) is not None or per_rank_of(node) is not None:
        return
    prefix = f"{place}." if place else ""
    pairs = list(pairs_of(node) or ())
    items = items_of(node)
    if pairs:
        depth = _deeper(depth)
        for key, item in pairs:
            _collect(item, prefix + component(decode_key(key, depth)), found, depth)
    elif items is not None and (holds_leaves(node) or holds_per_rank(node)):
        depth = _deeper(depth)
        for index, item in enumerate(items):
            _collect(item, f"{prefix}{index}", found, depth)
    else:
        name, count = place or NAMELESS, 0
        while name in found:
            count += 1
            name = f"{place or NAMELESS}~{count}"
        found[name] = decode(node, _no_leaf, depth)
