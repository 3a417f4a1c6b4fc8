"""One safetensors file out of leaves of a checkpoint: streamed through bounded memory, and synced.

The caller gives the file its final name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everystep.engine import Memory, WritePiece, fs
from everystep.format.dtypes import SAFETENSORS_ITEMSIZE, as_entry, itemsize
from everystep.format.shard import HeaderEntry, build_header, entry_name
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.stream.leaf_stream import LeafStream, StreamedLeaf


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A stored leaf, and the name and type that it has in the file."""

    stored: str
    name: str
    dtype: str


class SafetensorsFile:
    """A file to be written. `tied`: names that are left out, and the one that has the same bytes.

    `prefix`: what was removed from the names; our reader puts it back. `made_for`: the framework that the
    file names; by default that of the leaves.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[FileEntry],
        tied: Mapping[str, str],
        prefix: str = "",
        made_for: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        # Wide elements first: then each tensor is aligned to its own size, as readers that map files like it.
        self._entries = sorted(entries, key=lambda entry: _aligned_to(entry.dtype), reverse=True)
        self._tied = dict(tied)
        self._prefix = prefix
        self._made_for = made_for
        self._sizes = [self._nbytes(entry) for entry in self._entries]
        self._header = self._build_header()

    @property
    def nbytes(self) -> int:
        return len(self._header) + sum(self._sizes)

    @property
    def data_nbytes(self) -> int:
        """Of the leaves alone."""
        return sum(self._sizes)

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self._entries]

    def write(self, path: str, progress: Callable[[int], None]) -> None:
        """Writes and syncs the file. `progress` gets the bytes so far."""
        header = np.frombuffer(self._header, np.uint8)
        leaves = [StreamedLeaf(entry.stored, entry.dtype) for entry in self._entries]
        with LeafStream(self._checkpoint, leaves) as stream:
            pieces = [WritePiece(0, Memory(header.ctypes.data, len(header), header))]
            at = len(header)
            for index, nbytes in enumerate(self._sizes):
                if nbytes:
                    pieces.append(WritePiece(at, stream.source(index)))
                at += nbytes
            fs.write_synced(path, at, pieces, progress)

    def _nbytes(self, entry: FileEntry) -> int:
        info = self._checkpoint._parts.leaf_infos[entry.stored]
        if info.dtype == entry.dtype:
            return info.nbytes
        return info.nbytes // itemsize(info.dtype) * itemsize(entry.dtype)

    def _build_header(self) -> bytes:
        entries = []
        at = 0
        foreign: dict[str, str] = {}
        for entry, nbytes in zip(self._entries, self._sizes, strict=True):
            dtype, shape = as_entry(entry.dtype, self._checkpoint._parts.leaf_infos[entry.stored].shape)
            if dtype in SAFETENSORS_ITEMSIZE and dtype != entry.dtype:
                foreign[entry.name] = entry.dtype
            entries.append(HeaderEntry(entry_name(entry.name), dtype, shape, at, at + nbytes))
            at += nbytes
        return build_header(entries, self._metadata(foreign), own=False)

    def _metadata(self, foreign: Mapping[str, str]) -> dict[str, str]:
        found = self._checkpoint
        infos = found._parts.leaf_infos
        from_torch = any(infos[entry.stored].framework == "torch" for entry in self._entries)
        metadata = {
            # Tools of the Hugging Face family ask for it.
            "format": self._made_for or ("pt" if from_torch or not self._entries else "np"),
            "everystep.id": found.id,
        }
        if found._stated_step is not None:
            metadata["everystep.step"] = str(found._stated_step)
        if self._prefix:
            metadata["everystep.prefix"] = self._prefix
        if self._tied:
            metadata["everystep.tied"] = json.dumps(self._tied)
        if foreign:
            # safetensors has no name for these types; the file holds their bytes under another one.
            metadata["everystep.dtypes"] = json.dumps(foreign)
        return metadata


def _aligned_to(dtype: str) -> int:
    return SAFETENSORS_ITEMSIZE.get(as_entry(dtype, ())[0], 1)
