"""From a state to its tree and named leaves: what every save does first.

Owns the walk over a state: which containers are descended, how leaves are named, which of them share memory.
Single values belong to `value_encoder`, arrays to `numpy_arrays`, `torch_arrays` and `jax_arrays`, those of
which only a part is here to `sharded` and `boxed`. Nothing is copied here: a leaf describes where its bytes
lie.

The walk is on the path of every save, so it dispatches on exact types through one table; anything not in the
table (modules, optimizers, stateful objects, mistakes) takes the slow way.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from everystep.engine.buffers import Produced
from everystep.errors import UnsupportedState
from everystep.state import (
    boxed,
    jax_arrays,
    numpy_arrays,
    omegaconf_values,
    sharded,
    torch_arrays,
    torch_objects,
    value_encoder,
)
from everystep.state.leaf_table import LeafTable, component
from everystep.state.leaves import FlatState, LeafSource, Sharding
from everystep.state.marks import PerRank, RankMark, RankZero
from everystep.state.node import (
    COUNTER,
    DEFAULT_DICT,
    DEQUE,
    DICT,
    FACTORIES,
    LEAF,
    MAX_COLLISIONS,
    MAX_DEPTH,
    NAMELESS,
    NAMESPACE,
    ORDERED,
    PER_RANK,
    STATE_DICT,
    TENSOR,
    TUPLE,
    Node,
    collide,
)
from everystep.state.refusals import type_name, unsupported
from everystep.state.value_encoder import ENCODERS, is_text

BLOB_NBYTES = 64 << 10
"""Bytes beyond this are stored as leaves: in a tree they would take several times their size in memory."""


def flatten(state: object, rank: int = 0) -> FlatState:
    """Take a state apart. Raises `UnsupportedState`, naming the place, for what cannot be stored exactly.

    `rank` is that of this process: what is marked `per_rank` is named after it, and what is marked
    `rank_zero` is left out on all others.

    >>> import numpy as np
    >>> flat = flatten({"model": {"w": np.zeros((2, 3), np.float32)}, "step": 7})
    >>> flat.tree
    {'model': {'w': {'$leaf': 'model.w'}}, 'step': 7}
    >>> [(leaf.name, leaf.dtype, leaf.shape) for leaf in flat.leaves]
    [('model.w', 'F32', (2, 3))]
    """
    walk = Walk(state, rank)
    tree = walk.node(state, "", 0)
    walk.finish()
    table, own = walk.table, walk.own
    if own is None:
        return FlatState(tree, tuple(table.leaves), tuple(table.aliases))
    table.check_names()
    return FlatState(
        tree,
        tuple(table.leaves),
        tuple(table.aliases),
        walk.local,
        tuple(own.table.leaves),
        tuple(own.table.aliases),
    )


def value_node(value: object) -> Node:
    """The node of a value, all of it: large bytes are in it, too. `UnsupportedState` if it holds an array."""
    walk = Walk(None, keep_bytes=True)
    node = walk.node(value, "", 0)
    if len(walk.table):
        raise UnsupportedState(
            f"a value without arrays was expected, but it has {walk.table.leaves[0].name!r}"
        )
    return node


def described_tree(state: object, walkers: Mapping[type, Walker]) -> Node:
    """The tree of a state whose arrays are elsewhere: `walkers` make the nodes of what stands for them."""
    walk = Walk(None)
    walk._walkers = {**walk._walkers, **walkers}
    return walk.node(state, "", 0)


def names_in(part: object, place: str, state: object) -> list[str]:
    """The names that a part of a state has there; its place when there is no array in it.

    Also its place when it could not be saved: the caller reports another problem then.
    """
    walk = Walk(state)
    try:
        walk.node(part.value if type(part) is RankZero else part, place, 0)
        walk.finish()
    except UnsupportedState:
        return [place or NAMELESS]
    table = walk.table
    return [leaf.name for leaf in table.leaves] + [name for name, _ in table.aliases] or [place or NAMELESS]


def key_node(key: object, place: str) -> Node:
    """The node of a dict's key. Equal nodes are equal keys, also where Python says otherwise (NaN)."""
    return Walk(None)._hashable(key, place, 0)


def is_plain_key(key: object) -> bool:
    """Whether a JSON object can have this key, and is not taken for a tag then."""
    return type(key) is str and key[:1] != "$" and is_text(key)


Walker = Callable[["Walk", Any, str, int], Node]
"""Makes the node of a value of one type, at a place and a depth."""
_LEFT_OUT = object()
"""Instead of the value of an entry that other ranks have."""


class Walk:
    """One pass over one state. A place is the dotted path so far; a depth, the containers around.

    What is marked `per_rank` is walked by a second one, `own`: it has names, leaves and ties of its own.
    """

    def __init__(
        self, state: object, rank: int = 0, *, outer: Walk | None = None, keep_bytes: bool = False
    ) -> None:
        self.table = LeafTable(per_rank=outer is not None)
        self.local: dict[str, Node] = {}
        self.own: Walk | None = None
        self._state = state
        self._rank = rank
        self._is_own = outer is not None
        self._keep_bytes = keep_bytes
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
        """Asks those that are to be asked last. What others do in ``state_dict`` may draw random numbers.

        Then forgets them: they refer to this walk. As a cycle, its arrays would live until the garbage
        collector comes by, and TensorFlow and JAX would compute into fresh memory as long.
        """
        for ask in self._last:
            ask()
        self._last.clear()

    # --- containers

    def deeper(self, place: str, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise unsupported(
                place[:200], f"it is nested deeper than {MAX_DEPTH} levels, or a container holds itself"
            )
        return depth + 1

    def _dict(self, value: dict[Any, Any], place: str, depth: int) -> Node:
        for key in value:
            if type(key) is not str or key[:1] == "$" or not (key.isascii() or is_text(key)):
                return {DICT: self._pairs(value.items(), place, depth)}
        depth = self.deeper(place, depth)
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
            elif kind is not RankZero:
                found[key] = self._other(item, prefix + key, depth)
            elif (its := self._rank_zero(item, prefix + key)) is not _LEFT_OUT:
                found[key] = self.node(its, prefix + key, depth)
        return found

    def _pairs(self, items: Collection[tuple[Any, Any]], place: str, depth: int) -> list[Node]:
        depth = self.deeper(place, depth)
        prefix = f"{place}." if place else ""
        if len(items) > MAX_COLLISIONS:
            _check_hashes([key for key, _ in items], place)
        found: list[Node] = []
        for key, item in items:
            if type(item) is RankZero:
                item = self._rank_zero(item, prefix + component(key))
                if item is _LEFT_OUT:
                    continue
            if type(key) is str and key.isascii():
                found.append([key, self.node(item, prefix + key, depth)])
            else:
                at = prefix + component(key)
                found.append([self._hashable(key, at, depth), self.node(item, at, depth)])
        return found

    def _items(self, items: Iterable[Any], place: str, depth: int) -> list[Node]:
        depth = self.deeper(place, depth)
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

    def _namespace(self, value: Namespace, place: str, depth: int) -> Node:
        return {NAMESPACE: self._pairs(vars(value).items(), place, depth)}

    def _default_dict(self, value: defaultdict[Any, Any], place: str, depth: int) -> Node:
        made_by = value.default_factory
        name = None if made_by is None else getattr(made_by, "__name__", "")
        if name is not None and FACTORIES.get(name) is not made_by:
            raise unsupported(
                place,
                f"a defaultdict whose values are made by {name or type_name(made_by)}, which is no type of "
                "Python. Store dict(...) of it instead",
            )
        return {DEFAULT_DICT: [name, *self._pairs(value.items(), place, depth)]}

    def _ordered(self, value: OrderedDict[Any, Any], place: str, depth: int) -> Node:
        attributes = vars(value)
        if not attributes:
            return {ORDERED: self._pairs(value.items(), place, depth)}
        # Module.state_dict() hangs the versions of its modules on the dict it returns.
        if set(attributes) != {"_metadata"}:
            extra = ", ".join(sorted(set(attributes) - {"_metadata"}))
            raise unsupported(place, f"an OrderedDict with attributes of its own ({extra}) would lose them")
        known = len(self.table)
        metadata = self._without_leaves(attributes["_metadata"], f"{place}._metadata", depth + 1)
        if len(self.table) != known:
            raise unsupported(place, "the _metadata of a state dict holds arrays")
        return {STATE_DICT: [metadata, *self._pairs(value.items(), place, depth)]}

    def _without_leaves(self, value: object, place: str, depth: int) -> Node:
        """The node of a value, with large bytes in it."""
        keep, self._keep_bytes = self._keep_bytes, True
        try:
            return self.node(value, place, depth)
        finally:
            self._keep_bytes = keep

    def _set(self, value: set[Any], place: str, depth: int) -> Node:
        depth = self.deeper(place, depth)
        _check_hashes(value, place)
        return {"$set": [self._hashable(item, place, depth) for item in value]}

    def _frozenset(self, value: frozenset[Any], place: str, depth: int) -> Node:
        depth = self.deeper(place, depth)
        _check_hashes(value, place)
        return {"$frozenset": [self._hashable(item, place, depth) for item in value]}

    def _hashable(self, value: object, place: str, depth: int) -> Node:
        """The node of a key or of a member of a set: values, and tuples and frozensets of them."""
        if type(value) is tuple:
            depth = self.deeper(place, depth)
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
            name = self.table.add(tensor, source.address, place, leaf)  # type: ignore[union-attr]
        else:
            name = self.table.add_produced(tensor, tensor.data_ptr(), place, leaf)
        if tensor.requires_grad and sharding is None:
            return {TENSOR: [name, False, True]}
        return {LEAF: name}

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
        return {LEAF: self.table.reserve(place)}

    def _array(self, array: Any, place: str, depth: int) -> Node:
        dtype = numpy_arrays.logical_name(array.dtype)
        if dtype is None:
            raise unsupported(place, f"a numpy array of dtype {array.dtype}. Store its plain fields instead")
        source = numpy_arrays.source(array)
        shape = self._shapes.setdefault(array.shape, array.shape)
        leaf = LeafSource(place, dtype, shape, "numpy", source)
        return {LEAF: self.table.add(array, source.address, place, leaf)}

    def _boxed(self, array: boxed.BoxedArray, place: str, depth: int) -> Node:
        """The boxes of an array that are here; other ranks have the rest. Such arrays are never tied."""
        name = self.table.reserve(place)
        self.table.leaves.extend(boxed.leaves_of(array, name))
        return {LEAF: name}

    def _blob(self, value: bytes | bytearray, place: str, depth: int) -> Node:
        """Bytes: in the tree if they are few, else as a leaf. Equal ones are not tied, as no values are."""
        if len(value) <= BLOB_NBYTES or self._keep_bytes:
            return value_encoder.encode(value, place)
        name = self.table.reserve(place)
        self.table.leaves.append(
            LeafSource(name, "U8", (len(value),), "numpy", numpy_arrays.bytes_source(value, place))
        )
        return {f"${type(value).__name__}": {LEAF: name}}

    # --- the rest

    def _other(self, value: Any, place: str, depth: int) -> Node:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            raise torch_arrays.wrapper_refusal(value, place)
        if isinstance(value, np.ndarray):
            raise unsupported(
                place, f"its type is {type_name(value)}, more than an array. Store its plain arrays instead"
            )
        if jax_arrays.is_array(value):
            return self._boxed(jax_arrays.stored_alone(value, place), place, depth)
        if type(value) is RankZero:
            raise unsupported(place, "rank_zero marks entries of dicts. Put it in one")
        if torch_objects.is_optimizer(value):
            return self._optimizer(value, place, depth)
        if torch_objects.is_module(value):
            if self._rank > 0 and not self._is_own:  # rank 0, or a process by itself, has all that counts
                self._lent |= torch_objects.lent_buffers(value)
            state = torch_objects.module_state(torch_objects.plain_module(value))
            return self.node(state, place, self.deeper(place, depth))
        if torch_objects.is_stateful(value):
            depth = self.deeper(place, depth)
            if getattr(value, "restore_last", False) is True:
                return self._ask_last(value, place, depth)
            return self.node(value.state_dict(), place, depth)
        if omegaconf_values.is_config(value):
            apart = omegaconf_values.apart(value, place, value_encoder.encode)
            return {omegaconf_values.OMEGACONF: self._without_leaves(apart, place, depth)}
        return value_encoder.encode(value, place)

    def _per_rank(self, mark: PerRank[Any], place: str, depth: int) -> Node:
        if self._is_own:
            raise unsupported(place, "per_rank within per_rank: mark it once")
        depth = self.deeper(place, depth)
        if self.own is None:
            self.own = Walk(self._state, self._rank, outer=self, keep_bytes=self._keep_bytes)
        wanted = component(place) or NAMELESS
        key, count = wanted, 0
        while key in self.local:
            count += 1
            key = f"{wanted}~{count}"
        self.local[key] = self.own.node(mark.value, f"@{self._rank}.{key}", depth)
        return {PER_RANK: key}

    def _rank_zero(self, mark: RankZero[Any], place: str) -> Any:
        """The value of an entry of a dict, or `_LEFT_OUT` on ranks that say nothing about it."""
        if self._is_own or isinstance(mark.value, RankMark):
            raise unsupported(place, "rank_zero and per_rank within each other: mark it once")
        return mark.value if self._rank == 0 else _LEFT_OUT

    def _ask_last(self, value: Any, place: str, depth: int) -> Node:
        """For what is restored last (`everystep.rng`): its node is filled when all others have been asked."""
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
        if named is None or not all(map(is_plain_key, named)):
            return self.node(view.state, place, self.deeper(place, depth))
        depth = self.deeper(place, depth)
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
    dict: Walk._dict,
    list: Walk._list,
    np.ndarray: Walk._array,
    bytes: Walk._blob,
    bytearray: Walk._blob,
    tuple: Walk._tuple,
    set: Walk._set,
    frozenset: Walk._frozenset,
    OrderedDict: Walk._ordered,
    Counter: Walk._counter,
    defaultdict: Walk._default_dict,
    deque: Walk._deque,
    Namespace: Walk._namespace,
    np.memmap: Walk._array,
    PerRank: Walk._per_rank,
    boxed.BoxedArray: Walk._boxed,
}


@lru_cache(maxsize=4)
def _torch_walkers(torch: Any, sharded_types: tuple[type, ...]) -> dict[type, Walker]:
    tensors: dict[type, Walker] = {torch.Tensor: Walk._tensor, torch.nn.Parameter: Walk._parameter}
    return _WALKERS | tensors | dict.fromkeys(sharded_types, Walk._sharded)


def _check_hashes(keys: Collection[Any], place: str) -> None:
    if collide(keys):
        raise unsupported(place, f"more than {MAX_COLLISIONS} keys with the same hash: readers refuse them")
