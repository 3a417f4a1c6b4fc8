"""HDF5 files: any, weights of Keras (``.weights.h5``, ``.h5``), and ``.keras`` archives, which hold one.

A file gives what h5py reads: nested dicts for groups, with an array for each dataset, without attributes.
Those of Keras are arranged as a training state: ``model.layers.dense.vars.0``, and ``optimizer.vars.3`` for
what the optimizer keeps by number. Contiguous datasets are read in place; chunked and compressed ones are
computed when they are read, one at a time.

h5py parses the files. Whatever would lead out of a file (external links and storage, virtual datasets) is
refused, and so are elements that are no numbers of a fixed size.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.format.dtypes import is_beyond_arrays
from everystep.format.geometry import whole
from everystep.state.numpy_arrays import logical_name
from everystep.store.read.read_errors import reading
from everystep.universal.source import Computed, Source, SourceFragment, SourceLeaf
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.zip_reader import OpenFile, Window, ZipRecords
from everystep.universal.training_state import arranged_names

KIND = "hdf5"
WANTED = "a file with the signature of HDF5, or a .keras archive"

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_USER_BLOCK = 1 << 20
_MEMBER = "model.weights.h5"
_MAX_DEPTH = 64
_MAX_OBJECTS = 1_000_000
_SLAB_NBYTES = 16 << 20
_MAX_CHUNK_NBYTES = 256 << 20
_DAMAGE = (OSError, KeyError, ValueError, RuntimeError, TypeError, OverflowError, MemoryError, EOFError)


def looks_like(path: str) -> str | None:
    if not os.path.isfile(path):
        return None
    if path.endswith(".keras"):
        return "a .keras archive" if zipfile.is_zipfile(path) else None
    try:
        return "an HDF5 file" if _has_signature(path) else None
    except OSError:
        return None


def describe(path: str, spec: object = None, as_training: bool | None = None) -> Source:
    h5py = _h5py(path)
    found = _Found(path, "")
    with _opened(path) as (file, start):
        _walk(h5py, file, start, found)
        found.keras = _keras_kind(file, found.state)
        facts = {"written by": found.keras or "HDF5"}
        version = file.attrs.get("keras_version") if "keras_version" in file.attrs else None
        if isinstance(version, (str, bytes)):
            facts["keras"] = version.decode("ascii", "replace") if isinstance(version, bytes) else version
    if found.left_out:
        facts["not read"] = f"attributes of {found.left_out} of its groups and datasets"
    arranged = bool(found.keras) if as_training is None else as_training
    state = arranged_names(path, found.named()) if arranged else found.state
    return source_of(path, KIND, state, step=found.step, facts=facts, arranged=arranged)


@dataclass(slots=True)
class _Found:
    """What a file holds: `state` has a dict for each group, in it a leaf for each dataset."""

    path: str
    keras: str
    state: dict[str, Any] = field(default_factory=dict)
    groups: dict[Any, str] = field(default_factory=dict)
    datasets: dict[Any, SourceLeaf] = field(default_factory=dict)
    objects: int = 0
    left_out: int = 0
    step: int | None = None

    def named(self) -> dict[str, SourceLeaf]:
        """The leaves by dotted names. Empty groups have none."""
        named: dict[str, SourceLeaf] = {}
        waiting: list[tuple[str, Any]] = [("", self.state)]
        while waiting:
            full, value = waiting.pop()
            if isinstance(value, dict):
                below = [(f"{full}/{name}" if full else name, one) for name, one in value.items()]
                waiting += reversed(below)
            elif named.setdefault(name := self.leaf_name(full), value) is not value:
                raise UnsupportedSource(f"{self.path}: two datasets are both named {name!r}")
        return named

    def refuse(self, name: str, why: str) -> UnsupportedSource:
        return UnsupportedSource(f"{self.path}: {name!r} {why}, and cannot be read")

    def leaf_name(self, name: str) -> str:
        """The name of a dataset of ours: Keras keeps a model and its optimizer."""
        first, _, rest = name.partition("/")
        if self.keras and rest:
            first = {"model_weights": "model", "optimizer_weights": "optimizer"}.get(first, first)
            if first not in ("model", "optimizer"):
                first, rest = "model", name
        return ".".join(filter(None, [first, *rest.split("/")]))


def _h5py(path: str) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise UnsupportedSource(f"{path}: HDF5 is read by h5py: pip install everystep[hdf5]") from error
    return h5py


def _has_signature(path: str) -> bool:
    """At the beginning, or behind a block for the user, whose length is a power of two from 512 on."""
    with open(path, "rb") as file:
        at = 0
        while at <= _MAX_USER_BLOCK:
            file.seek(at)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            at = max(512, at * 2)
    return False


@contextmanager
def _opened(path: str) -> Iterator[tuple[Any, int]]:
    """The file for h5py, and where its first byte lies in the file at `path`."""
    h5py = _h5py(path)
    try:
        with reading(path), OpenFile(path) as outer:
            if not path.endswith(".keras"):
                with h5py.File(path, "r", locking=False) as file:
                    yield file, 0
                return
            begin, nbytes = ZipRecords(outer).range_of(_MEMBER)
            with h5py.File(Window(outer, begin, nbytes), "r") as file:
                yield file, begin
    except _DAMAGE as error:
        if isinstance(error, CorruptCheckpoint | UnsupportedSource):
            raise
        raise CorruptCheckpoint(f"this is not a readable HDF5 file: {error}", path=path) from error


def _keras_kind(file: Any, state: dict[str, Any]) -> str:
    """Which version of Keras wrote a file; empty if what only Keras writes is not there."""
    names = state.keys()
    if "layer_names" in file.attrs or ("model_weights" in names and "keras_version" in file.attrs):
        return "Keras 2"
    layered = names & {"layers", "_layer_checkpoint_dependencies"} or names == {"vars"}
    return "Keras 3" if layered and _places(state) == {"vars"} else ""


def _places(state: dict[str, Any], name: str = "") -> set[str]:
    """The names of the groups that have datasets in them."""
    below = [_places(one, key) for key, one in state.items() if isinstance(one, dict)]
    own = {name} if any(not isinstance(one, dict) for one in state.values()) else set()
    return own.union(*below)


def _walk(h5py: Any, root: Any, start: int, found: _Found) -> None:
    """Visits groups without following links that lead elsewhere."""
    found.left_out += bool(len(root.attrs))
    waiting = [(root, "", found.state, 0)]
    while waiting:
        group, place, inside, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise found.refuse(place, f"is nested deeper than {_MAX_DEPTH}")
        below = []
        for name in _names(group, place, found):
            full = f"{place}/{name}" if place else name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                kind = "external" if isinstance(link, h5py.ExternalLink) else "soft"
                raise found.refuse(full, f"is a {kind} link")
            opened = group[name]
            found.left_out += bool(len(opened.attrs))
            if isinstance(opened, h5py.Group):
                first = found.groups.setdefault(_identity(h5py, opened), full)
                if first != full:
                    raise found.refuse(full, f"is the group {first!r} again")
                inside[name] = {}
                below.append((opened, full, inside[name], depth + 1))
            elif isinstance(opened, h5py.Dataset):
                key = _identity(h5py, opened)
                if key not in found.datasets:
                    found.datasets[key] = _leaf(h5py, opened, full, start, found)
                inside[name] = found.datasets[key]
            else:
                raise found.refuse(full, "is neither a group nor a dataset")
        waiting += reversed(below)


def _names(group: Any, place: str, found: _Found) -> list[str]:
    found.objects += len(group)
    if found.objects > _MAX_OBJECTS:
        raise found.refuse(place or "/", f"and others are more than {_MAX_OBJECTS} objects")
    names = list(group)
    for name in names:
        if not isinstance(name, str):
            raise found.refuse(place or "/", f"holds something named {name!r}, which is not UTF-8")
    return names


def _identity(h5py: Any, opened: Any) -> Any:
    info = h5py.h5o.get_info(opened.id)
    return info.fileno, info.addr


def _leaf(h5py: Any, dataset: Any, full: str, start: int, found: _Found) -> SourceLeaf:
    name = found.leaf_name(full)
    _refuse_strange(h5py, dataset, full, found)
    dtype = _element_type(dataset)
    if dtype is None:
        raise found.refuse(full, f"has elements of type {dataset.dtype}")
    shape = (*map(int, dataset.shape), *dataset.dtype.shape)  # elements may be arrays
    if is_beyond_arrays(dtype, shape):
        raise CorruptCheckpoint("a shape beyond what any array can have", path=found.path, leaf=name)
    if name == "optimizer.vars.0" and dataset.dtype.kind in "iu" and not shape:
        found.step = max(0, int(dataset[()]))
    nbytes = _nbytes(dataset)
    offset = dataset.id.get_offset() if nbytes and _lies_as_it_is(h5py, dataset, nbytes) else None
    if offset is not None:
        fragment = SourceFragment(found.path, start + int(offset), whole(shape))
        return SourceLeaf(name, dtype, shape, (fragment,), framework="numpy")
    _refuse_large_chunks(dataset, full, found)
    computed = Computed(partial(_compute, found.path, full, nbytes), (found.path,))
    return SourceLeaf(name, dtype, shape, (), framework="numpy", computed=computed)


def _refuse_strange(h5py: Any, dataset: Any, full: str, found: _Found) -> None:
    if dataset.shape is None:
        raise found.refuse(full, "has no array")
    if dataset.is_virtual:
        raise found.refuse(full, "is a virtual dataset, whose elements lie in other files")
    if dataset.external:
        raise found.refuse(full, "keeps its elements in other files")
    if dataset.dtype.hasobject or h5py.check_vlen_dtype(dataset.dtype) is not None:
        raise found.refuse(full, "has elements of no fixed size (objects, references, text)")


def _element_type(dataset: Any) -> str | None:
    """The name of the type. Keras stores bfloat16 as bytes, and says so beside them."""
    if dataset.dtype == np.dtype("V2") and _attribute(dataset, "dtype") == "bfloat16":
        return "BF16"
    return logical_name(dataset.dtype.base)


def _nbytes(dataset: Any) -> int:
    return int(dataset.dtype.itemsize * math.prod(dataset.shape))


def _attribute(dataset: Any, name: str) -> object:
    value = dataset.attrs[name] if name in dataset.attrs else None  # noqa: SIM401  attrs has no safe get
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _lies_as_it_is(h5py: Any, dataset: Any, nbytes: int) -> bool:
    """Whether the bytes in the file are those of numpy's type.

    One that was never written has no place; behind a user's block, HDF5 gives a wrong one.
    """
    if dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        return False
    if dataset.chunks is not None or dataset.id.get_storage_size() != nbytes:
        return False
    if dataset.dtype.kind == "V":
        return True
    if dataset.dtype.kind in "mM":  # which HDF5 has no type for: h5py keeps them as bytes with a tag
        return False
    return bool(dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)))


def _refuse_large_chunks(dataset: Any, full: str, found: _Found) -> None:
    """A chunk is in memory as a whole, however few of its elements are wanted."""
    if dataset.chunks is not None:
        chunk = dataset.dtype.itemsize * math.prod(dataset.chunks)
        if chunk > _MAX_CHUNK_NBYTES:
            raise found.refuse(full, f"has chunks of {chunk} bytes, more than {_MAX_CHUNK_NBYTES}")


def _compute(path: str, full: str, nbytes: int, out: BinaryIO) -> None:
    """Writes the elements of a dataset in C order, some rows at a time."""
    with _opened(path) as (file, _):
        dataset = file[full]
        if _nbytes(dataset) != nbytes:
            raise CorruptCheckpoint("the dataset has changed", path=path, leaf=full)
        if not dataset.shape or not nbytes:
            out.write(np.asarray(dataset[()]).tobytes())
            return
        unit = dataset.chunks[0] if dataset.chunks else 1
        rows = max(1, _SLAB_NBYTES // (nbytes // dataset.shape[0]) // unit) * unit
        for first in range(0, dataset.shape[0], rows):
            slab = dataset[first : first + rows]
            out.write(np.ascontiguousarray(slab).view(np.uint8).data.cast("B"))
