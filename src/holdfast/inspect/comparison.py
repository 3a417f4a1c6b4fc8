"""Which leaves and values of two checkpoints differ: leaves bit by bit in bounded memory, values exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.format.dtypes import itemsize
from holdfast.inspect.description import exact_bytes, leaf_order, stored_values
from holdfast.inspect.element_values import Tally
from holdfast.inspect.leaf_windows import Extent, WindowReader, windows
from holdfast.inspect.progress import Progress, no_progress
from holdfast.state import Node
from holdfast.store import Checkpoint, LeafInfo
from holdfast.store import open as open_checkpoint

Change = Literal["only in a", "only in b", "dtype", "shape", "bits", "framework", "tied"]


@dataclass(frozen=True, slots=True)
class LeafChange:
    """One way in which a leaf differs. The counts and distances belong to ``bits``; `first` is an index."""

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
    """A value that differs, each side in its stored form; None where there is none of that name."""

    name: str
    change: Literal["only in a", "only in b", "value"]
    a: Node = None
    b: Node = None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    path: str
    step: int
    created: float
    leaves: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs. `structure`: leaves and values agree, but not the containers around them.

    The order of a dict's keys is part of that: a restored state has it, too.
    """

    a: Side
    b: Side
    leaves: tuple[LeafChange, ...]
    values: tuple[ValueChange, ...]
    structure: bool
    identical: int

    @property
    def equal(self) -> bool:
        return not (self.leaves or self.values or self.structure)


def compare(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, progress: Progress = no_progress
) -> Difference:
    """Compares two checkpoints; of a run, its newest. Neither has to fit in memory.

    Leaves are compared bit by bit: NaNs with the same payload are equal, 0.0 and -0.0 are not. The order of
    keys counts; step, time and metrics do not. `holdfast.CorruptCheckpoint` if one of them is damaged.
    """
    with open_checkpoint(a) as left, open_checkpoint(b) as right:
        return _Comparison(left, right).run(progress)


class _Comparison:
    """Two open checkpoints about to be compared."""

    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self._a = a
        self._b = b
        # Stored leaves to be compared byte by byte, each pair once however many names are tied to it.
        self._pairs: dict[tuple[str, str], LeafInfo] = {}
        for name, mine in a.leaves.items():
            other = b.leaves.get(name)
            if other is not None and (mine.dtype, mine.shape) == (other.dtype, other.shape):
                self._pairs[_stored(a, name), _stored(b, name)] = mine

    def run(self, progress: Progress) -> Difference:
        a, b = self._a, self._b
        leaves = tuple(self._leaf_changes(self._tally(progress)))
        values = tuple(_value_changes(stored_values(a.values), stored_values(b.values)))
        structure = not leaves and not values and exact_bytes(a.tree) != exact_bytes(b.tree)
        changed = {change.name for change in leaves}
        identical = sum(name in b and name not in changed for name in a)
        return Difference(_side(a), _side(b), leaves, values, structure, identical)

    def _tally(self, progress: Progress) -> dict[tuple[str, str], Tally]:
        tallies = {pair: Tally(info.dtype) for pair, info in self._pairs.items()}
        pairs = list(self._pairs)
        names_a, names_b = [mine for mine, _ in pairs], [other for _, other in pairs]
        reader_a, reader_b = WindowReader(self._a), WindowReader(self._b)
        done, total = 0, sum(info.nbytes for info in self._pairs.values())
        for spans in windows(Extent(info.nbytes, itemsize(info.dtype)) for info in self._pairs.values()):
            bytes_a, bytes_b = reader_a.read(spans, names_a), reader_b.read(spans, names_b)
            at = 0
            for span in spans:
                part = slice(at, at + span.nbytes)
                tallies[pairs[span.index]].add(bytes_a[part], bytes_b[part])
                at += span.nbytes
            done += at
            progress(done, total)
        return tallies

    def _leaf_changes(self, tallies: Mapping[tuple[str, str], Tally]) -> Iterator[LeafChange]:
        a, b = self._a, self._b
        for name in leaf_order(a):
            mine = a.leaves[name]
            other = b.leaves.get(name)
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
        for name in leaf_order(b):
            if name not in a:
                yield LeafChange(name, "only in b", b=_describe(b.leaves[name]))


def _value_changes(a: Mapping[str, Node], b: Mapping[str, Node]) -> Iterator[ValueChange]:
    for name, mine in a.items():
        if name not in b:
            yield ValueChange(name, "only in a", a=mine)
        elif exact_bytes(mine) != exact_bytes(b[name]):
            yield ValueChange(name, "value", mine, b[name])
    for name, other in b.items():
        if name not in a:
            yield ValueChange(name, "only in b", b=other)


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
    return f"{info.dtype} [{', '.join(map(str, info.shape))}]"


def _stored(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.leaves[name].alias_of or name


def _side(checkpoint: Checkpoint) -> Side:
    return Side(checkpoint.path, checkpoint.step, checkpoint.created, len(checkpoint), checkpoint.nbytes)
