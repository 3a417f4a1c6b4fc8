"""numpy's types, scalars and arrays in pickles: made of their bytes, never of objects.

Owns what numpy's names in a pickle mean. Every argument is compared with what numpy writes for such a value
before numpy itself makes it, so the result is what `pickle.load` gives.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from everystep.universal.torch_file.pickle_machine import ClassName, Maker, Refused, Setter

_CODE = re.compile(r"(?:[biufc]\d{1,2}|[SUV]\d{1,9}|[mM]8|O8|O)", re.ASCII)
_UNIT = re.compile(rb"(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)")
_make_scalar: Any = np.float32(0).__reduce__()[0]


def _dtype(code: object, align: object, copy: object) -> np.dtype[Any]:
    """A type of its own: `_set_dtype` gives it the byte order."""
    if isinstance(code, ClassName):
        raise Refused(f"numpy type {code.text!r} is not known")
    if not isinstance(code, str) or _CODE.fullmatch(code) is None or align or not copy:
        raise Refused(f"numpy type {code!r} is not one of numbers, times or text")
    return np.dtype(code, False, True)


def _set_dtype(dtype: np.dtype[Any], state: object) -> None:
    if not isinstance(state, tuple) or len(state) not in (8, 9) or state[1] not in ("<", ">", "|"):
        raise ValueError("a numpy type of an unknown form")
    if any(one is not None for one in state[2:5]):
        raise Refused("a structured numpy type")
    code = dtype.str[1:]
    if len(state) == 9:
        code = dtype.char + "8" + _unit(state[8])
    expected: Any = np.dtype(state[1].replace("|", "") + code).__reduce__()[2]
    if state[1:8] != expected[1:8] or (len(state) == 9) != (len(expected) == 9):
        raise ValueError("a numpy type of an unknown form")
    dtype.__setstate__(expected)  # type: ignore[attr-defined]


def _unit(extra: object) -> str:
    """The unit of a time, from the last item of its type's state: metadata, and the unit in parts."""
    if not isinstance(extra, tuple) or len(extra) != 2 or not isinstance(extra[1], tuple):
        raise Refused("a numpy type with metadata")
    if extra[0]:
        raise Refused("a numpy type with metadata")
    unit, count, *rest = extra[1]
    if unit == b"generic":
        return ""
    if not isinstance(unit, bytes) or _UNIT.fullmatch(unit) is None or rest != [1, 1]:
        raise ValueError("a numpy time of an unknown unit")
    if type(count) is not int or not 0 < count < 2**31:
        raise ValueError("a numpy time of an unknown unit")
    return f"[{count}{unit.decode()}]"


def _scalar(dtype: object, data: object) -> np.generic:
    if not isinstance(dtype, np.dtype):
        raise ValueError("a numpy scalar without a type")
    if dtype.hasobject:
        raise Refused("a numpy scalar of a Python object")
    if not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise ValueError("a numpy scalar whose bytes do not fit its type")
    made: np.generic = _make_scalar(dtype, data)
    return made


def _reconstruct(kind: object, shape: object, code: object) -> np.ndarray[Any, Any]:
    """An array to be filled by `_set_array`."""
    if not isinstance(kind, ClassName) or kind.text != "numpy.ndarray" or shape != (0,) or code != b"b":
        raise ValueError("a numpy array of an unknown form")
    return np.empty(0, np.int8)


def _set_array(array: np.ndarray[Any, Any], state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1:
        raise ValueError("a numpy array of an unknown form")
    _, shape, dtype, fortran, data = state
    _check_array(dtype, shape, data)
    state = (1, shape, dtype, bool(fortran), bytes(data))
    array.__setstate__(state)


def _from_buffer(
    data: object, dtype: object, shape: object, order: object, axes: object = None
) -> np.ndarray[Any, Any]:
    """How protocol 5 writes arrays."""
    _check_array(dtype, shape, data)
    array = np.frombuffer(data, dtype)  # type: ignore[call-overload]
    if order == "K" and axes is not None:
        if not isinstance(axes, tuple) or sorted(axes) != list(range(len(axes))):
            raise ValueError("a numpy array in an unknown order")
        return array.reshape(shape, order="C").transpose(axes)  # type: ignore[no-any-return]
    if order not in ("C", "F") or axes is not None:
        raise ValueError("a numpy array in an unknown order")
    return array.reshape(shape, order=order)  # type: ignore[no-any-return]


def _check_array(dtype: object, shape: object, data: object) -> None:
    if not isinstance(dtype, np.dtype):
        raise ValueError("a numpy array without a type")
    if dtype.hasobject:
        raise Refused("a numpy array of Python objects")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a numpy array of an impossible shape")
    if not isinstance(data, (bytes, bytearray)) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("a numpy array whose bytes and shape do not fit")


def _not_called(*args: object) -> object:
    raise TypeError("numpy.ndarray is not made by calling it")


NUMPY_MAKERS: dict[str, Maker] = {
    "numpy.dtype": _dtype,
    "numpy.ndarray": _not_called,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
NUMPY_SETTERS: dict[type, Setter] = {np.dtype: _set_dtype, np.ndarray: _set_array}
