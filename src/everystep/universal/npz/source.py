"""Files of ``numpy.savez``: a dict of arrays, as `numpy.load` gives it.

What is stored as it is, is read in place. Compressed arrays, and those in Fortran order, are computed when
they are read, one at a time. Arrays of Python objects would be pickles, and are refused.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.format.dtypes import is_beyond_arrays
from everystep.format.geometry import whole
from everystep.state.numpy_arrays import logical_name
from everystep.store.read.read_errors import open_stored, reading
from everystep.universal.source import Computed, Source, SourceFragment, SourceLeaf
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.zip_reader import LOCAL_NBYTES, data_start
from everystep.universal.training_state import arranged_names

KIND = "npz"
WANTED = "a file that ends in .npz"

_BLOCK_NBYTES = 1 << 20
_MAX_HEAD_NBYTES = 16 << 10
"""More than numpy itself accepts as a header."""
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
)


class _Head(NamedTuple):
    """The header of a member: its array's type, shape and order, and the header's own length."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    nbytes: int


def looks_like(path: str) -> str | None:
    return "an .npz file" if path.endswith(".npz") and os.path.isfile(path) else None


def describe(path: str, spec: object = None, as_training: bool | None = None) -> Source:
    with reading(path), open_stored(path, path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                arrays: dict[str, SourceLeaf] = {}
                for member in members:
                    leaf = _leaf(path, file, archive, member)
                    if leaf.name in arrays:
                        raise UnsupportedSource(f"{path}: there are two arrays {leaf.name!r}")
                    arrays[leaf.name] = leaf
        except _DAMAGE as error:
            if isinstance(error, CorruptCheckpoint | UnsupportedSource):
                raise
            raise CorruptCheckpoint(f"this is not a readable .npz file: {error}", path=path) from None
    return source_of(
        path,
        KIND,
        arranged_names(path, arrays) if as_training else arrays,
        facts={"compressed": "yes" if _compressed(members) else "no"},
        arranged=bool(as_training),
    )


def _compressed(members: list[zipfile.ZipInfo]) -> bool:
    return any(member.compress_type != zipfile.ZIP_STORED for member in members)


def _leaf(path: str, file: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> SourceLeaf:
    name = member.filename.removesuffix(".npy")
    head = _read_head(path, archive, member)
    dtype = logical_name(head.dtype)
    if head.dtype.hasobject or dtype is None:
        what = "Python objects, which are pickled" if head.dtype.hasobject else f"the type {head.dtype}"
        raise UnsupportedSource(f"{path}: array {name!r} has {what}, and cannot be read")
    if is_beyond_arrays(dtype, head.shape):
        raise CorruptCheckpoint("a shape beyond what any array can have", path=path, leaf=name)
    nbytes = head.dtype.itemsize * math.prod(head.shape)
    if member.file_size != head.nbytes + nbytes:
        raise CorruptCheckpoint(
            f"the member has {member.file_size} bytes, where its shape takes {head.nbytes + nbytes}",
            path=path,
            leaf=name,
        )
    if member.compress_type == zipfile.ZIP_STORED and not head.fortran:
        begin = data_start(os.pread(file.fileno(), LOCAL_NBYTES, member.header_offset), member.header_offset)
        if begin is None:
            raise CorruptCheckpoint("the member has no header", path=path, leaf=member.filename)
        lies = (SourceFragment(path, begin + head.nbytes, whole(head.shape)),)
        return SourceLeaf(name, dtype, head.shape, lies, framework="numpy")
    computed = Computed(partial(_inflate, path, member.filename, head, nbytes), (path,))
    return SourceLeaf(name, dtype, head.shape, (), framework="numpy", computed=computed)


def _read_head(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Head:
    with archive.open(member) as opened:
        begin = io.BytesIO(opened.read(_MAX_HEAD_NBYTES))  # numpy takes as many as a header says
    try:
        version = np.lib.format.read_magic(begin)
    except ValueError as error:
        if member.filename.endswith(".npy"):
            raise CorruptCheckpoint(str(error), path=path, leaf=member.filename) from None
        raise UnsupportedSource(f"{path}: {member.filename!r} is no array, but other bytes") from None
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(begin)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(begin)
    else:
        raise UnsupportedSource(f"{path}: {member.filename!r} is written in version {version} of npy")
    ordered = fortran and sum(size > 1 for size in shape) > 1
    return _Head(dtype, tuple(shape), ordered, begin.tell())


def _inflate(path: str, name: str, head: _Head, nbytes: int, out: BinaryIO) -> None:
    """Writes the bytes of an array in C order; exactly as many as its shape takes. Their CRC is checked."""
    try:
        with reading(path), zipfile.ZipFile(path) as archive, archive.open(name) as opened:
            opened.read(head.nbytes)
            if head.fortran:
                data = opened.read(nbytes)
                array = np.frombuffer(data, head.dtype).reshape(head.shape, order="F")
                for row in array:
                    out.write(np.ascontiguousarray(row).tobytes())
                left = nbytes - len(data)
            else:
                left = nbytes
                while left and (block := opened.read(min(left, _BLOCK_NBYTES))):
                    out.write(block)
                    left -= len(block)
            if left or opened.read(1):
                raise CorruptCheckpoint("the member has another size than it says", path=path, leaf=name)
    except _DAMAGE as error:
        if isinstance(error, CorruptCheckpoint):
            raise
        raise CorruptCheckpoint(f"the array cannot be read: {error}", path=path, leaf=name) from None
