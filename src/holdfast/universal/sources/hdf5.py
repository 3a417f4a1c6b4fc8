"""HDF5 files: any, weights of Keras (``.weights.h5``, ``.h5``), and ``.keras`` archives, which hold one.

A dataset is named by its path, with dots. Those of Keras are a model's: ``model.layers.dense.vars.0``, and
``optimizer.vars.3`` for what its optimizer keeps by number. Contiguous datasets are read in place; chunked,
compressed and big-endian ones are computed when they are read, one at a time.

h5py parses the files. Whatever would lead out of a file (external links and storage, virtual datasets) is
refused, and so are elements that are no numbers of a fixed size.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from holdfast.errors import CorruptCheckpoint, UnsupportedSource
from holdfast.format.dtypes import is_beyond_arrays
from holdfast.format.geometry import whole
from holdfast.state.numpy_arrays import logical_name
from holdfast.store.os_errors import reading
from holdfast.universal.source import Computed, Source, SourceLeaf, Stretch
from holdfast.universal.state_tree import source_of
from holdfast.universal.training_state import arranged_names
from holdfast.universal.zip_records import OpenFile, ZipRecords

KIND = "hdf5"
WANTED = "a file with the signature of HDF5, or a .keras archive"

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_USER_BLOCK = 1 << 20
_MEMBER = "model.weights.h5"
_MAX_DEPTH = 64
_MAX_OBJECTS = 1_000_000
_SLAB_NBYTES = 16 << 20
_MAX_CHUNK_NBYTES = 256 << 20
_MAX_TEXT_NBYTES = 1 << 20
# What deflate can do at most is about 1000; small datasets may be all fill value.
_MAX_INFLATION = 2000
_ALWAYS_NBYTES = 64 << 20
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
        found.keras = _keras_kind(file)
        _walk(h5py, file, start, found)
        facts = {"written by": found.keras or "HDF5"}
        version = file.attrs.get("keras_version") if "keras_version" in file.attrs else None
        if isinstance(version, (str, bytes)):
            facts["keras"] = version.decode("ascii", "replace") if isinstance(version, bytes) else version
    arranged = bool(found.keras or as_training)
    state: object = found.nested()
    if arranged:
        state = arranged_names(path, found.named())
    return source_of(path, KIND, state, step=found.step, facts=facts, arranged=arranged)


@dataclass(slots=True)
class _Found:
    """What a file holds by the names of HDF5, with ``/`` between groups; of an empty group, None."""

    path: str
    keras: str
    held: dict[str, Any] = field(default_factory=dict)
    seen: dict[Any, str] = field(default_factory=dict)
    objects: int = 0
    step: int | None = None

    def nested(self) -> dict[str, Any]:
        """Groups are dicts."""
        state: dict[str, Any] = {}
        for full, value in self.held.items():
            *groups, last = full.split("/")
            inside = state
            for name in groups:
                inside = inside.setdefault(name, {})
            inside[last] = {} if value is None else value
        return state

    def named(self) -> dict[str, Any]:
        """By dotted names, without empty groups."""
        return {self.leaf_name(full): value for full, value in self.held.items() if value is not None}

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
        raise UnsupportedSource(f"{path}: HDF5 is read by h5py: pip install holdfast[hdf5]") from error
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


class _Window(io.RawIOBase):
    """A part of a file, as h5py takes one."""

    def __init__(self, file: OpenFile, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        nbytes = max(0, min(len(into), self._nbytes - self._at))
        into[:nbytes] = self._file.read(self._start + self._at, nbytes)
        self._at += nbytes
        return nbytes


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
            extent = ZipRecords(outer).extent(_MEMBER)
            with h5py.File(_Window(outer, extent.offset, extent.nbytes), "r") as file:
                yield file, extent.offset
    except _DAMAGE as error:
        if isinstance(error, CorruptCheckpoint | UnsupportedSource):
            raise
        raise CorruptCheckpoint(f"this is not a readable HDF5 file: {error}", path=path) from error


def _keras_kind(file: Any) -> str:
    """Which version of Keras wrote a file; empty if it does not look like Keras."""
    names = set(file)
    if "layer_names" in file.attrs or "model_weights" in names:
        return "Keras 2"
    if names & {"layers", "_layer_checkpoint_dependencies"} or names == {"vars"}:
        return "Keras 3"
    return ""


def _walk(h5py: Any, root: Any, start: int, found: _Found) -> None:
    """Visits groups without following links that lead elsewhere."""
    waiting = [(root, "", 0)]
    while waiting:
        group, place, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise found.refuse(place, f"is nested deeper than {_MAX_DEPTH}")
        below = []
        for name in group:
            found.objects += 1
            if found.objects > _MAX_OBJECTS:
                raise found.refuse(place or "/", f"and others are more than {_MAX_OBJECTS} objects")
            full = f"{place}/{name}" if place else name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                kind = "external" if isinstance(link, h5py.ExternalLink) else "soft"
                raise found.refuse(full, f"is a {kind} link")
            opened = group[name]
            if isinstance(opened, h5py.Group):
                key = _identity(h5py, opened)
                if key in found.seen:
                    raise found.refuse(full, f"is the group {found.seen[key]!r} again")
                found.seen[key] = full
                if not len(opened):
                    found.held[full] = None
                below.append((opened, full, depth + 1))
            elif isinstance(opened, h5py.Dataset):
                _add(h5py, opened, full, start, found)
            else:
                raise found.refuse(full, "is neither a group nor a dataset")
        waiting += reversed(below)


def _identity(h5py: Any, opened: Any) -> Any:
    info = h5py.h5o.get_info(opened.id)
    return info.fileno, info.addr


def _add(h5py: Any, dataset: Any, full: str, start: int, found: _Found) -> None:
    name = found.leaf_name(full)
    key = _identity(h5py, dataset)
    if key in found.seen:
        found.held[full] = found.held[found.seen[key]]
        return
    _refuse_strange(h5py, dataset, full, found)
    if dataset.dtype.kind == "S":
        found.held[full] = _text(dataset, full, found)
        return
    dtype = _element_type(dataset)
    if dtype is None:
        raise found.refuse(full, f"has elements of type {dataset.dtype}")
    shape = tuple(int(length) for length in dataset.shape)
    if is_beyond_arrays(dtype, shape):
        raise CorruptCheckpoint("a shape beyond what any array can have", path=found.path, leaf=name)
    found.seen[key] = full
    if name == "optimizer.vars.0" and dataset.dtype.kind in "iu" and not shape:
        found.step = max(0, int(dataset[()]))
    nbytes = dataset.dtype.itemsize * math.prod(shape)
    offset = dataset.id.get_offset() if nbytes and _lies_as_it_is(h5py, dataset, nbytes) else None
    if offset is not None:
        stretch = Stretch(found.path, start + int(offset), whole(shape))
        found.held[full] = SourceLeaf(name, dtype, shape, (stretch,), framework="numpy")
        return
    _refuse_inflation(dataset, full, nbytes, found)
    computed = Computed(partial(_compute, found.path, full, nbytes))
    found.held[full] = SourceLeaf(name, dtype, shape, (), framework="numpy", computed=computed)


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
    return None if dataset.dtype.kind == "V" else logical_name(dataset.dtype.newbyteorder("="))


def _attribute(dataset: Any, name: str) -> object:
    value = dataset.attrs[name] if name in dataset.attrs else None  # noqa: SIM401  attrs has no safe get
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _lies_as_it_is(h5py: Any, dataset: Any, nbytes: int) -> bool:
    """Whether the bytes in the file are those of numpy's type, in this machine's order.

    One that was never written has no place; behind a user's block, HDF5 gives a wrong one.
    """
    if dataset.id.get_space_status() != h5py.h5d.SPACE_STATUS_ALLOCATED:
        return False
    if dataset.chunks is not None or dataset.id.get_storage_size() != nbytes:
        return False
    if dataset.dtype.kind == "V":
        return True
    stored = dataset.id.get_type()
    return bool(dataset.dtype.isnative and stored.equal(h5py.h5t.py_create(dataset.dtype, logical=True)))


def _refuse_inflation(dataset: Any, full: str, nbytes: int, found: _Found) -> None:
    """A few bytes of a file must not become gigabytes of memory."""
    if dataset.chunks is not None:
        chunk = dataset.dtype.itemsize * math.prod(dataset.chunks)
        if chunk > _MAX_CHUNK_NBYTES:
            raise found.refuse(full, f"has chunks of {chunk} bytes, more than {_MAX_CHUNK_NBYTES}")
    stored = int(dataset.id.get_storage_size())
    if nbytes > _ALWAYS_NBYTES and nbytes > _MAX_INFLATION * stored:
        raise found.refuse(full, f"would be {nbytes} bytes out of {stored} in the file")


def _text(dataset: Any, full: str, found: _Found) -> object:
    if dataset.dtype.itemsize * math.prod(dataset.shape) > _MAX_TEXT_NBYTES:
        raise found.refuse(full, "is text of more than a mebibyte")
    return dataset[()].tolist()


def _compute(path: str, full: str, nbytes: int, out: BinaryIO) -> None:
    """Writes the elements of a dataset in C order and this machine's byte order, some rows at a time."""
    with _opened(path) as (file, _):
        dataset = file[full]
        native = dataset.dtype.newbyteorder("=")
        if dataset.dtype.itemsize * math.prod(dataset.shape) != nbytes:
            raise CorruptCheckpoint("the dataset has changed", path=path, leaf=full)
        if not dataset.shape or not nbytes:
            out.write(np.asarray(dataset[()]).astype(native, copy=False).tobytes())
            return
        unit = dataset.chunks[0] if dataset.chunks else 1
        rows = max(1, _SLAB_NBYTES // (nbytes // dataset.shape[0]) // unit) * unit
        for first in range(0, dataset.shape[0], rows):
            slab = dataset[first : first + rows]
            out.write(np.ascontiguousarray(slab).astype(native, copy=False).data.cast("B"))
