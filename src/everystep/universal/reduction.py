"""Leaves that are the mean or the sum of several copies, each updated by itself (`partial` in a spec)."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.format.dtypes import itemsize
from everystep.store.stream.element_casts import FLOATS, from_floats, to_floats
from everystep.universal.source import Computed, SourceFragment, SourceLeaf

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def reduced(leaf: SourceLeaf) -> Computed:
    """The mean or sum of a leaf's copies, computed in double precision and rounded once."""
    if leaf.dtype not in FLOATS or leaf.reduce not in ("mean", "sum"):
        raise UnsupportedSource(
            f"leaf {leaf.name!r} of type {leaf.dtype} cannot be reduced with {leaf.reduce!r}: only the mean "
            "or sum of floating-point leaves is defined"
        )

    def write(file: BinaryIO) -> None:
        copies = (leaf.fragments, *leaf.terms)
        total = to_floats(_read(leaf, copies[0]), leaf.dtype).astype(np.float64)
        for copy in copies[1:]:
            total += to_floats(_read(leaf, copy), leaf.dtype)
        if leaf.reduce == "mean":
            total /= len(copies)
        file.write(from_floats(total, leaf.dtype).data)

    files = {fragment.file: None for copy in (leaf.fragments, *leaf.terms) for fragment in copy}
    return Computed(write, tuple(files))


def _read(leaf: SourceLeaf, fragments: tuple[SourceFragment, ...]) -> Bytes:
    """All bytes of one copy, in C order."""
    size = itemsize(leaf.dtype)
    array: Bytes = np.empty((*leaf.shape, size), np.uint8)
    for fragment in fragments:
        box = fragment.box
        data = np.fromfile(fragment.file, np.uint8, size * box.volume, offset=fragment.offset)
        if data.size != size * box.volume:
            raise CorruptCheckpoint("the file ends too early", path=fragment.file, leaf=leaf.name)
        where = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
        array[where] = data.reshape((*box.shape, size))
    return array.reshape(-1)
