"""DCP's `Metadata` as an Everystep tree, and back.

Arrays need no record: DCP's chunks are a leaf's fragments, and its names are the names of leaves. DCP's
planner knows their places in the state as paths; these are their places in the tree. A `DcpRecord` has the
rest, where torch keeps the ``_metadata`` of a state dict: which entries are values, which are bytes, and the
flags of tensors. A tree without a record, from any other Everystep checkpoint, is read by DCP's rules for
flattening a state.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.state import Node
from everystep.state.leaf_table import component
from everystep.state.node import (
    DICT,
    LEAF,
    STATE_DICT,
    holds_arrays,
    items_of,
    leaf_of,
    pairs_of,
    per_rank_of,
    state_dict_body,
    tag_of,
)
from everystep.state.unflatten import decode_key, decode_value
from everystep.state.value_encoder import is_text
from everystep.universal.dcp.plain_values import NotPlain, plain_node

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorProperties

Path = tuple[str | int, ...]
_KEY = "everystep.integrations.dcp"
_MAX_NESTED = 64
"""Deeper states lie flat in the tree."""


class TensorFlags(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What DCP knows of a tensor beside type and shape. All of it is deprecated there, and seldom set."""

    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: Literal["contiguous_format", "channels_last", "preserve_format"] = "contiguous_format"

    @classmethod
    def of(cls, properties: TensorProperties) -> TensorFlags:
        name = str(properties.memory_format).removeprefix("torch.")
        # One that DCP itself could not store.
        known = name if name in ("channels_last", "preserve_format") else "contiguous_format"
        return cls(bool(properties.requires_grad), bool(properties.pin_memory), known)  # type: ignore[arg-type]


class DcpRecord(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the tree does not say by itself."""

    version: str | None = None
    """Of DCP."""
    planner: Literal["none", "paths", "value"] = "none"
    """Whether the planner's data are none, the entries' paths in the tree, or `planner_data`."""
    planner_data: Any = None
    values: tuple[tuple[str, Annotated[tuple[str | int, ...], Meta(min_length=1)]], ...] = ()
    """Names of entries that are values, and their paths in the tree."""
    bytes: tuple[str, ...] = ()
    """Leaves that are the bytes of an object, not an array."""
    properties: tuple[tuple[str, TensorFlags], ...] = ()
    """Of tensors that have any."""


@dataclass(frozen=True, slots=True)
class DcpEntries:
    """What a checkpoint holds, in DCP's words. Names that are in neither `values` nor `bytes` are tensors."""

    record: DcpRecord
    names: tuple[str, ...]
    """In the order of the state."""
    values: dict[str, Node]
    bytes: frozenset[str]
    planner_data: Any
    leaves: dict[str, str]
    """Names of tensors whose leaf has another name."""


# --- writing ------------------------------------------------------------------------------------------------


def compose(
    nodes: Mapping[str, Node], record: DcpRecord, values: frozenset[str], planner_data: object
) -> Node:
    """The tree with the nodes of all entries: at the paths that the planner has for them, if it has any.

    `nodes` are in the order in which they shall stand there.
    """
    for name in nodes:
        if not is_text(name):
            raise UnsupportedState(f"the name {name!r} is not valid UTF-8")
    paths = _paths(planner_data)
    flat: dict[str, Path] = {name: (name,) for name in nodes}
    placed = flat if paths is None else {name: paths.get(name, (name,)) for name in nodes}
    try:
        pairs = _nest(placed, nodes)
        record = msgspec.structs.replace(record, planner="none" if paths is None else "paths")
        if paths is None and planner_data is not None:
            raise _Clash
    except _Clash:
        # Two entries cannot both be where their paths say, or these are no paths.
        placed = flat
        pairs = _nest(flat, nodes)
        try:
            kept = plain_node(planner_data, sys.maxsize, sys.maxsize)  # it has something for every entry
        except NotPlain:
            kind = type(planner_data).__name__
            raise UnsupportedState(
                f"cannot store the planner's planner_data (a {kind}): it is neither a mapping of names to "
                "paths nor made of plain values, and Everystep stores no pickles of its own"
            ) from None
        record = msgspec.structs.replace(record, planner="value", planner_data=kept)
    listed = tuple((name, placed[name]) for name in nodes if name in values)
    record = msgspec.structs.replace(record, values=listed)
    return {STATE_DICT: [{_KEY: msgspec.to_builtins(record)}, *pairs]}


class _Clash(Exception):
    """The paths of two entries do not go together in one tree."""


def _paths(planner_data: object) -> dict[str, Path] | None:
    """The planner's data, if they are what DCP's own planner has: the path of each name."""
    if not isinstance(planner_data, dict):
        return None
    for name, path in planner_data.items():
        if type(name) is not str or type(path) is not tuple or not path or type(path[0]) is not str:
            return None
        if not all((type(key) is str and is_text(key)) or (type(key) is int and key >= 0) for key in path):
            return None
    return planner_data


class _Branch(dict[str | int, "_Branch | str"]):
    """Children by key; a name is an entry."""


def _nest(paths: Mapping[str, Path], nodes: Mapping[str, Node]) -> list[Node]:
    root = _Branch()
    for name, path in paths.items():
        if len(path) > _MAX_NESTED:
            raise _Clash
        branch = root
        for key in path[:-1]:
            below = branch.setdefault(key, _Branch())
            if isinstance(below, str):
                raise _Clash
            branch = below
        if path[-1] in branch:
            raise _Clash
        branch[path[-1]] = name
    return [[key, _branch_node(child, nodes)] for key, child in root.items() if type(key) is str]


def _branch_node(branch: _Branch | str, nodes: Mapping[str, Node]) -> Node:
    if isinstance(branch, str):
        return nodes[branch]
    numbers = [key for key in branch if type(key) is int]
    if not numbers:
        pairs = [(str(key), _branch_node(child, nodes)) for key, child in branch.items()]
        if any(key[:1] == "$" for key, _ in pairs):
            return {DICT: [[key, node] for key, node in pairs]}
        return dict(pairs)
    if len(numbers) != len(branch) or max(numbers) > 2 * len(numbers) + 1000:
        raise _Clash
    # An element that no rank has saved (a planner may leave some out) keeps its place.
    items: list[Node] = [None] * (max(numbers) + 1)
    for key, child in branch.items():
        items[int(key)] = _branch_node(child, nodes)
    return items


# --- reading ------------------------------------------------------------------------------------------------


def entries_of(tree: Node, where: str, *, pruned: bool = False) -> DcpEntries:
    """What a tree says to DCP; `where` is its file, for messages. `pruned`: some may be left out of it."""
    record = _record_of(tree, where)
    if record is None:
        return _entries_by_rule(tree)
    listed = {path: name for name, path in record.values}
    paths: dict[str, Path] = {}
    values: dict[str, Node] = {}
    for path, node in _places(tree, (), listed):
        name = listed.get(path)
        if name is not None:
            values[name] = node
        paths[name or leaf_of(node) or ""] = path
    if len(values) != len(record.values) and not pruned:
        raise CorruptCheckpoint("the tree lacks values that DCP saved", path=where)
    planner_data: Any = None
    if record.planner == "value":
        planner_data = decode_value(record.planner_data)
    elif record.planner == "paths":
        planner_data = paths
    stored = frozenset(record.bytes)
    return DcpEntries(
        record, tuple(paths), values, stored & paths.keys() if pruned else stored, planner_data, {}
    )


def _record_of(tree: Node, where: str) -> DcpRecord | None:
    if type(tree) is not dict or tag_of(tree) != STATE_DICT:
        return None
    metadata = state_dict_body(tree[STATE_DICT])[0]
    if type(metadata) is not dict or _KEY not in metadata:
        return None
    try:
        return msgspec.convert(metadata[_KEY], DcpRecord)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"DCP's record in the tree is malformed: {error}", path=where) from None


def _places(node: Node, path: Path, stops: Container[Path]) -> Iterator[tuple[Path, Node]]:
    """Every leaf of a tree and every node at one of the paths, in the tree's order."""
    if leaf_of(node) is not None or path in stops:
        yield path, node
        return
    pairs = pairs_of(node)
    if pairs is not None:
        for key, item in pairs:
            yield from _places(item, (*path, decode_key(key)), stops)
        return
    for number, item in enumerate(items_of(node) or ()):
        yield from _places(item, (*path, number), stops)


def _entries_by_rule(tree: Node) -> DcpEntries:
    """Of a tree that was not made here: names as DCP would give them, where it takes states apart alike.

    Leaves may have other ones: those of an optimizer's state are shorter than their paths.
    """
    values: dict[str, Node] = {}
    paths: dict[str, Path] = {}
    leaves: dict[str, str] = {}
    for path, node in _terminals(tree, ()):
        if per_rank_of(node) is not None:
            continue  # DCP has nothing of the kind
        leaf = leaf_of(node)
        name = ".".join(map(str, path))
        if leaf is not None and (name in paths or not path):
            name = leaf  # which no other leaf has
        paths[name] = path or (name,)
        if leaf is None:
            values[name] = node
        elif leaf != name:
            leaves[name] = leaf
    return DcpEntries(DcpRecord(), tuple(paths), values, frozenset(), paths, leaves)


def _terminals(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Where DCP's own planner would stop: it descends mappings, and sequences with arrays or mappings."""
    if leaf_of(node) is not None:
        yield path, node
        return
    pairs = pairs_of(node)
    if pairs is not None:
        for key, item in pairs:
            yield from _terminals(item, (*path, component(decode_key(key))))
        return
    items = items_of(node)
    if items is not None and path and (holds_arrays(node) or _holds_mappings(node)):
        for number, item in enumerate(items):
            yield from _terminals(item, (*path, number))
    elif path:
        yield path, node


def _holds_mappings(node: Node) -> bool:
    return any(
        pairs_of(item) is not None or (type(item) is list and _holds_mappings(item))
        for item in items_of(node) or ()
    )


def leaf_node(name: str) -> Node:
    return {LEAF: name}
