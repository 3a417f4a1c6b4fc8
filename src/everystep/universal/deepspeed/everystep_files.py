"""Files of DeepSpeed that `integrations.deepspeed` wrote: each is an Everystep checkpoint, in a directory.

Its arrays are read where they lie in the shard, as those of a torch file are. So opening
a file verifies its checksums, which reads all of its bytes once more.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.state import unflatten
from everystep.store import verify
from everystep.store.read.checkpoint import open_checkpoint
from everystep.universal.deepspeed.names import NAMESPACE, STAGE
from everystep.universal.deepspeed.plain_objects import from_plain
from everystep.universal.torch_file.pickle_machine import InertObject
from everystep.universal.torch_file.reading import StoredTensor


def read_everystep_file(path: str) -> Any:
    """The content, with a `StoredTensor` in place of each tensor. `CorruptCheckpoint` if it is damaged."""
    for problem in verify(path).problems:
        raise CorruptCheckpoint(problem.reason, path=problem.file, leaf=problem.leaf)
    with open_checkpoint(path) as opened:
        if not opened._parts.stored_whole:
            raise UnsupportedSource(f"{path}: not written by everystep.integrations.deepspeed")
        part = opened._parts[0]
        stored: dict[str, StoredTensor] = {}
        for leaf in part.leaves:
            (piece,) = leaf.fragments
            strides = tuple(math.prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape)))
            file = os.path.join(path, part.files[piece.file].name)
            stored[leaf.name] = StoredTensor(
                file, piece.offset, leaf.dtype, tuple(leaf.shape), strides, piece.nbytes
            )
        stored |= {alias.name: stored[alias.of] for alias in part.aliases}
        found = unflatten(opened._parts.tree, stored, where=opened._parts.manifest_path)
        return from_plain(found, _record, _plain_size)


def _plain_size(value: Any) -> Any:
    """Shapes are tuples, as in what `read_torch_file` returns."""
    return tuple(value) if isinstance(value, tuple) else value


def _record(name: str, state: Any) -> Any:
    """What `read_torch_file` makes of such an object."""
    if name == NAMESPACE:
        return argparse.Namespace(**state)
    return InertObject(name, (state,)) if name == STAGE else InertObject(name, (), state)
