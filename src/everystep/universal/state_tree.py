"""From the state of a foreign checkpoint to the tree and the leaves of our own format.

A reader gives the object that its system would load, with a placeholder for each array. The walk of
`everystep.state.flatten`, which every save takes, turns it into a tree and names the leaves by their places.
So containers and values are kept as they are in a save of ours, or refused by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from everystep.errors import UnsupportedSource, UnsupportedState
from everystep.state import Node
from everystep.state.flatten import BLOB_NBYTES, Walk, described_tree, is_plain_key
from everystep.state.node import LEAF, MAX_DEPTH, TENSOR
from everystep.state.numpy_arrays import logical_name
from everystep.state.refusals import unsupported
from everystep.state.value_encoder import encode
from everystep.universal.source import Computed, Source, SourceLeaf
from everystep.universal.torch_file.leaves import leaf_of
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.torch_file.torch_values import TORCH_VALUES

MAX_NODES = 4_000_000
MAX_STEP = 10**12
"""Names of checkpoints in a run have room for steps below this."""


class OptimizerState(dict[str, Any]):
    """The state dict of an optimizer. Its leaves are named ``optimizer.<parameter>.<state>``."""


def source_of(
    path: str,
    kind: str,
    state: object,
    *,
    step: object = None,
    facts: Mapping[str, str] | None = None,
    carried: tuple[str, ...] = (),
    arranged: bool = True,
) -> Source:
    """The description of a foreign checkpoint. `UnsupportedSource` for a value that cannot be kept as it is.

    A `step` that is no number of steps counts as not stated.
    """
    _require_bounded(path, state)
    found = _Leaves()
    try:
        tree = described_tree(state, found.walkers())
    except UnsupportedState as error:
        raise UnsupportedSource(f"{path}: it cannot be read as it is: {error}") from error
    return Source(
        path=path,
        kind=kind,
        step=step if type(step) is int and 0 <= step < MAX_STEP else None,
        state=state,
        tree=tree,
        leaves=tuple(found.leaves),
        aliases=found.aliases,
        facts=dict(facts or {}),
        carried=carried,
        arranged=arranged,
    )


def step_in(state: object, *places: tuple[str, ...]) -> int | None:
    """The first of these places in a state that holds a number of steps."""
    for place in places:
        found = state
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        if type(found) is int and found >= 0:
            return found
    return None


class _Same:
    """A key that is equal for the same object only, and keeps it alive meanwhile."""

    __slots__ = ("_of",)

    def __init__(self, of: object) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)


@dataclass(slots=True)
class _Leaves:
    """The leaves that a walk meets. The same placeholder in several places is one leaf with several names.

    So are tensors of a torch file that lie in the same place, which are tied when torch loads them.
    """

    leaves: list[SourceLeaf] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    _known: dict[object, str] = field(default_factory=dict)

    def walkers(self) -> Mapping[type, Any]:
        return {
            SourceLeaf: self._leaf,
            StoredTensor: self._tensor,
            np.ndarray: self._array,
            bytes: self._blob,
            bytearray: self._blob,
            OptimizerState: _optimizer,
            **dict.fromkeys(TORCH_VALUES, lambda walk, value, place, depth: value.node),
        }

    def _leaf(self, walk: Walk, leaf: SourceLeaf, place: str, depth: int) -> Node:
        return self._node(self._name(walk, leaf, place, _Same(leaf)), leaf)

    def _tensor(self, walk: Walk, tensor: StoredTensor, place: str, depth: int) -> Node:
        if tensor.attributes:
            names = ", ".join(map(str, tensor.attributes))
            raise unsupported(place, f"a tensor with attributes of its own ({names}) would lose them")
        leaf = leaf_of(place, tensor)
        return self._node(self._name(walk, leaf, place, tensor if tensor.count else place), leaf)

    def _array(self, walk: Walk, array: Any, place: str, depth: int) -> Node:
        dtype = logical_name(array.dtype)
        if dtype is None:
            raise unsupported(place, f"a numpy array of dtype {array.dtype}")
        leaf = SourceLeaf(
            place, dtype, array.shape, (), framework="numpy", computed=Computed(partial(_write_array, array))
        )
        return self._node(self._name(walk, leaf, place, _Same(array)), leaf)

    def _blob(self, walk: Walk, value: bytes | bytearray, place: str, depth: int) -> Node:
        if len(value) <= BLOB_NBYTES:
            return encode(value, place)
        array = np.frombuffer(value, np.uint8)
        return {f"${type(value).__name__}": self._array(walk, array, place, depth)}

    def _name(self, walk: Walk, leaf: SourceLeaf, place: str, key: object) -> str:
        name = walk.table.reserve(place)
        first = self._known.setdefault(key, name)
        if first == name:
            self.leaves.append(replace(leaf, name=name))
        else:
            self.aliases[name] = first
        return name

    def _node(self, name: str, leaf: SourceLeaf) -> Node:
        if leaf.is_parameter or leaf.requires_grad:
            return {TENSOR: [name, leaf.is_parameter, leaf.requires_grad]}
        return {LEAF: name}


def _optimizer(walk: Walk, state: OptimizerState, place: str, depth: int) -> Node:
    if not all(map(is_plain_key, state)):
        return walk.node(dict(state), place, depth)
    depth = walk.deeper(place, depth)
    prefix = f"{place}." if place else ""
    return {
        key: walk.node(item, place if key == "state" else f"{prefix}{key}", depth)
        for key, item in state.items()
    }


def _write_array(array: Any, out: BinaryIO) -> None:
    out.write(np.ascontiguousarray(array).tobytes())


def _require_bounded(path: str, state: object) -> None:
    """Objects of a file may share parts, or contain themselves: a walk over them could take forever."""
    known: dict[int, int] = {}

    def count(value: object, depth: int) -> int:
        inside: Iterable[object]
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            inside = value
        else:
            return 1
        found = known.get(id(value))
        if found == 0 or depth > MAX_DEPTH:
            raise UnsupportedSource(f"{path}: objects are nested deeper than {MAX_DEPTH}, or hold themselves")
        if found is None:
            known[id(value)] = 0
            found = known[id(value)] = 1 + sum(count(one, depth + 1) for one in inside)
        if found > MAX_NODES:
            raise UnsupportedSource(f"{path}: more than {MAX_NODES} objects")
        return found

    count(state, 0)
