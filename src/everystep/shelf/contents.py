"""What a shelf holds, for people and other tools: list, verify, export.

Listing reads the directory only. Verifying reads every byte. An export is complete under its name, or not
there at all.
"""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from everystep.engine.atomic_file import file_to_replace
from everystep.errors import CorruptShelf, UnsupportedState
from everystep.format.dtypes import carrier
from everystep.paths import local_path
from everystep.shelf import entries
from everystep.shelf.shelf import Shelf
from everystep.shelf.sizes import ShelfWarning, Usage
from everystep.state.numpy_arrays import Array

FORMATS = (".npz", ".safetensors")


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry. `type` is "array", "value" or "packed": a large value, or a container with arrays."""

    name: str
    type: str
    nbytes: int
    generation: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    framework: str | None = None


@dataclass(frozen=True, slots=True)
class ShelfListing:
    path: str
    medium: str
    usage: Usage
    entries: tuple[EntryInfo, ...]
    warning: str
    """Why the newest commit was passed over; empty if it was not."""


@dataclass(frozen=True, slots=True)
class Verification:
    """`damaged`: names of entries, and what is wrong with each. `warning`: as in `ShelfListing`."""

    path: str
    entries: int
    nbytes: int
    damaged: tuple[tuple[str, str], ...]
    warning: str


@dataclass(frozen=True, slots=True)
class Export:
    """`left_out` are entries that the format cannot hold."""

    output: str
    arrays: int
    nbytes: int
    left_out: tuple[str, ...]


def listing(path: str | os.PathLike[str]) -> ShelfListing:
    """The entries of a shelf, without reading their data."""
    with _opened(path) as shelf:
        return _listing(shelf)


def values(path: str | os.PathLike[str], name: str | None = None) -> tuple[ShelfListing, dict[str, object]]:
    """The entries of a shelf, and their values: all, or that of one name; of one commit."""
    with _opened(path) as shelf:
        found = _listing(shelf)
        return found, {entry.name: shelf[entry.name] for entry in found.entries if name in (None, entry.name)}


def _listing(shelf: Shelf) -> ShelfListing:
    found = tuple(_describe(shelf, name) for name in shelf)
    return ShelfListing(shelf.path, shelf.medium, shelf.usage, found, shelf._opened().warning)


def _opened(path: str | os.PathLike[str]) -> Shelf:
    """A shelf to look at. What is said of a commit that was passed over is part of the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShelfWarning)
        return Shelf(path, mode="r")


def _describe(shelf: Shelf, name: str) -> EntryInfo:
    kind, meta, born, pin = shelf._entry(shelf._opened(), name, name.encode())
    nbytes = 0 if pin is None else pin.nbytes
    if kind == entries.ARRAY:
        try:
            array = entries.array_meta(meta, nbytes)
        except entries.Malformed as error:
            raise CorruptShelf(str(error), path=shelf.path, name=name) from None
        return EntryInfo(name, "array", nbytes, born, array.dtype, array.shape, array.framework)
    return EntryInfo(name, "packed" if nbytes else "value", nbytes or len(meta), born)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Reads and checks every byte."""
    with _opened(path) as shelf:
        core = shelf._opened()
        damaged = tuple((error.name or "", error.reason) for error in shelf.verify())
        nbytes = 0
        for name in shelf:
            _, meta, _, pin = shelf._entry(core, name, name.encode())
            nbytes += len(meta) if pin is None else pin.nbytes
        return Verification(shelf.path, len(shelf), nbytes, damaged, core.warning)


def export(path: str | os.PathLike[str], output: str | os.PathLike[str], *, force: bool = False) -> Export:
    """Writes the arrays, and what values the format can hold, to a ``.npz`` or ``.safetensors`` file.

    Arrays in containers are named ``entry.place``. ``.npz`` has numbers and text as arrays without
    dimensions; ``.safetensors`` has all values as JSON in its metadata.
    """
    local_path(output)
    target = os.fspath(output)
    kind = os.path.splitext(target)[1]
    if kind not in FORMATS:
        raise ValueError(f"cannot export to {target}: its name must end with one of {', '.join(FORMATS)}")
    if not force and os.path.lexists(target):
        raise FileExistsError(None, "the file exists (--force replaces it)", target)
    with Shelf(path, mode="r") as shelf:
        arrays: dict[str, tuple[entries.ArrayMeta, Array]] = {}
        values: dict[str, Any] = {}
        references: list[str] = []  # of the arrays in containers
        for name in shelf:
            found = dict(_arrays(shelf, name))
            for taken in found.keys() & arrays.keys():
                raise UnsupportedState(
                    f"cannot export {shelf.path}: two of its arrays have the name {taken!r}, one as an entry "
                    "and one in a container. Assign one of them to an entry of another name"
                )
            arrays.update(found)
            if name not in found:
                values[name] = shelf[name]
                references += found
        with file_to_replace(target, overwrite=force) as file:
            if kind == ".npz":
                left_out = _write_npz(file, arrays, values)
            else:
                left_out = []
                _write_safetensors(file, arrays, entries.encode_tree(values, references))
            nbytes = file.tell()
    return Export(target, len(arrays), nbytes, tuple(left_out))


def _arrays(shelf: Shelf, name: str) -> Iterator[tuple[str, tuple[entries.ArrayMeta, Array]]]:
    _ = shelf[name]  # verifies it
    kind, meta, _, pin = shelf._entry(shelf._opened(), name, name.encode())
    data = np.empty(0, np.uint8) if pin is None else pin.view()
    if kind == entries.ARRAY:
        yield name, (entries.array_meta(meta, data.size), data)
    elif kind == entries.PACKED:
        for leaf in entries.packed_meta(meta, data.size).leaves:
            part = data[leaf.offset : leaf.offset + leaf.array.nbytes]
            yield f"{name}.{leaf.name}", (leaf.array, part)


def _write_npz(
    file: BinaryIO, arrays: dict[str, tuple[entries.ArrayMeta, Array]], values: dict[str, Any]
) -> list[str]:
    whole: dict[str, Any] = {}
    for name, (meta, data) in arrays.items():
        array = entries.numpy_on(data, meta)
        if array.dtype.kind == "V" and meta.dtype[:3] != "NP:":
            raise UnsupportedState(
                f"a .npz file cannot hold {name!r}, of type {meta.dtype}: use .safetensors"
            )
        whole[name] = array
    plain = {name: value for name, value in values.items() if _is_plain(value) and name not in whole}
    whole |= plain
    for name in whole:
        if f"{name}.npy" in whole:
            raise UnsupportedState(
                f"a .npz file cannot hold both {name!r} and {name + '.npy'!r}: numpy reads one as the other. "
                "Use .safetensors"
            )
    # As numpy.savez does, which takes some names for its own arguments.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, value in whole.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)
    return [name for name in values if name not in plain]


def _is_plain(value: object) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return not value.endswith("\0")  # which numpy drops
    return type(value) in (float, complex, bool)


def _write_safetensors(
    file: BinaryIO, arrays: dict[str, tuple[entries.ArrayMeta, Array]], values: str
) -> None:
    if "__metadata__" in arrays:
        raise UnsupportedState(
            "a .safetensors file cannot hold an array of the name '__metadata__': use .npz, or another name"
        )
    header: dict[str, Any] = {"__metadata__": {"values": values}}
    offset = 0
    for name, (meta, data) in arrays.items():
        stored = carrier(meta.dtype)
        header[name] = {
            "dtype": stored.name,
            "shape": [*meta.shape, *stored.tail],
            "data_offsets": [offset, offset + data.size],
        }
        offset += data.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, data in arrays.values():
        file.write(data.data)
