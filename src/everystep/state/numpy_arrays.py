"""Numpy's side of leaves: which element type an array has, where its bytes lie, and fresh arrays to fill.

Owns the mapping between logical type names (`everystep.format.dtypes`) and numpy dtypes. Torch's side is
`torch_arrays`; `arrays` chooses between the two. Numpy has bfloat16 and the 8-bit floats only where
``ml_dtypes`` is installed. It is imported when such an array is first needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from everystep.engine import array_memory, fresh_bytes
from everystep.engine.buffers import Memory, Produced, Strided
from everystep.errors import MutatedDuringSave, UnsupportedState
from everystep.format import dtypes

Array = np.ndarray[Any, np.dtype[Any]]

PAGE: Final = 4096
ENGINE_FROM_NBYTES = 4 << 20
"""From here on huge pages matter, and whether they come cheaply is the engine's to find out."""
ALIGNED_FROM_NBYTES: Final = 64 * 1024
"""Smaller arrays pass through staging anyway, so their address does not matter."""

NATIVE: Final[dict[str, str]] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
    "C128": "<c16",
}
"""Logical name -> numpy's own code, for the types numpy has."""

ML_DTYPES: Final[dict[str, str]] = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Logical name -> its name in ml_dtypes."""

_CODES: Final = frozenset(NATIVE.values())
_NAMES: Final[dict[Any, str]] = {np.dtype(code): name for name, code in NATIVE.items()}
_FROM_ML: Final = {ml_name: name for name, ml_name in ML_DTYPES.items()}

SCALAR_TYPES: Final = frozenset(np.dtype(char).type for char in "?bBhHiIlLqQefdgFDGmMV")
_LONG_LONG: Final = frozenset("qQlLiI")
"""C types of equal size whose scalars are of different Python types; told apart by their character."""


# --- names of element types ---------------------------------------------------------------------------------


def logical_name(dtype: np.dtype[Any]) -> str | None:
    """Logical name of a numpy dtype, None for one that cannot be stored."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _derive_name(dtype)
        if name is not None and len(_NAMES) < 1000:  # text types come in as many widths as there are texts
            _NAMES[dtype] = name
    return name


def _derive_name(dtype: np.dtype[Any]) -> str | None:
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        return None
    if _is_ml(dtype):
        return _FROM_ML.get(dtype.name)
    name = f"NP:{dtype.str}"
    return name if dtypes.is_known(name) else None


def _is_ml(dtype: np.dtype[Any]) -> bool:
    return getattr(dtype.type, "__module__", "") == "ml_dtypes"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a logical name; `UnsupportedState` where numpy has none."""
    code = NATIVE.get(name)
    if code is not None:
        return np.dtype(code)
    if name in ML_DTYPES:
        return _ml_dtype(name)
    if name.startswith("NP:") and dtypes.is_known(name):
        return _platform_dtype(name[3:])
    refuse_opaque(name)
    raise UnsupportedState(f"numpy has no element type for {name[:60]!r}; read it with framework='torch'")


def refuse_opaque(name: str) -> None:
    """`UnsupportedState` for a type that no library has arrays of."""
    found = dtypes.opaque(name)
    if found is not None:
        raise UnsupportedState(
            f"there are no arrays of the element type {found[0]!r}. select= reads the other leaves; "
            "export and convert copy this one into another safetensors file as it is"
        )


def _platform_dtype(code: str) -> np.dtype[Any]:
    try:
        return np.dtype(code)
    except TypeError as error:  # long double: 80 bits here, 128 or none elsewhere
        raise UnsupportedState(f"numpy on this machine has no element type {code!r}") from error


def _ml_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedState(
            f"numpy has no element type for {name} by itself: pip install ml_dtypes, "
            "or read it with framework='torch'"
        ) from error
    kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, ML_DTYPES[name]))
    return kind


def dtype_code(dtype: np.dtype[Any]) -> str | None:
    """Text from which `coded_dtype` makes an equal dtype; None for structured and other rare ones."""
    if _is_ml(dtype):
        return str(dtype.name) if dtype.name in _FROM_ML else None
    if dtype.char == "O":
        return "|O"
    if dtype.metadata is not None or logical_name(dtype) is None:
        return None
    if dtype.char in _LONG_LONG and np.dtype(dtype.str).char != dtype.char:
        return str(dtype.char)
    code: str = dtype.str
    return code


def coded_dtype(code: str) -> np.dtype[Any] | None:
    """The dtype that `dtype_code` wrote as `code`; None for any other text."""
    if code == "|O":
        return np.dtype(object)
    if code in _FROM_ML:
        return _ml_dtype(_FROM_ML[code])
    if code in _LONG_LONG or code in _CODES or dtypes.is_known(f"NP:{code}"):
        return _platform_dtype(code)
    return None


def scalar_code(dtype: np.dtype[Any], kind: type) -> str | None:
    """As `dtype_code`, for scalars of exactly the type `kind`."""
    code = dtype_code(dtype)
    if code is None or dtype.hasobject or dtype.type is not kind or dtype.itemsize == 0:
        return None
    return code


def scalar_dtype(code: str) -> np.dtype[Any] | None:
    """The dtype of a scalar stored under `code`; None for what has no scalars of its own."""
    if code == "|O" or code in _FROM_ML or (len(code) > 1 and code[1] in "SU"):
        return None
    found = coded_dtype(code)
    return found if found is not None and found.itemsize > 0 else None


# --- where bytes lie ----------------------------------------------------------------------------------------


def source(array: Array) -> Memory | Strided:
    """The bytes of an array, in place."""
    address, contiguous = array_memory(array)
    nbytes = array.nbytes
    if contiguous or not nbytes:  # elements of no bytes lie nowhere, whatever their strides
        return Memory(address, nbytes, array)
    return Strided(address, array.itemsize, array.shape, array.strides, array)


def bytes_source(value: bytes | bytearray, place: str) -> Memory | Produced:
    """The bytes of an object. What can grow is copied window by window: held, it could not."""
    nbytes = len(value)
    if type(value) is bytes:
        return Memory(np.frombuffer(value, np.uint8).ctypes.data, nbytes, value)

    def fill(window: memoryview, offset: int) -> None:
        if len(value) != nbytes:
            raise MutatedDuringSave(
                f"the bytearray at {place!r} had {nbytes} bytes when the save began, now {len(value)}. "
                "Nothing was stored, earlier checkpoints are untouched. Change it between saves only",
                leaves=[place],
            )
        with memoryview(value) as data:
            window[:] = data[offset : offset + len(window)]

    return Produced(nbytes, fill, value)


def destination(array: Array) -> Memory | Strided | None:
    """The memory to read an array's bytes into; None if it cannot be written in place."""
    if not array.flags.writeable or overlaps_itself(array.shape, array.strides):
        return None
    return source(array)


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two elements may share memory (expanded arrays, sliding windows). Errs on the side of yes."""
    if 0 in shape:
        return False  # of nothing, whatever the steps: numpy makes them zero
    reach = 0
    for step, size in sorted(
        (abs(step), size) for step, size in zip(strides, shape, strict=True) if size > 1
    ):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


# --- fresh arrays -------------------------------------------------------------------------------------------


def empty(dtype: str, shape: tuple[int, ...], address_residue: int) -> tuple[Array, Memory]:
    """`arrays.empty` for numpy."""
    kind = numpy_dtype(dtype)
    nbytes = kind.itemsize * math.prod(shape)
    if nbytes < ALIGNED_FROM_NBYTES:
        array: Array = np.empty(shape, kind)
    else:
        array = aligned_bytes(nbytes, address_residue, kind.alignment).view(kind).reshape(shape)
    return array, Memory(array_memory(array)[0], nbytes, array)


def small_maker(dtype: str) -> Callable[[tuple[int, ...]], Array]:
    """Makes uninitialised arrays of one type, from their shape. Their address may be any."""
    return partial(np.empty, dtype=numpy_dtype(dtype))


def aligned_bytes(nbytes: int, address_residue: int, alignment: int) -> Array:
    """`nbytes` fresh bytes at an address congruent to the residue."""
    if address_residue % alignment:
        address_residue = 0
    if nbytes >= ENGINE_FROM_NBYTES:
        return fresh_bytes(nbytes, address_residue)
    base: Array = np.empty(nbytes + PAGE, np.uint8)
    skip = (address_residue - base.ctypes.data) % PAGE
    return base[skip : skip + nbytes]
