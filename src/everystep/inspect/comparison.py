"""Which leaves and values of two checkpoints differ: leaves bit by bit in bounded memory, values exactly."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from everystep.errors import StateMismatch
from everystep.format.dtypes import itemsize, opaque
from everystep.inspect.description import exact_bytes, leaf_order, stored_values
from everystep.inspect.element_values import Tally
from everystep.inspect.subtrees import subtree_of, usual_depth
from everystep.state import Node
from everystep.state.leaf_table import component
from everystep.state.name_groups import did_you_mean
from everystep.state.node import (
    COUNTER,
    DEFAULT_DICT,
    DEQUE,
    DICT,
    NAMELESS,
    NAMESPACE,
    ORDERED,
    STATE_DICT,
    TUPLE,
    deque_body,
    headed_body,
    items_of,
    pairs_of,
    shorten,
    state_dict_body,
    tag_of,
)
from everystep.state.unflatten import decode_key
from everystep.store import LeafInfo, Options
from everystep.store.options import reading_tuning
from everystep.store.read.checkpoint import Checkpoint, open_newest
from everystep.store.read.selection import matching_names
from everystep.store.stream.leaf_windows import LeafSize, WindowReader, windows
from everystep.store.stream.progress import Progress, no_progress

Change = Literal["only in a", "only in b", "dtype", "shape", "bits", "framework", "tied"]


@dataclass(frozen=True, slots=True)
class LeafChange:
    """One way in which a leaf differs.

    Attributes:
        name: The leaf.
        change: In what it differs. ``"bits"``: its elements.
        a: What it is in the first checkpoint, in words.
        b: What it is in the second.
        elements: Of changed bits: how many elements it has.
        differing: How many elements differ.
        first: The index of the first that differs.
        max_abs: The largest difference of finite elements.
        max_rel: The largest relative difference of finite elements.
        not_finite: How many differing elements are not finite on one side.
    """

    name: str
    change: Change
    a: str | None = None
    b: str | None = None
    elements: int | None = None
    differing: int | None = None
    first: tuple[int, ...] | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    not_finite: int | None = None


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value that differs.

    Attributes:
        name: The value.
        change: Whether it is in one of them only, or in both.
        a: Its stored form in the first checkpoint; None if it is not there.
        b: Its stored form in the second.
    """

    name: str
    change: Literal["only in a", "only in b", "value"]
    a: Node = None
    b: Node = None


@dataclass(frozen=True, slots=True)
class ContainerChange:
    """A container that differs although all in it agrees.

    Attributes:
        name: The container; ``_`` is the state itself.
        a: What it is in the first checkpoint.
        b: What it is in the second.
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class SubtreeChange:
    """How the leaves of one subtree differ.

    Attributes:
        name: The subtree.
        leaves: How many leaves of it were compared.
        differing: How many of them differ.
        only_a: How many are in the first checkpoint only.
        only_b: How many are in the second only.
        max_abs: The largest difference of finite elements.
        max_rel: The largest relative difference.
    """

    name: str
    leaves: int
    differing: int
    only_a: int
    only_b: int
    max_abs: float | None
    max_rel: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        path: The checkpoint.
        step: Its step; None if it does not state one.
        created: Unix time of the save.
        leaves: How many leaves it has.
        nbytes: The size of its leaves.
    """

    path: str
    step: int | None
    created: float
    leaves: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs between two checkpoints.

    The order of keys counts where Python compares it: in an `OrderedDict`. That of a plain dict does not: two
    runs are equal though one of them filled a dict in another order.

    Attributes:
        a: The first checkpoint.
        b: The second.
        leaves: Leaves that differ.
        values: Values that differ.
        structure: Containers that differ, if leaves and values agree.
        identical: How many leaves are the same.
        names: The leaves that were compared.
    """

    a: Side
    b: Side
    leaves: tuple[LeafChange, ...]
    values: tuple[ValueChange, ...]
    structure: tuple[ContainerChange, ...]
    identical: int
    names: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.leaves or self.values or self.structure)

    def subtrees(self, depth: int | None = None) -> tuple[SubtreeChange, ...]:
        """The changes added up, subtree by subtree.

        Args:
            depth: How many parts of a name tell subtrees apart; by default as few as make at least two of
                them.
        """
        depth = usual_depth(self.names) if depth is None else depth
        leaves: Counter[str] = Counter(subtree_of(name, depth) for name in self.names)
        changes: dict[str, list[LeafChange]] = {name: [] for name in leaves}
        for change in self.leaves:
            changes[subtree_of(change.name, depth)].append(change)
        return tuple(_subtree_change(name, leaves[name], found) for name, found in changes.items())


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    leaves: Sequence[str] = (),
    ignore: Sequence[str] = (),
    options: Options | None = None,
    progress: Progress = no_progress,
) -> Difference:
    """Compare two checkpoints, bit by bit. Neither has to fit in memory.

    NaNs with the same payload are equal, 0.0 and -0.0 are not. The order of keys counts in an `OrderedDict`,
    not in a plain dict. Step, time and metrics do not count. Raises `everystep.CorruptCheckpoint` if one of
    them is damaged.

    Args:
        a: A checkpoint, or a run, whose newest is meant.
        b: The other one.
        leaves: Compare only what matches one of these globs or is in one of these subtrees, values too. The
            containers around them are not compared then.
        ignore: Leave out what matches one of these.
        options: How to read, as for `everystep.load`.
        progress: Called with the bytes compared so far, and the bytes in all.
    """
    tuning = reading_tuning(options)
    with open_newest(a, tuning) as left, open_newest(b, tuning) as right:
        chosen = _chosen([*left, *left.values, *right, *right.values], leaves, ignore)
        return _Comparison(left, right, chosen).run(progress)


def _chosen(names: Iterable[str], leaves: Sequence[str], ignore: Sequence[str]) -> Collection[str] | None:
    """The names to compare; None for all."""
    if not leaves and not ignore:
        return None
    known = {name: name for name in names}
    wanted = set(known)
    if leaves:
        found = {pattern: matching_names(known, pattern) for pattern in leaves}
        for pattern, matching in found.items():
            if not matching:
                guess = did_you_mean(pattern, known)
                raise StateMismatch(
                    f"nothing in either checkpoint matches {pattern!r}{guess}", missing=[pattern]
                )
        wanted = {name for matching in found.values() for name in matching}
    left = wanted.difference(*(matching_names(known, pattern) for pattern in ignore))
    if wanted and not left:
        raise StateMismatch(
            f"nothing is left to compare: all of it is ignored by {', '.join(map(repr, ignore))}",
            missing=list(leaves),
        )
    return left


def _subtree_change(name: str, leaves: int, changes: Sequence[LeafChange]) -> SubtreeChange:
    kinds = Counter(change.change for change in changes)
    return SubtreeChange(
        name,
        leaves,
        differing=len({change.name for change in changes if not change.change.startswith("only")}),
        only_a=kinds["only in a"],
        only_b=kinds["only in b"],
        max_abs=_largest(change.max_abs for change in changes),
        max_rel=_largest(change.max_rel for change in changes),
    )


def _largest(numbers: Iterable[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


class _Comparison:
    """The comparison of two open checkpoints."""

    def __init__(self, a: Checkpoint, b: Checkpoint, chosen: Collection[str] | None = None) -> None:
        """`chosen`: the names to compare; all, if None."""
        self._a = a
        self._b = b
        self._chosen = chosen
        # Stored leaves to compare byte by byte: each pair once, even if several names are tied to it.
        self._pairs: dict[tuple[str, str], LeafInfo] = {}
        for name, mine in a._parts.leaf_infos.items():
            other = b._parts.leaf_infos.get(name)
            if (
                other is not None
                and self._wants(name)
                and (mine.dtype, mine.shape) == (other.dtype, other.shape)
            ):
                self._pairs[_stored(a, name), _stored(b, name)] = mine

    def run(self, progress: Progress) -> Difference:
        a, b = self._a, self._b
        leaves = tuple(self._leaf_changes(self._tally(progress)))
        values = tuple(_value_changes(self._values(a), self._values(b)))
        whole = self._chosen is None
        agree = whole and not leaves and not values
        structure = tuple(_container_changes(a._parts.tree, b._parts.tree, "")) if agree else ()
        changed = {change.name for change in leaves}
        names = [name for name in dict.fromkeys((*leaf_order(a), *leaf_order(b))) if self._wants(name)]
        identical = sum(name in a and name in b and name not in changed for name in names)
        return Difference(_side(a), _side(b), leaves, values, structure, identical, tuple(names))

    def _wants(self, name: str) -> bool:
        return self._chosen is None or name in self._chosen

    def _values(self, checkpoint: Checkpoint) -> dict[str, Node]:
        found = stored_values(checkpoint.values)
        return {name: value for name, value in found.items() if self._wants(name)}

    def _tally(self, progress: Progress) -> dict[tuple[str, str], Tally]:
        tallies = {pair: Tally(info.dtype) for pair, info in self._pairs.items()}
        pairs = list(self._pairs)
        names_a, names_b = [mine for mine, _ in pairs], [other for _, other in pairs]
        reader_a, reader_b = WindowReader(self._a), WindowReader(self._b)
        done, total = 0, sum(info.nbytes for info in self._pairs.values())
        for ranges in windows(LeafSize(info.nbytes, itemsize(info.dtype)) for info in self._pairs.values()):
            bytes_a, bytes_b = reader_a.read(ranges, names_a), reader_b.read(ranges, names_b)
            at = 0
            for span in ranges:
                place = slice(at, at + span.nbytes)
                tallies[pairs[span.index]].add(bytes_a[place], bytes_b[place])
                at += span.nbytes
            done += at
            progress(done, total)
        return tallies

    def _leaf_changes(self, tallies: Mapping[tuple[str, str], Tally]) -> Iterator[LeafChange]:
        a, b = self._a, self._b
        for name in filter(self._wants, leaf_order(a)):
            mine = a._parts.leaf_infos[name]
            other = b._parts.leaf_infos.get(name)
            if other is None:
                yield LeafChange(name, "only in a", a=_describe(mine))
                continue
            if mine.alias_of != other.alias_of:
                yield LeafChange(name, "tied", mine.alias_of, other.alias_of)
            if mine.framework != other.framework:
                yield LeafChange(name, "framework", mine.framework, other.framework)
            if mine.dtype != other.dtype:
                yield LeafChange(name, "dtype", _describe(mine), _describe(other))
            elif mine.shape != other.shape:
                yield LeafChange(name, "shape", _describe(mine), _describe(other))
            else:
                tally = tallies[_stored(a, name), _stored(b, name)]
                if tally.differing:
                    yield _bits_change(name, mine, tally)
        for name in filter(self._wants, leaf_order(b)):
            if name not in a:
                yield LeafChange(name, "only in b", b=_describe(b._parts.leaf_infos[name]))


def _value_changes(a: Mapping[str, Node], b: Mapping[str, Node]) -> Iterator[ValueChange]:
    for name, mine in a.items():
        if name not in b:
            yield ValueChange(name, "only in a", a=mine)
        elif exact_bytes(mine) != exact_bytes(b[name]):
            yield ValueChange(name, "value", mine, b[name])
    for name, other in b.items():
        if name not in a:
            yield ValueChange(name, "only in b", b=other)


def _container_changes(a: Node, b: Node, place: str) -> Iterator[ContainerChange]:
    """The containers that differ in two trees with the same leaves and values, outermost first."""
    pairs_a, pairs_b = pairs_of(a), pairs_of(b)
    items_a, items_b = items_of(a), items_of(b)
    kinds = _kind(a), _kind(b)
    prefix = f"{place}." if place else ""
    if pairs_a is not None and pairs_b is not None:
        mine, other = ({exact_bytes(key): (key, item) for key, item in pairs} for pairs in (pairs_a, pairs_b))
        ordered = tag_of(a) in (ORDERED, STATE_DICT)
        if kinds[0] != kinds[1] or mine.keys() != other.keys() or (ordered and list(mine) != list(other)):
            sides = (_with_keys(kind, found) for kind, found in zip(kinds, (mine, other), strict=True))
            yield ContainerChange(place or NAMELESS, *sides)
        for known, (key, item) in mine.items():
            if known in other:
                at = prefix + component(decode_key(key))
                yield from _container_changes(item, other[known][1], at)
    elif items_a is not None and items_b is not None:
        if kinds[0] != kinds[1] or len(items_a) != len(items_b):
            yield ContainerChange(
                place or NAMELESS, f"{kinds[0]} of {len(items_a)}", f"{kinds[1]} of {len(items_b)}"
            )
        for index, (item, its) in enumerate(zip(items_a, items_b, strict=False)):
            yield from _container_changes(item, its, f"{prefix}{index}")
    elif exact_bytes(a) != exact_bytes(b):
        yield ContainerChange(place or NAMELESS, *kinds)


_KINDS = {
    None: "dict",
    DICT: "dict",
    ORDERED: "OrderedDict",
    COUNTER: "Counter",
    NAMESPACE: "Namespace",
    TUPLE: "tuple",
}


def _kind(node: Node) -> str:
    """What a node is, in words: its type, and everything but its items."""
    tag = tag_of(node)
    if type(node) is list:
        return "list"
    if type(node) is dict and tag in _KINDS:
        return _KINDS[tag]
    if type(node) is dict and tag == STATE_DICT:
        return f"state dict with the metadata {shorten(exact_bytes(state_dict_body(node[tag])[0]).decode())}"
    if type(node) is dict and tag == DEFAULT_DICT:
        return f"defaultdict({headed_body(tag, node[tag])[0]})"
    if type(node) is dict and tag == DEQUE:
        return f"deque with maxlen={deque_body(node[tag])[1]}"
    return shorten(exact_bytes(node).decode())


def _with_keys(kind: str, found: Mapping[bytes, object]) -> str:
    return f"{kind} with the keys {shorten(', '.join(key.decode() for key in found))}"


def _bits_change(name: str, info: LeafInfo, tally: Tally) -> LeafChange:
    return LeafChange(
        name,
        "bits",
        elements=tally.elements,
        differing=tally.differing,
        first=None if tally.first is None else _index(tally.first, info.shape),
        max_abs=tally.max_abs,
        max_rel=tally.max_rel,
        not_finite=tally.not_finite,
    )


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(shape):
        flat, at = divmod(flat, extent)
        index.append(at)
    return tuple(reversed(index))


def _describe(info: LeafInfo) -> str:
    dtype, shape = opaque(info.dtype) or (info.dtype, info.shape)
    return f"{dtype} [{', '.join(map(str, shape))}]"


def _stored(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint._parts.leaf_infos[name].alias_of or name


def _side(checkpoint: Checkpoint) -> Side:
    return Side(
        checkpoint.path, checkpoint._stated_step, checkpoint.created, len(checkpoint), checkpoint.nbytes
    )
