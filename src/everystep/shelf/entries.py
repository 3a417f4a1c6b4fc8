"""Values and arrays to the bytes of an entry, and back onto the mapping.

An entry has one of three kinds. `VALUE`: a value without arrays, as JSON in the directory. `ARRAY`: one
array; its bytes are the entry's data. `PACKED`: a large value, or a container with arrays: the data are the
JSON tree and then the arrays. The trees are those of checkpoints (`everystep.state`), and so are the names of
element types. Files may be hostile: whatever is wrong with one is a `CorruptCheckpoint`, or `Malformed`.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from everystep import engine
from everystep.engine import Memory, WritePiece
from everystep.errors import UnsupportedState
from everystep.format import dtypes
from everystep.state import numpy_arrays, torch_arrays
from everystep.state.flatten import flatten
from everystep.state.numpy_arrays import Array
from everystep.state.unflatten import unflatten

if TYPE_CHECKING:
    from everystep.state.leaves import LeafSource

VALUE: Final = 0
ARRAY: Final = 1
PACKED: Final = 2

_INLINE_NBYTES: Final = 512
"""Larger values are data: each change of an entry writes its whole directory node again."""
_ALIGNMENT: Final = 64
MAX_DIMENSIONS: Final = 64


MAX_NAME_NBYTES = 1024


def to_key(name: str) -> bytes:
    if type(name) is not str:
        raise TypeError(f"the names of a shelf are text, not {type(name).__name__}")
    try:
        key = name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} cannot be a name: it is not text") from None
    if not 0 < len(key) <= MAX_NAME_NBYTES:
        raise ValueError(f"a name has 1 to {MAX_NAME_NBYTES} bytes, not {len(key)}")
    return key


def require_attribute(name: str, reserved: frozenset[str]) -> None:
    if name.startswith("_") or name in reserved:
        raise AttributeError(f"{name!r} is not a name for attribute access: use shelf[{name!r}]")


class Malformed(Exception):
    """The description of an entry is not one that this module writes."""


class ArrayMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One array: logical element type, shape, and the library that it came from."""

    dtype: str
    shape: tuple[int, ...]
    framework: str = "numpy"

    @property
    def nbytes(self) -> int:
        return dtypes.itemsize(self.dtype) * math.prod(self.shape)


class PackedLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An array in the data of a packed entry."""

    name: str
    array: ArrayMeta
    offset: int


class PackedMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    tree_nbytes: int
    leaves: tuple[PackedLeaf, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an entry holds. `data` is bytes, or memory in place."""

    kind: int
    meta: bytes
    data: bytes | Memory


_json = msgspec.json.Encoder()
_read_array_meta = msgspec.json.Decoder(ArrayMeta)
_read_packed_meta = msgspec.json.Decoder(PackedMeta)
_read_tree = msgspec.json.Decoder()
_metas: dict[tuple[Any, tuple[int, ...]], bytes] = {}
_MOST_METAS: Final = 1000
_NOTHING: Final = b""


def numpy_meta(array: Array) -> bytes:
    """The description of a numpy array."""
    key = array.dtype, array.shape
    meta = _metas.get(key)
    if meta is None:
        name = numpy_arrays.logical_name(array.dtype)
        if name is None:
            raise UnsupportedState(
                f"a shelf stores arrays of plain element types, not of {array.dtype}: "
                "store its fields, or convert it"
            )
        meta = _json.encode(ArrayMeta(name, array.shape))
        if len(_metas) < _MOST_METAS:
            _metas[key] = meta
    return meta


def encode(value: object) -> Encoded:
    """The entry of any value that is stored. `UnsupportedState` names what cannot be."""
    flat = flatten(value)
    tree: Any = flat.tree
    if flat.local:
        raise UnsupportedState("a shelf has no ranks: `per_rank` has no meaning in it")
    for leaf in flat.leaves:
        if leaf.shape != leaf.whole_shape:
            raise UnsupportedState(
                f"{leaf.name}: a shelf stores whole arrays, and this one lies in parts on several devices or "
                "ranks. Store a copy that is joined, such as numpy.asarray(array) of a jax.Array"
            )
    if len(flat.leaves) == 1 and tree == {"$leaf": flat.leaves[0].name} and not flat.aliases:
        leaf = flat.leaves[0]
        meta = _json.encode(ArrayMeta(leaf.dtype, leaf.shape, leaf.framework))
        source = leaf.source
        data = (
            source if isinstance(source, Memory) else engine.pack([WritePiece(0, source)], leaf.nbytes).data
        )
        return Encoded(ARRAY, meta, data)
    text = _json.encode(tree)
    if not flat.leaves and len(text) <= _INLINE_NBYTES:
        return Encoded(VALUE, text, _NOTHING)
    placed, end = _place(flat.leaves, len(text))
    pieces = [WritePiece(0, _memory_of(text))]
    pieces += [WritePiece(at.offset, leaf.source) for at, leaf in zip(placed, flat.leaves, strict=True)]
    meta = _json.encode(PackedMeta(len(text), tuple(placed), flat.aliases))
    return Encoded(PACKED, meta, engine.pack([piece for piece in pieces if piece.source.nbytes], end).data)


def _place(leaves: tuple[LeafSource, ...], end: int) -> tuple[list[PackedLeaf], int]:
    placed = []
    for leaf in leaves:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        placed.append(PackedLeaf(leaf.name, ArrayMeta(leaf.dtype, leaf.shape, leaf.framework), offset))
        end = offset + leaf.nbytes
    return placed, end


def _memory_of(data: bytes) -> Memory:
    return Memory(np.frombuffer(data, np.uint8).ctypes.data, len(data), data)


def scalar_text(value: object) -> bytes | None:
    """The JSON of a short, plain value; None for all others. What commits in a loop mostly store."""
    kind = type(value)
    if kind is int and -(2**53) <= value <= 2**53:  # type: ignore[operator]
        return str(value).encode()
    if kind is float and value - value == 0:  # type: ignore[operator]
        return repr(value).encode()
    return None


# --- back ---------------------------------------------------------------------------------------------------


def array_meta(meta: bytes, nbytes: int) -> ArrayMeta:
    """The description of an array, which fits the data that it has."""
    try:
        found = _read_array_meta.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"its description cannot be read: {error}") from None
    _check(found, nbytes)
    return found


def _check(found: ArrayMeta, nbytes: int) -> None:
    if not dtypes.is_known(found.dtype) or found.framework not in ("numpy", "torch"):
        raise Malformed(f"it has an unknown element type: {found.dtype[:40]!r} of {found.framework[:40]!r}")
    if len(found.shape) > MAX_DIMENSIONS or any(size < 0 for size in found.shape):
        raise Malformed("its shape is impossible")
    if dtypes.is_beyond_arrays(found.dtype, found.shape) or found.nbytes != nbytes:
        raise Malformed(f"its shape and element type do not fit its {nbytes} bytes")


def decode_value(meta: bytes) -> object:
    return unflatten(_tree(meta), {})


def _tree(text: bytes) -> Any:
    try:
        return _read_tree.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"its tree cannot be read: {error}") from None


def decode_array(found: ArrayMeta, data: Array) -> Array | Any:
    """An array on its bytes: read-only for numpy; a tensor for torch."""
    if found.framework == "torch":
        return _tensor_on(data, found)
    return numpy_on(data, found)


def _tensor_on(data: Array, found: ArrayMeta) -> Any:
    torch = torch_arrays.load_torch()
    kind = torch_arrays.torch_dtype(found.dtype)
    if not data.size:
        return torch.empty(found.shape, dtype=kind)
    return torch.from_numpy(data).view(kind).reshape(found.shape)


def numpy_on(data: Array, found: ArrayMeta) -> Array:
    """A numpy array on bytes."""
    kind = numpy_arrays.numpy_dtype(found.dtype)
    if not data.size:  # also elements of no bytes, of which no view can be made
        empty: Array = np.empty(found.shape, kind)
        empty.flags.writeable = False
        return empty
    return data.view(kind).reshape(found.shape)


def packed_meta(meta: bytes, nbytes: int) -> PackedMeta:
    try:
        found = _read_packed_meta.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"its description cannot be read: {error}") from None
    if not 0 <= found.tree_nbytes <= nbytes:
        raise Malformed("its tree lies outside of its data")
    end = found.tree_nbytes
    for leaf in found.leaves:
        if not end <= leaf.offset <= nbytes:
            raise Malformed("its arrays lie outside of its data")
        if not dtypes.is_known(leaf.array.dtype) or any(size < 0 for size in leaf.array.shape):
            raise Malformed("one of its arrays is impossible")
        if dtypes.is_beyond_arrays(leaf.array.dtype, leaf.array.shape):
            raise Malformed("one of its arrays is impossible")
        _check(leaf.array, leaf.array.nbytes)
        end = leaf.offset + leaf.array.nbytes
    if end > nbytes:
        raise Malformed("its arrays lie outside of its data")
    return found


def decode_packed(meta: bytes, data: Array, own: Callable[[], Array]) -> object:
    """`own` gives the same bytes where tensors may lie."""
    found = packed_meta(meta, data.size)
    arrays: dict[str, Any] = {}
    tensors = own() if any(leaf.array.framework == "torch" for leaf in found.leaves) else data
    for leaf in found.leaves:
        held = tensors if leaf.array.framework == "torch" else data
        arrays[leaf.name] = decode_array(leaf.array, held[leaf.offset : leaf.offset + leaf.array.nbytes])
    for alias, name in found.aliases:
        if name not in arrays:
            raise Malformed("one of its names leads nowhere")
        arrays[alias] = arrays[name]
    return unflatten(_tree(data[: found.tree_nbytes].tobytes()), arrays)


def copy_of(array: Any) -> Any:
    """A copy that may be changed, of a numpy array or a tensor: a parameter stays one."""
    if isinstance(array, np.ndarray):
        return np.array(array, order="C", copy=True)
    return copy.deepcopy(array)


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def encode_tree(values: dict[str, Any], names: Sequence[str]) -> str:
    """The JSON tree of values. `names` are those of the arrays in it, as references, in the tree's order."""
    flat = flatten(values)
    references = dict(zip((leaf.name for leaf in flat.leaves), names, strict=True))
    references |= {alias: references[name] for alias, name in flat.aliases}
    return _json.encode(_renamed(flat.tree, references)).decode()


def _renamed(node: Any, references: dict[str, str]) -> Any:
    if isinstance(node, list):
        return [_renamed(item, references) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: references[item] if key == "$leaf" else _renamed(item, references) for key, item in node.items()
    }
