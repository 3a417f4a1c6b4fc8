"""Tensors of torch files as leaves.

Most lie in the file as they are. Conjugated and negative views lie there with the other sign, and a property
of the tensor says so: they become computed leaves. A sign is one bit, so the result is exact, also for NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from holdfast.format import dtypes
from holdfast.format.geometry import Box, whole
from holdfast.universal.source import Computed, SourceLeaf, Stretch
from holdfast.universal.torch_file import StoredTensor
from holdfast.universal.zip_records import OpenFile


def leaf_of_pieces(
    name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[tuple[Box, StoredTensor]], title: str = ""
) -> SourceLeaf:
    """A leaf that tensors are together, each a box of it. `title` is its name in messages."""
    if not any((tensor.conj or tensor.neg) and tensor.count for _, tensor in pieces):
        stretches: list[Stretch] = []
        for box, tensor in pieces:
            stretches.extend(tensor.stretches(box, leaf=title or name))
        return SourceLeaf(name, dtype, shape, tuple(stretches))
    files = tuple({tensor.file: None for _, tensor in pieces})
    plain = [
        (tensor, replace(tensor, conj=False, neg=False).stretches(box, leaf=title or name))
        for box, tensor in pieces
    ]

    def write(out: BinaryIO) -> None:
        found = np.empty((*shape, dtypes.itemsize(dtype)), np.uint8)
        for tensor, stretches in plain:
            with OpenFile(tensor.file) as file:
                for stretch in stretches:
                    data = bytearray(file.read(stretch.offset, stretch.box.volume * tensor.itemsize))
                    _flip(tensor, data)
                    at = tuple(map(slice, stretch.box.start, stretch.box.stop))
                    found[at] = np.frombuffer(data, np.uint8).reshape((*stretch.box.shape, tensor.itemsize))
        out.write(found.data)

    return SourceLeaf(name, dtype, shape, (), computed=Computed(write, files))


def leaf_of(name: str, tensor: StoredTensor) -> SourceLeaf:
    """A tensor that is all of a leaf."""
    leaf = leaf_of_pieces(name, tensor.dtype, tensor.shape, [(whole(tensor.shape), tensor)])
    return replace(leaf, is_parameter=tensor.is_parameter, requires_grad=tensor.requires_grad)


def _flip(tensor: StoredTensor, data: bytearray) -> None:
    is_complex = tensor.dtype.startswith("C")
    size = tensor.itemsize // 2 if is_complex else tensor.itemsize
    numbers = np.frombuffer(data, f"<u{size}")
    sign = numbers.dtype.type(1 << (8 * size - 1))
    if not is_complex and tensor.neg:
        numbers ^= sign
    if is_complex and tensor.neg:
        numbers[0::2] ^= sign
    if is_complex and tensor.conj != tensor.neg:
        numbers[1::2] ^= sign
