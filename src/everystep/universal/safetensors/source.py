"""Safetensors files, of any writer.

A file is a dict of tensors, as safetensors itself loads it; arranged as a training state, the weights of a
model. A file that Everystep exported says in its metadata which prefix its names have lost, which leaves are
tied, and the types that safetensors lacks, so it is always arranged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.format.dtypes import carrier, is_known, of_entry
from everystep.format.geometry import whole
from everystep.format.shard import LENGTH_NBYTES, Header, HeaderEntry, header_nbytes, is_pad, parse_header
from everystep.store.read.read_errors import open_stored, reading
from everystep.universal.source import Source, SourceFragment, SourceLeaf
from everystep.universal.state_tree import source_of
from everystep.universal.training_state import arranged_names

KIND = "safetensors"
WANTED = "a file with a header of JSON behind its length"


def looks_like(path: str) -> str | None:
    if not os.path.isfile(path):
        return None
    if path.endswith(".safetensors"):
        return "a .safetensors file"
    try:
        with open(path, "rb") as file:
            begin = file.read(LENGTH_NBYTES + 2)
    except OSError:
        return None
    length = int.from_bytes(begin[:LENGTH_NBYTES], "little")
    fits = 2 <= length <= os.path.getsize(path) - LENGTH_NBYTES
    return "a header of safetensors" if fits and begin[LENGTH_NBYTES:] in (b'{"', b"{}") else None


def describe(path: str, spec: object = None, as_training: bool | None = None) -> Source:
    names, leaves = read_leaves(path)
    weights = {leaf.name: leaf for leaf in leaves.values()}
    if names.exported:
        state: object = arranged_names(path, names.tied(weights, path))
        return source_of(path, KIND, state, step=names.step, facts={"written by": "everystep export"})
    state = {"model": weights} if as_training else weights
    return source_of(path, KIND, state, arranged=bool(as_training))


def read_leaves(path: str, prefix: str = "") -> tuple[MetadataNames, dict[str, SourceLeaf]]:
    """What a file's metadata says about names, and its leaves by the names of their entries.

    `prefix` is what names have lost in a file that does not say it.
    """
    header = read_header(path)
    names = MetadataNames(header.metadata, path, prefix)
    entries = (entry for entry in header.entries if not is_pad(entry.name))
    return names, {entry.name: _leaf_of(path, header, entry, names) for entry in entries}


def read_header(path: str) -> Header:
    """The header of a file. `CorruptCheckpoint` if the file is not what it says."""
    try:
        with reading(path), open_stored(path, path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            data = file.read(LENGTH_NBYTES)
            data += file.read(header_nbytes(data, nbytes, path) - LENGTH_NBYTES)
    except OSError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise IncompleteCheckpoint("the file is missing", path=path) from error
        raise
    return parse_header(data, nbytes, path, own=False)


class MetadataNames:
    """What the metadata of a file says about names; of a file that Everystep did not export, nothing.

    `prefix` is what names have lost in a file that does not say it.
    """

    def __init__(self, metadata: Mapping[str, str], path: str, prefix: str = "") -> None:
        self.exported = "everystep.id" in metadata
        self.prefix = metadata.get("everystep.prefix", "") if self.exported else prefix
        step = metadata.get("everystep.step", "")
        self.step = (
            int(step) if self.exported and step.isascii() and step.isdigit() and len(step) <= 12 else None
        )
        self.dtypes = self._table(metadata, "everystep.dtypes", path)
        self._tied = self._table(metadata, "everystep.tied", path)

    def tied(self, leaves: dict[str, SourceLeaf], path: str) -> dict[str, SourceLeaf]:
        """The leaves by name, and by the names that are tied to them."""
        for name, of in self._tied.items():
            found = leaves.get(self.prefix + of)
            if found is None or self.prefix + name in leaves:
                raise UnsupportedSource(f"{path}: {name!r} cannot be another name of {of!r}")
            leaves[self.prefix + name] = found
        return leaves

    def _table(self, metadata: Mapping[str, str], key: str, path: str) -> dict[str, str]:
        if not self.exported or key not in metadata:
            return {}
        try:
            found = json.loads(metadata[key])
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise CorruptCheckpoint(f"metadata {key!r} is not a table of names", path=path)
        return found


def types_of(entry: HeaderEntry, path: str) -> tuple[str, tuple[int, ...]]:
    """The logical type and shape of an entry."""
    found = of_entry(entry.dtype, entry.shape, entry.end - entry.begin)
    if found is None:
        raise CorruptCheckpoint("its bytes are not what its shape takes", path=path, leaf=entry.name)
    return found


def _leaf_of(path: str, header: Header, entry: HeaderEntry, names: MetadataNames) -> SourceLeaf:
    """The leaf that an entry of a file is."""
    name = entry.name.removeprefix("leaf:") if names.exported else entry.name
    dtype, shape = types_of(entry, path)
    if name in names.dtypes and names.dtypes[name] != dtype:
        dtype, shape = names.dtypes[name], entry.shape
        tail = carrier(dtype).tail if is_known(dtype) else None
        if tail is None or carrier(dtype).name != entry.dtype or shape[len(shape) - len(tail) :] != tail:
            raise CorruptCheckpoint(f"type {dtype[:40]!r} does not fit the entry", path=path, leaf=name)
        shape = shape[: len(shape) - len(tail)]
    framework = "numpy" if header.metadata.get("format") == "np" else "torch"
    fragment = SourceFragment(path, header.data_start + entry.begin, whole(shape))
    return SourceLeaf(names.prefix + name, dtype, shape, (fragment,), framework=framework)  # type: ignore[arg-type]
