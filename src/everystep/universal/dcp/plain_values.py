"""Objects in a state that are not tensors, as bytes that DCP gives and wants back.

DCP pickles every number and string of a state (`torch.save`). If Everystep can store an object exactly as a
value, it does so, without pickle, and pickles it in memory when DCP asks for its bytes. All other objects are
stored byte for byte.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import msgspec

from everystep.errors import UnsupportedState
from everystep.state import Node
from everystep.state.flatten import value_node
from everystep.state.unflatten import Resolve, decode
from everystep.state.value_encoder import encode

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

_MAX_ITEMS = 1000
_MAX_NBYTES = 1 << 16
"""Values beyond this do not belong into a manifest."""
_MAX_NESTED = 32


def value_of(planner: SavePlanner, item: WriteItem) -> Node:
    """The node of the object that an item means; `NotPlain` unless it can be held exactly.

    A planner that makes bytes of objects in a way of its own is asked for these.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    if not isinstance(planner, DefaultSavePlanner):
        raise NotPlain
    kind = type(planner)
    if (
        kind.resolve_data is not DefaultSavePlanner.resolve_data
        or kind.transform_object is not DefaultSavePlanner.transform_object
    ):
        raise NotPlain
    return plain_node(planner.lookup_object(item.index))


class NotPlain(Exception):
    """The object is more than Everystep's values can be."""


def plain_node(value: object, max_items: int = _MAX_ITEMS, max_nbytes: int = _MAX_NBYTES) -> Node:
    """The node of a value of plain types, not too large; `NotPlain` for any other."""
    _check(value, _Budget(max_items, max_nbytes), 0)
    return value_node(value)


class _Budget:
    def __init__(self, items: int, nbytes: int) -> None:
        self.items = items
        self.nbytes = nbytes
        """Of texts and large numbers."""


def _check(value: Any, budget: _Budget, depth: int) -> None:
    kind = type(value)
    budget.items -= 1
    if kind in (str, bytes, bytearray):
        budget.nbytes -= len(value)
    elif kind is int:
        budget.nbytes -= value.bit_length() >> 3
    if budget.items < 0 or budget.nbytes < 0 or depth > _MAX_NESTED:
        raise NotPlain
    if kind in _MAPPINGS:
        if vars(value) if kind is OrderedDict else False:
            raise NotPlain
        for key, item in value.items():
            _check(key, budget, depth + 1)
            _check(item, budget, depth + 1)
    elif kind in _SEQUENCES:
        for item in value:
            _check(item, budget, depth + 1)
    else:
        try:
            encode(value, "")
        except UnsupportedState:
            raise NotPlain from None


_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set, frozenset, deque)


class ValuePickler:
    """The bytes that DCP's planner would have made of stored values. Equal values are pickled once."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def bytes_of(self, node: Node, resolve: Resolve) -> io.BytesIO:
        """`resolve` gives the array of a leaf: large bytes are stored as such."""
        import torch

        key = msgspec.json.encode(node)
        found = self._known.get(key)
        if found is None:
            buffer = io.BytesIO()
            torch.save(decode(node, resolve), buffer)
            found = self._known[key] = buffer.getvalue()
        return io.BytesIO(found)
