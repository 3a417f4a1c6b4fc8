"""The state tree of a foreign checkpoint: from dotted names to the containers that a target expects.

The first component of a name is a key of the state. What follows is one key below it, because the state dict
of a module has flat keys (``h.0.attn.weight``). An optimizer's state is by parameter, then by state name,
next to its ``param_groups``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.errors import UnsupportedSource
from holdfast.state.flatten import value_node
from holdfast.state.node import DICT, LEAF, Node
from holdfast.universal.source import Source

_OPTIMIZER = "optimizer"
_GROUPS = "param_groups"


def build_tree(source: Source) -> Node:
    """The tree with a reference to every leaf and alias, and with all values."""
    top: dict[str, Any] = {}
    optimizer: dict[str, Node] = {}
    for name in (*(leaf.name for leaf in source.leaves), *source.aliases):
        head, _, rest = name.partition(".")
        if head == _OPTIMIZER and "." in rest:
            optimizer[rest] = {LEAF: name}
        else:
            _put(top, source, name, {LEAF: name})
    groups = source.values.get(f"{_OPTIMIZER}.{_GROUPS}")
    parameters = {name.rpartition(".")[0] for name in optimizer} | _listed(groups)
    others: dict[str, Node] = {}
    for name, value in source.values.items():
        node = value_node(value)
        head, _, rest = name.partition(".")
        if head != _OPTIMIZER or not rest:
            _put(top, source, name, node)
        elif rest.rpartition(".")[0] in parameters:
            optimizer[rest] = node
        else:
            others[rest] = node
    if optimizer or others:
        top[_OPTIMIZER] = _optimizer_node(optimizer, others, parameters)
    return _mapping(
        {key: _mapping(item.entries) if isinstance(item, _Below) else item for key, item in top.items()}
    )


class _Below:
    """The entries of one key of the state, until all are known."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}


def _put(top: dict[str, Any], source: Source, name: str, node: Node) -> None:
    head, dot, rest = name.partition(".")
    if not dot or not head:
        head, rest = name, ""
    below = top.get(head)
    if not rest and below is None:
        top[head] = node
        return
    if below is None:
        below = top[head] = _Below()
    if not rest or not isinstance(below, _Below) or rest in below.entries:
        raise UnsupportedSource(f"{source.path}: {name!r} and another name take the same place in the state")
    below.entries[rest] = node


def _optimizer_node(entries: Mapping[str, Node], others: dict[str, Node], parameters: Iterable[str]) -> Node:
    state: dict[str, dict[str, Node]] = {}
    for name, node in entries.items():
        parameter, _, key = name.rpartition(".")
        state.setdefault(parameter, {})[key] = node
    groups = others.pop(_GROUPS, None)
    if groups is None:
        names: list[Node] = [*sorted(parameters)]
        groups = [{"params": names}]
    by_name = {parameter: _mapping(fields) for parameter, fields in state.items()}
    return _mapping({"state": _mapping(by_name), _GROUPS: groups, **others})


def _listed(groups: object) -> set[str]:
    """The names of parameters in an optimizer's groups."""
    if not isinstance(groups, list):
        return set()
    listed = (group.get("params", ()) for group in groups if isinstance(group, dict))
    return {name for names in listed for name in names if isinstance(name, str)}


def _mapping(entries: Mapping[str, Node]) -> Node:
    """A dict. A key that begins with ``$`` would be taken for a tag, so such a dict is a list of pairs."""
    if any(key.startswith("$") for key in entries):
        return {DICT: [[key, node] for key, node in entries.items()]}
    return dict(entries)
