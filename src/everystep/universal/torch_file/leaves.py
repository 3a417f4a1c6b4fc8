"""Tensors of torch files as leaves.

Most lie in the file as they are. Two kinds become computed leaves: those whose elements are scattered
(``channels_last``, transposed matrices), and conjugated and negative views, which lie there with the other
sign. A sign is one bit, so the result is exact, also for NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from everystep.format import dtypes
from everystep.format.geometry import Box, whole
from everystep.universal.source import Computed, SourceFragment, SourceLeaf
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.torch_file.zip_reader import OpenFile


def leaf_of_boxes(
    name: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[tuple[Box, StoredTensor]], title: str = ""
) -> SourceLeaf:
    """A leaf that tensors are together, each a box of it. `title` is its name in messages."""
    if not any((one.conj or one.neg or one.scattered) and one.count for _, one in boxes):
        fragments: list[SourceFragment] = []
        for box, tensor in boxes:
            fragments.extend(tensor.fragments(box, leaf=title or name))
        return SourceLeaf(name, dtype, shape, tuple(fragments))
    files = tuple({tensor.file: None for _, tensor in boxes})

    def write(out: BinaryIO) -> None:
        found = np.empty((*shape, dtypes.itemsize(dtype)), np.uint8)
        for box, tensor in boxes:
            with OpenFile(tensor.file) as file:
                data = bytearray(file.read(tensor.offset, tensor.span_nbytes))
            _flip(tensor, data)
            size = tensor.itemsize
            strides = (*(stride * size for stride in tensor.strides), 1)
            at = tuple(map(slice, box.start, box.stop))
            found[at] = np.ndarray((*tensor.shape, size), np.uint8, data, 0, strides)
        out.write(found.data)

    return SourceLeaf(name, dtype, shape, (), computed=Computed(write, files))


def leaf_of(name: str, tensor: StoredTensor) -> SourceLeaf:
    """A tensor that is all of a leaf."""
    leaf = leaf_of_boxes(name, tensor.dtype, tensor.shape, [(whole(tensor.shape), tensor)])
    return replace(leaf, is_parameter=tensor.is_parameter, requires_grad=tensor.requires_grad)


def lying_leaf(name: str, tensor: StoredTensor) -> SourceLeaf:
    """A tensor whose elements lie in the file as they are; `UnsupportedSource` for any other."""
    return SourceLeaf(name, tensor.dtype, tensor.shape, tensor.fragments(leaf=name))


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
