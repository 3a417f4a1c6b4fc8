"""The manifest as a file: from records to bytes and back.

Owns the form of `manifest.json` and of part files (docs/format.md is the grammar): one JSON object that
carries its own digest, padded so that it can be overwritten in place. Where a root stands in a shard's header
instead, `everystep.format.embedded` owns what is around it. What the fields must satisfy is in
`everystep.format.validate`; what the nodes of `tree` mean belongs to `everystep.state`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from everystep.errors import CorruptCheckpoint, UnsupportedState
from everystep.format.checksums import HEX_DIGITS, digest
from everystep.format.records import (
    EMBEDDED,
    FORMAT,
    MAX_INT,
    MAX_RANK,
    Alias,
    Count,
    Fragment,
    Hex64,
    Leaf,
    Part,
    PartRef,
    Rank,
    Root,
    ShardFile,
)
from everystep.format.strict import more_values_than, reject_deep_nesting, reject_duplicate_keys, shorten
from everystep.format.validate import MAX_JSON_DEPTH, validate_part, validate_root

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "MANIFEST_NAME",
    "MAX_ROOT_NBYTES",
    "Alias",
    "Fragment",
    "Leaf",
    "Part",
    "PartRef",
    "Root",
    "ShardFile",
    "decode_part",
    "decode_root",
    "decode_text",
    "encode_part",
    "encode_root",
    "encode_text",
    "part_name",
    "part_ref",
    "shard_name",
]

ALIGNMENT: Final = 4096
"""Files of a checkpoint are laid out in blocks of this size, so that direct I/O can write them in place."""
MANIFEST_NAME: Final = "manifest.json"
MAX_ROOT_NBYTES: Final = 1 << 30
"""Most that a root (or a part) may have: check it before reading the file."""
MAX_NODES: Final = 1 << 24
"""JSON values in one file: room for 700,000 leaves, and a bound on the memory that decoding takes."""

_PREFIX = b'{"xxh3":"'
_DIGITS = slice(len(_PREFIX), len(_PREFIX) + HEX_DIGITS)
_ZEROS = "0" * HEX_DIGITS

_NonFinite = Literal["inf", "-inf", "nan"]

# What stands in the files: the same fields behind the digest, non-finite metrics spelled out. All required:
# a field that is absent is damage, not a default.


class _RootFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    xxh3: Hex64
    format: str
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    step: Count
    created: float
    world: Annotated[int, Meta(ge=1, le=MAX_RANK + 1)]
    metrics: dict[str, float | _NonFinite]
    tree: Any
    part: Part
    parts: tuple[PartRef, ...]
    trees: tuple[Rank, ...] = ()
    layout: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _PartFile(Struct, frozen=True, forbid_unknown_fields=True):
    xxh3: Hex64
    format: str
    part: Part


_File = TypeVar("_File", _RootFile, _PartFile)

_encoder = msgspec.json.Encoder()
_root_decoder = msgspec.json.Decoder(_RootFile)
_part_decoder = msgspec.json.Decoder(_PartFile)


def encode_root(root: Root, leaves: Iterable[Leaf] | None = None) -> bytearray:
    """The bytes of `manifest.json`. `leaves`, if given, are those of the part, made one after the other.

    There may be hundreds of thousands: all records at once would take as much memory again as their bytes.
    """
    if leaves is None:
        return _seal(_encode(_root_file(root)))
    part = msgspec.structs.replace(root.part, leaves=_HERE)
    return _seal(_encode_with(_root_file(msgspec.structs.replace(root, part=part)), leaves))


def encode_text(root: Root) -> str:
    """The manifest as it stands in a shard's header: without padding, its digest still zeros."""
    encoded = _encoder.encode(_root_file(root))
    _check_values(encoded)
    return encoded.decode()


def _root_file(root: Root) -> _RootFile:
    if not 0 <= root.step <= MAX_INT:
        raise ValueError(f"step must be between 0 and 2^63 - 1, not {root.step}")
    if not math.isfinite(root.created):
        raise ValueError(f"time of creation must be finite, not {root.created}")
    return _RootFile(
        _ZEROS,
        root.format,
        root.id,
        operator.index(root.step),  # numpy's, too
        float(root.created),
        root.world,
        spell_metrics(root.metrics),
        root.tree,
        root.part,
        root.parts,
        root.trees,
        msgspec.Raw(root.layout) if root.layout else msgspec.UNSET,
    )


def encode_part(part: Part) -> bytearray:
    """The bytes of the part file of a rank other than 0."""
    return _seal(_encode(_PartFile(_ZEROS, FORMAT, part)))


def part_name(rank: int) -> str:
    """The file name of a rank's part."""
    return f"r{rank:05d}.json"


def shard_name(rank: int, volume: int) -> str:
    """The file name of a rank's shard on a volume."""
    return f"r{rank:05d}.v{volume}.safetensors"


def part_ref(part: Part, encoded: bytes | bytearray) -> PartRef:
    """What the root says about an encoded part."""
    return PartRef(part.rank, part_name(part.rank), len(encoded), encoded[_DIGITS].decode("ascii"))


def decode_root(data: bytes | bytearray, where: str) -> Root:
    """Check and decode the bytes of `manifest.json`; `where` is its path, for the error message.

    Digest first, then syntax, then structure, then everything in `everystep.format.validate`.
    `CorruptCheckpoint` for anything that is not a manifest this version could have been given by a writer.
    """
    _check_frame(data, where)
    root = _decode_root(data, where)
    if any(file.header_xxh3 == EMBEDDED for file in root.part.files):
        raise CorruptCheckpoint("a manifest by itself of a checkpoint of one file", path=where)
    return root


def decode_text(text: str, where: str) -> Root:
    """Check and decode what `encode_text` wrote. The caller has checked its digest."""
    data = text.encode("utf-8", "surrogatepass")
    if more_values_than(MAX_NODES, data):
        raise CorruptCheckpoint(f"more than {MAX_NODES} JSON values", path=where)
    return _decode_root(data, where)


def _decode_root(data: bytes | bytearray, where: str) -> Root:
    found = _decode(_root_decoder, data, where)
    _check_format(found.format, where)
    root = Root(
        format=found.format,
        id=found.id,
        step=found.step,
        created=found.created,
        world=found.world,
        metrics={name: float(value) for name, value in found.metrics.items()},
        tree=found.tree,
        part=found.part,
        parts=found.parts,
        trees=found.trees,
        layout=b"" if found.layout is msgspec.UNSET else bytes(found.layout),
    )
    validate_root(root, where)
    return root


def decode_part(data: bytes | bytearray, where: str, ref: PartRef | None = None) -> Part:
    """Check and decode the bytes of a part file, which must be the very one that `ref` describes."""
    if ref is not None and len(data) != ref.nbytes:
        raise CorruptCheckpoint(f"{len(data)} bytes, where the root says {ref.nbytes}", path=where)
    _check_frame(data, where)
    if ref is not None and data[_DIGITS] != ref.xxh3.encode():
        raise CorruptCheckpoint("not the part that the root refers to (digest differs)", path=where)
    found = _decode(_part_decoder, data, where)
    _check_format(found.format, where)
    part = found.part
    if ref is not None and part.rank != ref.rank:
        raise CorruptCheckpoint(f"part of rank {part.rank}, where the root says {ref.rank}", path=where)
    validate_part(part, where)
    return part


_HERE = msgspec.Raw(b"\0")
"""Where leaves are to be put. No JSON has such a byte: in strings it is spelled out."""
_BATCH = 1000


def _encode(record: _RootFile | _PartFile) -> bytearray:
    buffer = bytearray()
    _encoder.encode_into(record, buffer)
    return buffer


def _encode_with(record: _RootFile, leaves: Iterable[Leaf]) -> bytearray:
    """The record with a list of leaves in the place of `_HERE`."""
    pieces = _pieces(record, leaves)
    buffer = bytearray(next(pieces))
    for piece in pieces:
        buffer += piece
    return buffer


def _pieces(record: _RootFile | _PartFile, leaves: Iterable[Leaf]) -> Iterator[bytes | bytearray]:
    """The bytes of a record that has `_HERE` in the place of its leaves, one piece after the other."""
    buffer = _encode(record)
    at = buffer.index(0)
    rest = buffer[at + 1 :]
    del buffer[at:]
    yield buffer
    del buffer
    source = iter(leaves)
    separator = b"["
    while batch := list(islice(source, _BATCH)):
        yield separator
        yield _encoder.encode(batch)[1:-1]
        separator = b","
    yield b"]" if separator == b"," else b"[]"
    yield rest


def _seal(buffer: bytearray) -> bytearray:
    """Pad to the alignment, and put the digest into its place."""
    buffer += b" " * (-(len(buffer) + 1) % ALIGNMENT) + b"\n"
    if len(buffer) > MAX_ROOT_NBYTES:
        raise UnsupportedState(
            f"a manifest of {len(buffer)} bytes exceeds the limit of {MAX_ROOT_NBYTES}: "
            "keep large texts and lists in arrays"
        )
    _check_values(buffer)
    buffer[_DIGITS] = digest(buffer).encode()
    return buffer


def _check_values(buffer: bytes | bytearray) -> None:
    if more_values_than(MAX_NODES, buffer):
        raise UnsupportedState(
            f"the state has more than {MAX_NODES} values beside its arrays: keep large lists in arrays"
        )


def _check_frame(data: bytes | bytearray, where: str) -> None:
    """Size, place of the digest, and the digest itself: before a single byte is parsed."""
    nbytes = len(data)
    if nbytes > MAX_ROOT_NBYTES:
        raise CorruptCheckpoint(f"{nbytes} bytes, more than a manifest may have", path=where)
    if nbytes == 0 or nbytes % ALIGNMENT:
        raise CorruptCheckpoint(f"{nbytes} bytes is not a multiple of {ALIGNMENT}: truncated?", path=where)
    if not data.startswith(_PREFIX):
        raise CorruptCheckpoint("does not begin like a manifest", path=where)
    if _digest(data) != data[_DIGITS]:
        raise CorruptCheckpoint(
            "digest does not match: its bytes are not those that were written", path=where
        )
    if more_values_than(MAX_NODES, data):
        raise CorruptCheckpoint(f"more than {MAX_NODES} JSON values", path=where)


def _digest(data: bytes | bytearray) -> bytes:
    """The digest of the file with zeros for its digits. Changes a bytearray for a moment, without a copy."""
    zeroed = data if type(data) is bytearray else bytearray(data)
    digits = zeroed[_DIGITS]
    zeroed[_DIGITS] = _ZEROS.encode()
    try:
        return digest(zeroed).encode()
    finally:
        zeroed[_DIGITS] = digits


def _decode(decoder: msgspec.json.Decoder[_File], data: bytes | bytearray, where: str) -> _File:
    try:
        found = decoder.decode(data)
        part = msgspec.structs.replace(found.part, leaves=_HERE)
        reject_duplicate_keys(
            data, _pieces(msgspec.structs.replace(found, part=part), found.part.leaves), where
        )
    except CorruptCheckpoint:
        raise
    except RecursionError:
        reject_deep_nesting(data, MAX_JSON_DEPTH, where)
        raise
    except ValueError as error:  # malformed, mistyped, or not UTF-8
        raise CorruptCheckpoint(shorten(error), path=where) from None
    return found


def _check_format(name: str, where: str) -> None:
    if name != FORMAT:
        raise CorruptCheckpoint(
            f"format {name[:40]!r}; this version of Everystep reads {FORMAT!r}. "
            "If a newer version wrote it, read it with that one",
            path=where,
        )


def spell_metrics(metrics: Mapping[str, float]) -> dict[str, float | _NonFinite]:
    """JSON has no infinities and no NaN, and msgspec would write null for them."""
    spelled: dict[str, float | _NonFinite] = {}
    for name, value in metrics.items():
        number = float(value)
        if math.isfinite(number):
            spelled[name] = number
        else:
            spelled[name] = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return spelled
