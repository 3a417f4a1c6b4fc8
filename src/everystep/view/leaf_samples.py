"""Elements of leaves, sampled: which ones, read in bounded memory, and what they look like.

A leaf of up to 256 KiB is sampled as a whole, a larger one in four ranges that are evenly spread.
Everything read is verified, so each range costs the chunks around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from everystep.engine import CHUNK_NBYTES
from everystep.format.dtypes import itemsize
from everystep.inspect.element_values import Array, values
from everystep.store import LeafInfo
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.stream.leaf_windows import Bytes, LeafRange, WindowReader
from everystep.view.budget import Budget

SAMPLE_NBYTES = 256 << 10
_RANGES = 4
_BATCH_NBYTES = 8 << 20
_BATCH_LEAVES = 512

BINS = 24
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The height of a bar of a histogram, as a letter: a page has many of them."""
_OUTER = 0.005
"""The share of elements at either end that goes to the outermost bar: a few would squeeze the rest."""
_MANY = 200


class LeafSample(Struct, frozen=True, array_like=True, gc=False):
    """What `elements` elements of a leaf look like. Of complex numbers, their absolute values.

    `whole`: these are all of its elements. The numbers are over finite elements, `not_finite` counts others.
    `bars` are heights of a histogram from `first` to `last`, as letters of `LEVELS`; the outermost bars also
    hold everything beyond. None without a finite element. Numbers have six digits, because a
    page has many.
    """

    elements: int
    whole: bool
    zeros: int
    not_finite: int
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None
    first: float | None = None
    last: float | None = None
    bars: str = ""


@dataclass(frozen=True, slots=True)
class SampledBytes:
    """Bytes of one leaf's sample."""

    name: str
    data: Bytes
    whole: bool


def sample_leaves(checkpoint: Checkpoint, names: Sequence[str], budget: Budget) -> dict[str, LeafSample]:
    """Samples of leaves, as far as the budget goes. Leaves that hold no numbers are left out."""
    found = {}
    for taken in read_samples(checkpoint, numeric(checkpoint._parts.leaf_infos, names), budget):
        info = checkpoint._parts.leaf_infos[taken.name]
        numbers = values(info.dtype, taken.data)
        if numbers is not None:
            found[taken.name] = look_at(numbers, taken.whole)
    return found


def numeric(leaves: Mapping[str, LeafInfo], names: Sequence[str]) -> list[str]:
    """The leaves that are stored themselves, and whose elements are numbers."""
    no_bytes: Bytes = np.empty(0, np.uint8)
    return [
        name
        for name in names
        if leaves[name].alias_of is None
        and leaves[name].nbytes
        and values(leaves[name].dtype, no_bytes) is not None
    ]


def read_samples(checkpoint: Checkpoint, names: Sequence[str], budget: Budget) -> Iterator[SampledBytes]:
    """The samples of leaves in this order, until the budget is spent."""
    reader = WindowReader(checkpoint)
    batch: list[tuple[str, tuple[LeafRange, ...]]] = []
    nbytes = 0
    for name in names:
        info = checkpoint._parts.leaf_infos[name]
        ranges = sampled_ranges(info.nbytes, itemsize(info.dtype), len(batch))
        if not budget.take(_cost(ranges)):
            break
        batch.append((name, ranges))
        nbytes += sum(span.nbytes for span in ranges)
        if nbytes >= _BATCH_NBYTES or len(batch) >= _BATCH_LEAVES:
            yield from _read(reader, batch)
            batch, nbytes = [], 0
    yield from _read(reader, batch)


def _read(reader: WindowReader, batch: Sequence[tuple[str, tuple[LeafRange, ...]]]) -> Iterator[SampledBytes]:
    if not batch:
        return
    names = [name for name, _ in batch]
    data = reader.read([span for _, ranges in batch for span in ranges], names)
    at = 0
    for name, ranges in batch:
        nbytes = sum(span.nbytes for span in ranges)
        yield SampledBytes(name, data[at : at + nbytes], ranges[0].whole)
        at += nbytes


def sampled_ranges(nbytes: int, size: int, index: int) -> tuple[LeafRange, ...]:
    """The ranges to sample of a leaf of `nbytes` bytes, `size` per element."""
    if nbytes <= SAMPLE_NBYTES:
        return (LeafRange(index, 0, nbytes, whole=True),)
    elements, part = nbytes // size, max(SAMPLE_NBYTES // _RANGES // size, 1)
    if elements <= _RANGES * part:
        return (LeafRange(index, 0, nbytes, whole=True),)
    starts = [number * (elements - part) // (_RANGES - 1) for number in range(_RANGES)]
    return tuple(LeafRange(index, start * size, (start + part) * size, whole=False) for start in starts)


def _cost(ranges: Sequence[LeafRange]) -> int:
    """Bytes of files that are read: whole chunks, because of their checksums."""
    chunk = CHUNK_NBYTES
    if ranges[0].whole:
        return ranges[0].nbytes
    return sum((-(-span.stop // chunk) - span.start // chunk) * chunk for span in ranges)


def look_at(elements: Array, whole: bool) -> LeafSample:
    """Sums up some elements."""
    numbers = np.abs(elements) if elements.dtype.kind == "c" else elements
    with np.errstate(all="ignore"):
        ordered = np.sort(numbers.astype(np.float64, copy=False).reshape(-1))
    # Infinities and NaN are at the ends now.
    odd_ends = len(ordered) and not (math.isfinite(ordered[0]) and math.isfinite(ordered[-1]))
    finite = ordered[np.isfinite(ordered)] if odd_ends else ordered
    count, odd = len(ordered), len(ordered) - len(finite)
    if not len(finite):
        return LeafSample(count, whole, 0, odd)
    zeros = np.searchsorted(finite, 0.0, "right") - np.searchsorted(finite, 0.0, "left")
    with np.errstate(all="ignore"):
        mean = float(finite.sum()) / len(finite)
        apart = finite - mean
        deviation = math.sqrt(float(apart @ apart) / len(finite))  # quicker than `std` for small arrays
    begin, end, bars = _bars(finite)
    return LeafSample(
        elements=count,
        whole=whole,
        zeros=int(zeros),
        not_finite=odd,
        low=short(finite[0]),
        high=short(finite[-1]),
        mean=short(mean),
        deviation=short(deviation),
        first=short(begin),
        last=short(end),
        bars=bars,
    )


def _bars(ordered: Array) -> tuple[float, float, str]:
    begin, end = float(ordered[0]), float(ordered[-1])
    if len(ordered) >= _MANY:
        outer = int(_OUTER * len(ordered))
        inner = float(ordered[outer]), float(ordered[-1 - outer])
        if inner[0] < inner[1]:
            begin, end = inner
    if not end > begin:
        return begin, end, ""
    parts = np.arange(1, BINS) / BINS
    edges = begin * (1 - parts) + end * parts  # cannot overflow, even if the ends are far apart
    places = np.concatenate(([0], np.searchsorted(ordered, edges, "left"), [len(ordered)]))
    heights = np.diff(places)
    levels = -(-heights * (len(LEVELS) - 1) // heights.max())  # rounded up: one element is not nothing
    return begin, end, "".join(LEVELS[level] for level in levels.tolist())


def short(value: float) -> float | None:
    """Six digits of a number; None for what overflowed."""
    found = float(f"{value:.6g}")
    return found if math.isfinite(found) else None
