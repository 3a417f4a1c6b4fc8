"""From a state to its tree and named leaves: what every save does first.

Owns the walk over a state: which containers are descended, how leaves are named, which of them share memory.
Single values belong to `value_encoder`, arrays to `arrays` and `torch_arrays`, those of which only a part is
here to `sharded`. Nothing is copied here: a leaf describes where its bytes lie.

The walk is on the path of every save, so it dispatches on exact types through one table; anything not in the
table (modules, optimizers, stateful objects, mistakes) takes the slow way.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from holdfast.engine.buffers import Produced
from holdfast.errors import UnsupportedState
from holdfast.format.dtypes import is_beyond_arrays
from holdfast.format.records import MAX_DIMENSIONS
from holdfast.format.validate import is_own_name
from holdfast.state import numpy_arrays, sharded, torch_arrays, torch_objects, value_encoder
from holdfast.state.leaves import Flat, LeafSource, Sharding
from holdfast.state.node import (
    COUNTER,
    DEQUE,
    DICT,
    LEAF,
    MAX_COLLISIONS,
    MAX_DEPTH,
    NAMELESS,
    ORDERED,
    PER_RANK,
    STATE_DICT,
    TENSOR,
    TUPLE,
    Node,
    collide,
)
from holdfast.state.per_rank import PerRank
from holdfast.state.value_encoder import ENCODERS, is_text, type_name, unsupported

BLOB_NBYTES = 64 << 10
"""Bytes beyond this are stored as leaves: in a tree they would take several times their size in memory."""


def flatten(state: object, rank: int = 0) -> Flat:
    """Take a state apart. Raises `UnsupportedState`, naming the place, for what cannot be stored exactly.

    `rank` is that of this process: what is marked `per_rank` is named after it.

    >>> import numpy as np
    >>> flat = flatten({"model": {"w": np.zeros((2, 3), np.float32)}, "step": 7})
    >>> flat.tree
    {'model': {'w': {'$leaf': 'model.w'}}, 'step': 7}
    >>> [(leaf.name, leaf.dtype, leaf.shape) for leaf in flat.leaves]
    [('model.w', 'F32', (2, 3))]
    """
    walk = _Walk(state, rank)
    tree = walk.node(state, "", 0)
    walk.finish()
    own = walk.own
    if own is None:
        return Flat(tree, tuple(walk.leaves), tuple(walk.aliases))
    walk.check_names()
    return Flat(
        tree,
        tuple(walk.leaves),
        tuple(walk.aliases),
        walk.local,
        tuple(own.leaves),
        tuple(own.aliases),
    )


def value_node(value: object) -> Node:
    """The node of a value without arrays, all of it: large bytes are in it, too."""
    return _Walk(None, keep_bytes=True).node(value, "", 0)


def names_in(part: object, place: str, state: object) -> list[str]:
    """The names that a part of a state has there; its place when there is no array in it.

    Also its place when it could not be saved: whoever asks has something else to complain of.
    """
    walk = _Walk(state)
    try:
        walk.node(part, place, 0)
        walk.finish()
    except UnsupportedState:
        return [place or NAMELESS]
    return [leaf.name for leaf in walk.leaves] + [name for name, _ in walk.aliases] or [place or NAMELESS]


def key_node(key: object, place: str) -> Node:
    """The node of a dict's key. Equal nodes are equal keys, also where Python says otherwise (NaN)."""
    return _Walk(None)._hashable(key, place, 0)


def component(key: object) -> str:
    """How a dict key appears in leaf names. The tree holds the key itself."""
    try:
        text = key if type(key) is str else str(key)
    except Exception:  # huge integers, tuples nested too deep, anything a class of the user's does
        text = type(key).__name__
    return text if is_text(text) else text.encode("utf-8", "backslashreplace").decode()


_LIKE_PER_RANK = "names that begin with '@' are those of per_rank state. Use another key here"

Walker = Callable[["_Walk", Any, str, int], Node]


class _Walk:
    """One pass over one state. A place is the dotted path so far; a depth, the containers around.

    What is marked `per_rank` is walked by a second one, `own`: it has names, leaves and ties of its own.
    """

    def __init__(
        self, state: object, rank: int = 0, *, outer: _Walk | None = None, keep_bytes: bool = False
    ) -> None:
        self.leaves: list[LeafSource] = []
        self.aliases: list[tuple[str, str]] = []
        self.local: dict[str, Node] = {}
        self.own: _Walk | None = None
        self._state = state
        self._rank = rank
        self._outer = outer
        self._keep_bytes = keep_bytes
        self._used: set[str] = set()
        # Address -> index of the first leaf there. Only a second one pays for a full comparison.
        self._first: dict[int, int] = {}
        # Index -> the array itself, for leaves whose source does not hold it.
        self._arrays: dict[int, Any] = {}
        self._exact: dict[tuple[Any, ...], str] = {}
        self._last: list[Callable[[], None]] = [] if outer is None else outer._last
        self._parameters: torch_objects.ParameterNames | None = None
        self._shardings: sharded.Shardings = {}
        # Most leaves of a large state have one of few shapes: no tuple for each.
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lent: frozenset[int] = frozenset()
        self._walkers = _WALKERS
        torch = sys.modules.get("torch")
        if torch is not None:
            self._describe = torch_arrays.describer()
            self._sharded_types = sharded.sharded_types()
            self._walkers = _torch_walkers(torch, tuple(self._sharded_types))

    def node(self, value: object, place: str, depth: int) -> Node:
        kind = type(value)
        walker = self._walkers.get(kind)
        if walker is not None:
            return walker(self, value, place, depth)
        encoder = ENCODERS.get(kind)
        if encoder is not None:
            return encoder(value, place)
        return self._other(value, place, depth)

    def finish(self) -> None:
        """Asks those that are to be asked last. What others do in ``state_dict`` may draw random numbers."""
        for ask in self._last:
            ask()

    def check_names(self) -> None:
        """Names of what ranks share must not look like those of what they have for themselves."""
        for name in self._used:
            if name[:1] == "@":
                raise unsupported(name, _LIKE_PER_RANK)

    # --- containers

    def _deeper(self, place: str, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise unsupported(
                place[:200], f"it is nested deeper than {MAX_DEPTH} levels, or a container holds itself"
            )
        return depth + 1

    def _dict(self, value: dict[Any, Any], place: str, depth: int) -> Node:
        for key in value:
            if type(key) is not str or key[:1] == "$" or not (key.isascii() or is_text(key)):
                return {DICT: self._pairs(value.items(), place, depth)}
        depth = self._deeper(place, depth)
        prefix = f"{place}." if place else ""
        walkers, encoders = self._walkers, ENCODERS
        found: dict[str, Node] = {}
        for key, item in value.items():  # as `node` does, without a call for each
            kind = type(item)
            walker = walkers.get(kind)
            if walker is not None:
                found[key] = walker(self, item, prefix + key, depth)
                continue
            encoder = encoders.get(kind)
            if encoder is not None:
                found[key] = encoder(item, prefix + key)
            else:
                found[key] = self._other(item, prefix + key, depth)
        return found

    def _pairs(self, items: Collection[tuple[Any, Any]], place: str, depth: int) -> list[Node]:
        depth = self._deeper(place, depth)
        prefix = f"{place}." if place else ""
        if len(items) > MAX_COLLISIONS:
            _check_hashes([key for key, _ in items], place)
        found: list[Node] = []
        for key, item in items:
            if type(key) is str and key.isascii():
                found.append([key, self.node(item, prefix + key, depth)])
            else:
                at = prefix + component(key)
                found.append([self._hashable(key, at, depth), self.node(item, at, depth)])
        return found

    def _items(self, items: Iterable[Any], place: str, depth: int) -> list[Node]:
        depth = self._deeper(place, depth)
        prefix = f"{place}." if place else ""
        return [self.node(item, f"{prefix}{index}", depth) for index, item in enumerate(items)]

    def _list(self, value: list[Any], place: str, depth: int) -> Node:
        return self._items(value, place, depth)

    def _tuple(self, value: tuple[Any, ...], place: str, depth: int) -> Node:
        return {TUPLE: self._items(value, place, depth)}

    def _deque(self, value: deque[Any], place: str, depth: int) -> Node:
        return {DEQUE: [self._items(value, place, depth), value_encoder.encode(value.maxlen, place)]}

    def _counter(self, value: Counter[Any], place: str, depth: int) -> Node:
        return {COUNTER: self._pairs(value.items(), place, depth)}

    def _ordered(self, value: OrderedDict[Any, Any], place: str, depth: int) -> Node:
        attributes = vars(value)
        if not attributes:
            return {ORDERED: self._pairs(value.items(), place, depth)}
        # Module.state_dict() hangs the versions of its modules on the dict it returns.
        if set(attributes) != {"_metadata"}:
            extra = ", ".join(sorted(set(attributes) - {"_metadata"}))
            raise unsupported(place, f"an OrderedDict with attributes of its own ({extra}) would lose them")
        known = len(self.leaves) + len(self.aliases)
        keep, self._keep_bytes = self._keep_bytes, True
        metadata = self.node(attributes["_metadata"], f"{place}._metadata", depth + 1)
        self._keep_bytes = keep
        if len(self.leaves) + len(self.aliases) != known:
            raise unsupported(place, "the _metadata of a state dict holds arrays")
        return {STATE_DICT: [metadata, *self._pairs(value.items(), place, depth)]}

    def _set(self, value: set[Any], place: str, depth: int) -> Node:
        depth = self._deeper(place, depth)
        _check_hashes(value, place)
        return {"$set": [self._hashable(item, place, depth) for item in value]}

    def _frozenset(self, value: frozenset[Any], place: str, depth: int) -> Node:
        depth = self._deeper(place, depth)
        _check_hashes(value, place)
        return {"$frozenset": [self._hashable(item, place, depth) for item in value]}

    def _hashable(self, value: object, place: str, depth: int) -> Node:
        """The node of a key or of a member of a set: values, and tuples and frozensets of them."""
        if type(value) is tuple:
            depth = self._deeper(place, depth)
            return {TUPLE: [self._hashable(item, place, depth) for item in value]}
        if type(value) is frozenset:
            return self._frozenset(value, place, depth)
        try:
            return value_encoder.encode(value, place)
        except UnsupportedState as error:
            raise unsupported(place, f"a key or a member of a set has type {type_name(value)}") from error

    # --- leaves

    def _tensor(self, tensor: Any, place: str, depth: int, sharding: Sharding | None = None) -> Node:
        if self._lent and tensor.data_ptr() in self._lent:
            return self._elsewhere(place)
        dtype, shape, source = self._describe(tensor, place)
        shape = self._shapes.setdefault(shape, shape)
        leaf = LeafSource(place, dtype, shape, "torch", source, sharding)
        if type(source) is not Produced:
            node = self._leaf(tensor, source.address, place, leaf)  # type: ignore[union-attr]
        else:
            index = len(self.leaves)
            node = self._leaf(tensor, tensor.data_ptr(), place, leaf)
            if len(self.leaves) > index:
                self._arrays[index] = tensor
        if tensor.requires_grad and sharding is None:
            return {TENSOR: [node[LEAF], False, True]}
        return node

    def _parameter(self, parameter: Any, place: str, depth: int) -> Node:
        node = self._tensor(parameter, place, depth)
        assert type(node) is dict
        body = node.get(TENSOR)
        name = node[LEAF] if body is None else body[0]  # type: ignore[index]
        return {TENSOR: [name, True, bool(parameter.requires_grad)]}

    def _sharded(self, tensor: Any, place: str, depth: int) -> Node:
        held = self._sharded_types[type(tensor)](tensor, place, self._shardings)
        if held.tensor is not None:
            return self._tensor(held.tensor, place, depth, held.sharding)
        return self._elsewhere(place)

    def _elsewhere(self, place: str) -> Node:
        """Other ranks have it. The tree is the same on all of them."""
        name = self._name(place)
        self._used.add(name)
        return {LEAF: name}

    def _array(self, array: Any, place: str, depth: int) -> Node:
        dtype = numpy_arrays.logical_name(array.dtype)
        if dtype is None:
            raise unsupported(place, f"a numpy array of dtype {array.dtype}. Store its plain fields instead")
        source = numpy_arrays.source(array)
        shape = self._shapes.setdefault(array.shape, array.shape)
        return self._leaf(array, source.address, place, LeafSource(place, dtype, shape, "numpy", source))

    def _blob(self, value: bytes | bytearray, place: str, depth: int) -> Node:
        """Bytes: in the tree if they are few, else as a leaf. Equal ones are not tied, as no values are."""
        if len(value) <= BLOB_NBYTES or self._keep_bytes:
            return value_encoder.encode(value, place)
        name = self._name(place)
        self._used.add(name)
        self.leaves.append(
            LeafSource(name, "U8", (len(value),), "numpy", numpy_arrays.bytes_source(value, place))
        )
        return {f"${type(value).__name__}": {LEAF: name}}

    def _leaf(self, array: Any, address: int, place: str, leaf: LeafSource) -> dict[str, Node]:
        nbytes = leaf.source.nbytes
        if not nbytes or len(leaf.shape) > MAX_DIMENSIONS:
            _check_shape(leaf, place)
        used = self._used
        name = place
        if not name or name[0] == "@" or name in used or not name.isascii():
            name = self._name(place)
            leaf = LeafSource(name, leaf.dtype, leaf.shape, leaf.framework, leaf.source, leaf.sharding)
        used.add(name)
        if nbytes and address not in self._first:
            self._first[address] = len(self.leaves)
            self.leaves.append(leaf)
        else:
            known = self._known(array, address, leaf)
            if known is None:
                self.leaves.append(leaf)
            else:
                self.aliases.append((name, known))
        return {LEAF: name}

    def _name(self, place: str) -> str:
        wanted = component(place) or NAMELESS
        if self._outer is None and is_own_name(wanted):
            raise unsupported(place, _LIKE_PER_RANK)
        name, count = wanted, 0
        while name in self._used:
            count += 1
            name = f"{wanted}~{count}"
        return name

    def _known(self, array: Any, address: int, leaf: LeafSource) -> str | None:
        """The leaf that already has exactly these bytes, if one has; otherwise this one is it from now on."""
        key: tuple[Any, ...]
        if not leaf.source.nbytes and leaf.sharding is not None:
            key = sharded.memory_identity(array), leaf.sharding
        elif not leaf.source.nbytes:
            # No memory to share, but the same object twice still comes back as one object.
            key = (id(array),)
        else:
            index = self._first[address]
            first = self.leaves[index]
            owner = self._arrays.get(index)
            owner = first.source.owner if owner is None else owner
            self._exact.setdefault((_identity(owner), first.sharding), first.name)
            key = _identity(array), leaf.sharding
        known = self._exact.setdefault(key, leaf.name)
        return None if known == leaf.name else known

    # --- the rest

    def _other(self, value: Any, place: str, depth: int) -> Node:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            raise torch_arrays.wrapper_refusal(value, place)
        if isinstance(value, np.ndarray):
            raise unsupported(
                place, f"its type is {type_name(value)}, more than an array. Store its plain arrays instead"
            )
        if torch_objects.is_optimizer(value):
            return self._optimizer(value, place, depth)
        if torch_objects.is_module(value):
            if self._rank > 0 and self._outer is None:  # rank 0, or a process by itself, has all that counts
                self._lent |= torch_objects.lent_buffers(value)
            state = torch_objects.module_state(torch_objects.plain_module(value))
            return self.node(state, place, self._deeper(place, depth))
        if torch_objects.is_stateful(value):
            depth = self._deeper(place, depth)
            if getattr(value, "restore_last", False) is True:
                return self._ask_last(value, place, depth)
            return self.node(value.state_dict(), place, depth)
        return value_encoder.encode(value, place)

    def _per_rank(self, mark: PerRank[Any], place: str, depth: int) -> Node:
        if self._outer is not None:
            raise unsupported(place, "per_rank within per_rank: mark it once")
        depth = self._deeper(place, depth)
        if self.own is None:
            self.own = _Walk(self._state, self._rank, outer=self, keep_bytes=self._keep_bytes)
        wanted = component(place) or NAMELESS
        key, count = wanted, 0
        while key in self.local:
            count += 1
            key = f"{wanted}~{count}"
        self.local[key] = self.own.node(mark.value, f"@{self._rank}.{key}", depth)
        return {PER_RANK: key}

    def _ask_last(self, value: Any, place: str, depth: int) -> Node:
        """For what is restored last (`holdfast.rng`): its node is filled when all others have been asked."""
        node: dict[str, Node] = {}

        def ask() -> None:
            found = self.node(value.state_dict(), place, depth)
            if type(found) is not dict:
                raise unsupported(place, "the state of what is restored last must be a dict")
            node.update(found)

        self._last.append(ask)
        return node

    def _optimizer(self, optimizer: Any, place: str, depth: int) -> Node:
        view = torch_objects.optimizer_view(optimizer, self._names(), self._state, place)
        named = torch_objects.named_state(view)
        if named is None or not all(type(key) is str and key[:1] != "$" for key in named):
            return self.node(view.state, place, self._deeper(place, depth))
        depth = self._deeper(place, depth)
        prefix = f"{place}." if place else ""
        return {
            # Leaves are named after the parameter: optimizer.h.0.weight.exp_avg, without a "state" between.
            key: self.node(item, place if key == "state" else f"{prefix}{key}", depth)
            for key, item in named.items()
        }

    def _names(self) -> torch_objects.ParameterNames:
        if self._parameters is None:
            self._parameters = torch_objects.parameter_names(self._state)
        return self._parameters


_WALKERS: dict[type, Walker] = {
    dict: _Walk._dict,
    list: _Walk._list,
    np.ndarray: _Walk._array,
    bytes: _Walk._blob,
    bytearray: _Walk._blob,
    tuple: _Walk._tuple,
    set: _Walk._set,
    frozenset: _Walk._frozenset,
    OrderedDict: _Walk._ordered,
    Counter: _Walk._counter,
    deque: _Walk._deque,
    np.memmap: _Walk._array,
    PerRank: _Walk._per_rank,
}


@lru_cache(maxsize=4)
def _torch_walkers(torch: Any, sharded_types: tuple[type, ...]) -> dict[type, Walker]:
    tensors: dict[type, Walker] = {torch.Tensor: _Walk._tensor, torch.nn.Parameter: _Walk._parameter}
    return _WALKERS | tensors | dict.fromkeys(sharded_types, _Walk._sharded)


def _check_shape(leaf: LeafSource, place: str) -> None:
    """Readers refuse shapes beyond what arrays can have, but torch makes some: views without end of nothing.

    Asked of arrays without elements only, and of those with too many dimensions. Memory bounds all others.
    """
    shape = leaf.whole_shape
    if len(shape) > MAX_DIMENSIONS:
        raise unsupported(place, f"an array of {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    if is_beyond_arrays(leaf.dtype, shape):
        raise unsupported(place, f"an empty array of shape {list(shape)}, beyond what can be read back")


def require_readable(leaf: LeafSource) -> None:
    """`UnsupportedState` for a leaf that readers refuse. For those that `flatten` has not made."""
    if not is_text(leaf.name):
        raise UnsupportedState(f"the name {leaf.name!r} has no UTF-8")
    if is_own_name(leaf.name):
        raise unsupported(leaf.name, _LIKE_PER_RANK)
    _check_shape(leaf, leaf.name)


def _check_hashes(keys: Collection[Any], place: str) -> None:
    if collide(keys):
        raise unsupported(place, f"more than {MAX_COLLISIONS} keys with the same hash: readers refuse them")


def _identity(array: Any) -> tuple[Any, ...]:
    """What two arrays must share to be the same bytes seen the same way."""
    shape = tuple(array.shape)
    if type(array) is np.ndarray or type(array) is np.memmap:
        return array.ctypes.data, "numpy", array.dtype, shape, _steps(shape, array.strides)
    flags = array.is_conj(), array.is_neg()
    return array.data_ptr(), str(array.device), array.dtype, shape, _steps(shape, array.stride()), flags


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    # The step of a dimension of length one leads nowhere and means nothing.
    return tuple(step if size > 1 else 0 for size, step in zip(shape, strides, strict=True))
