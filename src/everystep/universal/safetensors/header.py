"""Where the tensors of a safetensors file lie. Owns its header only."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.format import dtypes
from everystep.universal.torch_file.reading import StoredTensor
from everystep.universal.torch_file.zip_reader import OpenFile

_MAX_HEADER_NBYTES = 100_000_000


def read_safetensors_file(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the order in which their bytes lie."""
    path = os.path.abspath(path)
    try:
        file = OpenFile(path)
    except FileNotFoundError:
        raise IncompleteCheckpoint("the file is missing", path=path) from None
    with file:
        nbytes = int.from_bytes(file.read(0, 8), "little")
        if nbytes > _MAX_HEADER_NBYTES:
            raise CorruptCheckpoint("the header is longer than safetensors allows", path=path)
        try:
            header = json.loads(file.read(8, nbytes))
            entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
            tensors = [_tensor(path, 8 + nbytes, file.nbytes, name, entry) for name, entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, (CorruptCheckpoint, UnsupportedSource)):
                raise
            raise CorruptCheckpoint(f"the header is damaged: {error}", path=path) from error
    return dict(sorted(tensors, key=lambda pair: pair[1].offset))


def _tensor(path: str, base: int, end: int, name: str, entry: Any) -> tuple[str, StoredTensor]:
    shape = tuple(int(n) for n in entry["shape"])
    begin, stop = (int(n) for n in entry["data_offsets"])
    dtype = str(entry["dtype"])
    found = dtypes.of_entry(dtype, shape, stop - begin)
    if not 0 <= begin <= stop <= end - base or found is None:
        raise CorruptCheckpoint(
            "the header gives impossible places, or the file was cut short", path=path, leaf=name
        )
    dtype, shape = found
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return name, StoredTensor(path, base + begin, dtype, shape, strides, stop - begin)
