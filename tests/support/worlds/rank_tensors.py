"""Real tensors of ranks in real files, cut and put together by plans: the truth for union and split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everystep.format.geometry import Box, whole
from everystep.universal.source import SourceFragment, SourceLeaf
from everystep.universal.split import LocalPlan

Array = NDArray[np.float32]


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def carry_out(plan: LocalPlan, whole: Array) -> Array:
    """The tensor of one rank. What a plan leaves out stays NaN."""
    local = np.full(plan.shape, np.nan, dtype=whole.dtype)
    for move in plan.moves:
        local[region(move.local)] = whole[region(move.source)].reshape(move.local.shape)
    for box in plan.zeros:
        assert np.isnan(local[region(box)]).all(), "padding over elements"
        local[region(box)] = 0
    return local


def store(path: Path, array: Array, lead: int = 0) -> SourceLeaf:
    """Writes a tensor into a file of its own, after some other bytes."""
    path.write_bytes(b"\xff" * lead + array.tobytes())
    return lying_at(str(path), lead, array.shape)


def lying_at(path: str, offset: int, shape: tuple[int, ...]) -> SourceLeaf:
    """What a rank holds, in one piece."""
    fragments = (SourceFragment(path, offset, whole(shape)),) if np.prod(shape) else ()
    return SourceLeaf("held", "F32", shape, fragments)


def read_fragments(leaf: SourceLeaf, fragments: Sequence[SourceFragment], dtype: type = np.float32) -> Array:
    """The array that fragments make. Every element must be written once."""
    array = np.zeros(leaf.shape, dtype=dtype)
    times = np.zeros(leaf.shape, dtype=np.int64)
    for fragment in fragments:
        found = np.fromfile(fragment.file, dtype=dtype, count=fragment.box.volume, offset=fragment.offset)
        array[region(fragment.box)] = found.reshape(fragment.box.shape)
        times[region(fragment.box)] += 1
    assert (times == 1).all(), "elements are missing or written twice"
    return array


def read_leaf(leaf: SourceLeaf) -> Array:
    """The array of a leaf: copies must be equal, terms are reduced."""
    first = read_fragments(leaf, leaf.fragments)
    for copy in leaf.copies:
        np.testing.assert_array_equal(read_fragments(leaf, copy), first)
    if leaf.reduce:
        first = np.sum([first, *(read_fragments(leaf, term) for term in leaf.terms)], axis=0)
        if leaf.reduce == "mean":
            first = first / np.float32(1 + len(leaf.terms))
    return first
