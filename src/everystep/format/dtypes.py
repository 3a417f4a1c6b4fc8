"""Names of element types in manifests and shards, their size in bytes, and how shards carry them.

Owns names only. The mapping between these names and numpy or torch dtypes belongs to `everystep.state`;
nothing here needs either library, so a manifest is validated the same way on every platform.

A *logical* name says what an array is. Where safetensors can name the type, the logical name is that name
and the shard uses it directly. Otherwise the shard holds the same bytes under a *carrier*: a type
safetensors can name, with trailing dimensions added to the shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from everystep.format.records import MAX_INT

SAFETENSORS_ITEMSIZE = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
        "F8_E8M0": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
        "C64": 8,
    }
)
"""Every type name a shard header may use, with its size in bytes."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """How a shard stores a logical type: entry dtype `name`, entry shape = leaf shape + `tail`."""

    name: str
    tail: tuple[int, ...]


_EXTENDED = MappingProxyType(
    {
        "C128": (16, Carrier("F64", (2,))),
        "C32": (4, Carrier("F16", (2,))),
        "F4_E2M1_X2": (1, Carrier("U8", ())),
    }
)

_BITS = MappingProxyType({"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6})
"""What safetensors files of others may have, and no array: several elements in a byte, or in three."""
_OPAQUE = re.compile(r"ST:([A-Za-z0-9_.-]{1,40})\[((?:\d+(?:,\d+)*)?)\]", re.ASCII)

_NUMPY_PREFIX = "NP:"
_MAX_NUMPY_NAME = 40
_MAX_NUMPY_ITEMSIZE = 2**31 - 1  # numpy itself allows no more

# The canonical spellings of numpy's `dtype.str`, minus objects, structures and what has a name of its own.
_NUMPY_NUMBER = re.compile(r"([<>])(?:([iu])([248])|(f)(2|4|8|12|16)|(c)(8|16|24|32))", re.ASCII)
_NUMPY_TIME = re.compile(r"[<>][mM]8(?:\[(?:[1-9]\d{0,9})?(?:[YMWDhms]|ms|us|ns|ps|fs|as)\])?", re.ASCII)
_NUMPY_BYTES = re.compile(r"\|[SV](0|[1-9]\d{0,9})", re.ASCII)
_NUMPY_TEXT = re.compile(r"[<>]U(0|[1-9]\d{0,9})", re.ASCII)
_NAMED_ELSEWHERE = frozenset({"<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"})


@lru_cache(maxsize=512)
def _numpy_itemsize(code: str) -> int | None:
    """Size of one element of a numpy type code, or None when the code is not one we write."""
    if len(code) > _MAX_NUMPY_NAME or code in _NAMED_ELSEWHERE:
        return None
    size: int
    if match := _NUMPY_NUMBER.fullmatch(code):
        size = int(match[3] or match[5] or match[7])
    elif _NUMPY_TIME.fullmatch(code):
        size = 8
    elif match := _NUMPY_BYTES.fullmatch(code):
        size = int(match[1])
    elif match := _NUMPY_TEXT.fullmatch(code):
        size = 4 * int(match[1])
    else:
        return None
    return size if size <= _MAX_NUMPY_ITEMSIZE else None


_PLAIN: dict[str, tuple[int, Carrier]] = {
    name: (size, Carrier(name, ())) for name, size in SAFETENSORS_ITEMSIZE.items()
}


def _lookup(name: str) -> tuple[int, Carrier] | None:
    plain = _PLAIN.get(name)
    if plain is not None:
        return plain
    extended = _EXTENDED.get(name)
    if extended is not None:
        return extended
    if name.startswith(_NUMPY_PREFIX):
        size = _numpy_itemsize(name[len(_NUMPY_PREFIX) :])
        if size is not None:
            return size, Carrier("U8", (size,))
    return None


def is_known(name: str) -> bool:
    """Whether `name` is a logical type this version can store."""
    return _lookup(name) is not None


def itemsize(name: str) -> int:
    """Bytes per element of a logical type. `ValueError` for an unknown name."""
    found = _lookup(name)
    if found is None:
        if opaque(name) is not None:
            return 1
        raise ValueError(f"unknown element type {name[:80]!r}")
    return found[0]


def of_entry(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]] | None:
    """The logical type and shape of an entry of a safetensors file; None if its bytes are not what they take.

    What no array has (`F6_E2M3`, types of tomorrow) becomes an array of bytes of an *opaque* type, whose name
    says what they are. No manifest has such a type.
    """
    size = SAFETENSORS_ITEMSIZE.get(dtype)
    if size is not None:
        fits = not is_beyond_arrays(dtype, shape) and nbytes == size * math.prod(shape)
        return (dtype, shape) if fits else None
    bits = _BITS.get(dtype)
    if bits is not None and 8 * nbytes != bits * math.prod(shape):
        return None
    if dtype == "F4" and shape and shape[-1] % 2 == 0 and not is_beyond_arrays("U8", shape):
        return "F4_E2M1_X2", (*shape[:-1], shape[-1] // 2)  # as torch has it
    name = f"ST:{dtype}[{','.join(map(str, shape))}]"
    return (name, (nbytes,)) if opaque(name) is not None else None


def as_entry(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The type and shape of an entry of a safetensors file for others, which is not read by its carriers."""
    found = opaque(dtype)
    if found is not None:
        return found
    if dtype == "F4_E2M1_X2" and shape:
        return "F4", (*shape[:-1], 2 * shape[-1])
    carried = carrier(dtype)
    return carried.name, (*shape, *carried.tail)


def opaque(name: str) -> tuple[str, tuple[int, ...]] | None:
    """The type and shape that safetensors gives what no array can be; None for other types."""
    found = _OPAQUE.fullmatch(name) if name.startswith("ST:") else None
    return None if found is None else (found[1], tuple(map(int, filter(None, found[2].split(",")))))


def carrier(name: str) -> Carrier:
    """The safetensors type and trailing dimensions under which a shard holds a logical type."""
    found = _lookup(name)
    if found is None:
        raise ValueError(f"unknown element type {name[:80]!r}")
    return found[1]


def is_beyond_arrays(name: str, shape: Iterable[int]) -> bool:
    """Whether an array of this logical type and shape takes more bytes than any address can count.

    Zeros are left out, also an element's size of zero: numpy makes no empty array whose other dimensions are
    beyond all memory.
    """
    return max(itemsize(name), 1) * math.prod([n for n in shape if n]) > MAX_INT
