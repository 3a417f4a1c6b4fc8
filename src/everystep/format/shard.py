"""The header of a shard, which is a safetensors file.

Owns building and checking the header: names, types, shapes and byte ranges. Where tensors go in the file is
decided by `everystep.plan`; the bytes themselves move through `everystep.engine`.

A header is an 8-byte little-endian length followed by that many bytes of JSON. Everystep pads the JSON with
spaces so that data starts at a multiple of 4096, and fills any gap in the data with an entry ``__pad__.N``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.dtypes import SAFETENSORS_ITEMSIZE, is_beyond_arrays, of_entry
from everystep.format.records import MAX_DIMENSIONS, Count
from everystep.format.strict import reject_duplicate_keys, shorten

ALIGNMENT: Final = 4096
MAX_HEADER_NBYTES: Final = 100_000_000
"""What the safetensors library accepts; a longer header would be a hostage."""
MAX_ENTRIES: Final = 1 << 21
LENGTH_NBYTES: Final = 8

_METADATA = "__metadata__"
_PAD_PREFIX = "__pad__."
_LEAF_PREFIX = "leaf:"
_FRAGMENT_PREFIX = "frag:"


class HeaderEntry(Struct, frozen=True, gc=False):
    """One tensor of a shard; `begin` and `end` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(Struct, frozen=True):
    """A checked header. Entries are in the order of their bytes; `data_start` is where the data begins."""

    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str]
    data_start: int


class _Entry(Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


EntryTable = dict[str, _Entry]

# An entry and the metadata object have this much in common, which lets one typed pass reject anything nested,
# without recursion and before it takes memory. A logical type may add one dimension to the leaf's own.
_Numbers = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS + 1)]
_Table = dict[str, dict[str, str | _Numbers]]

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Table)


def entry_name(leaf_name: str, index: int = 0) -> str:
    """The name of a leaf's entry; `index` counts the fragments of that leaf in the same shard.

    Different leaves and indexes never share a name, nor take one that safetensors or the pads use.
    """
    if index:
        return f"{_FRAGMENT_PREFIX}{index}:{leaf_name}"
    if leaf_name == _METADATA or leaf_name.startswith((_PAD_PREFIX, _LEAF_PREFIX, _FRAGMENT_PREFIX)):
        return _LEAF_PREFIX + leaf_name
    return leaf_name


def pad_name(number: int) -> str:
    """The name of the `number`-th gap filler of a shard."""
    return f"{_PAD_PREFIX}{number}"


def is_pad(name: str) -> bool:
    """Whether an entry fills a gap and belongs to no leaf."""
    return name.startswith(_PAD_PREFIX)


def build_header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str], *, own: bool = True) -> bytes:
    """The header of a shard whose data is exactly these entries, in this order, without holes.

    `own`: see `entry_table`.
    """
    return encode_header(entry_table(entries, own=own), metadata)


def entry_table(entries: Sequence[HeaderEntry], *, own: bool = True) -> EntryTable:
    """What a header says about its entries, which must follow each other without holes.

    `own`: of a shard, which has types only that every reader of safetensors knows.
    """
    table: EntryTable = {}
    at = 0
    for entry in entries:
        shape = entry.shape
        if own and entry.dtype not in SAFETENSORS_ITEMSIZE:
            raise ValueError(f"{entry.name!r}: safetensors has no element type {entry.dtype!r}")
        if entry.begin != at or of_entry(entry.dtype, shape, entry.end - at) is None:
            raise ValueError(
                f"{entry.name!r}: bytes {entry.begin} to {entry.end} do not follow from its shape"
            )
        at = entry.end
        table[entry.name] = _Entry(entry.dtype, shape, (entry.begin, at))
    if len(table) != len(entries) or _METADATA in table:
        raise ValueError("two entries of a shard have the same name")
    return table


def encode_header(table: EntryTable, metadata: Mapping[str, str], at_least: int = 0) -> bytes:
    """The header with these entries. `at_least`: so many bytes, if it is not more by itself."""
    text = bytearray(LENGTH_NBYTES)
    _encoder.encode_into({_METADATA: metadata, **table} if metadata else table, text, LENGTH_NBYTES)
    nbytes = max(len(text) + -len(text) % ALIGNMENT, at_least) - LENGTH_NBYTES
    if nbytes > MAX_HEADER_NBYTES or len(table) > MAX_ENTRIES or _has_too_many_entries(text):
        raise UnsupportedState(
            f"a header of {nbytes} bytes for {len(table)} arrays is more than readers accept: "
            "keep them in fewer arrays, or give them shorter names"
        )
    text[:LENGTH_NBYTES] = nbytes.to_bytes(LENGTH_NBYTES, "little")
    text += b" " * (LENGTH_NBYTES + nbytes - len(text))
    return bytes(text)


def header_nbytes(prefix: bytes, file_nbytes: int, where: str) -> int:
    """Size of the header (its length word included), from the first eight bytes of a file."""
    if len(prefix) < LENGTH_NBYTES or file_nbytes < LENGTH_NBYTES:
        raise CorruptCheckpoint(f"{file_nbytes} bytes is too short for a shard", path=where)
    length = int.from_bytes(prefix[:LENGTH_NBYTES], "little")
    if length > MAX_HEADER_NBYTES:
        raise CorruptCheckpoint(f"header claims {length} bytes, more than any may have", path=where)
    if LENGTH_NBYTES + length > file_nbytes:
        raise CorruptCheckpoint(f"header claims {length} bytes in a file of {file_nbytes}", path=where)
    return LENGTH_NBYTES + length


def parse_header(data: bytes, file_nbytes: int, where: str, *, own: bool = True) -> Header:
    """Check and decode the header at the start of `data`, for a file of `file_nbytes` bytes.

    `data` may go on beyond the header. `CorruptCheckpoint` unless every entry has a known type, its bytes are
    what its shape takes, and all entries together are exactly the rest of the file. Unless it is of a shard
    (`own`), types need not be known.
    """
    table, metadata, data_start = _parse(data, file_nbytes, where)
    entries = [_entry(name, fields, where, own) for name, fields in table.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            problem = "overlaps the one before it" if entry.begin < at else "leaves a hole before it"
            raise CorruptCheckpoint(f"entry {entry.name[:80]!r} {problem}", path=where)
        at = entry.end
    if data_start + at != file_nbytes:
        raise CorruptCheckpoint(
            f"entries end at byte {data_start + at}, the file at {file_nbytes}", path=where
        )
    return Header(tuple(entries), metadata, data_start)


def parse_metadata(data: bytes, file_nbytes: int, where: str) -> dict[str, str]:
    """The metadata of the header at the start of `data`; its entries are looked at no further than JSON."""
    return _parse(data, file_nbytes, where)[1]


def _parse(data: bytes, file_nbytes: int, where: str) -> tuple[_Table, dict[str, str], int]:
    """A header's entries, its metadata, and where the data begins."""
    data_start = header_nbytes(data[:LENGTH_NBYTES], file_nbytes, where)
    if len(data) < data_start:
        raise CorruptCheckpoint(f"header of {data_start} bytes ends after {len(data)}", path=where)
    text = data[LENGTH_NBYTES:data_start]
    if not text.startswith(b"{"):
        raise CorruptCheckpoint("header is not a JSON object", path=where)
    if _has_too_many_entries(text):
        raise CorruptCheckpoint("header has more entries than any may have", path=where)
    try:
        table = _decoder.decode(text)
        canonical = _encoder.encode(table)
    except ValueError as error:  # malformed, mistyped, or not UTF-8
        raise CorruptCheckpoint(shorten(error), path=where) from None
    reject_duplicate_keys(text, [canonical], where)
    return table, _metadata(table.pop(_METADATA, {}), where), data_start


def _has_too_many_entries(text: bytes | bytearray) -> bool:
    """A bound before parsing. It counts those in names, too, so the writer asks as well."""
    return text.count(b"{") > 2 * MAX_ENTRIES


def _metadata(fields: Mapping[str, object], where: str) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for key, value in fields.items():
        if not isinstance(value, str):
            raise CorruptCheckpoint(f"metadata {key[:80]!r} is not text", path=where)
        metadata[key] = value
    return metadata


def _entry(name: str, fields: Mapping[str, str | tuple[int, ...]], where: str, own: bool) -> HeaderEntry:
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if (
        len(fields) != 3
        or not isinstance(dtype, str)
        or not isinstance(shape, tuple)
        or not isinstance(offsets, tuple)
        or len(offsets) != 2
    ):
        raise CorruptCheckpoint(f"entry {name[:80]!r} is not dtype, shape and data_offsets", path=where)
    if own and dtype not in SAFETENSORS_ITEMSIZE:
        raise CorruptCheckpoint(f"entry {name[:80]!r} has unknown type {dtype[:40]!r}", path=where)
    if dtype in SAFETENSORS_ITEMSIZE and is_beyond_arrays(dtype, shape):
        raise CorruptCheckpoint(f"entry {name[:80]!r} has a shape beyond what any array can have", path=where)
    begin, end = offsets
    if end < begin or of_entry(dtype, shape, end - begin) is None:
        raise CorruptCheckpoint(
            f"entry {name[:80]!r}: bytes {begin} to {end} are not what its shape takes", path=where
        )
    return HeaderEntry(name, dtype, shape, begin, end)
