"""numpy scalars and arrays in pickles: made of their bytes, never of objects.

Owns what numpy's names in a pickle mean. numpy is imported when a pickle has an array.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.universal.pickle_machine import Maker

if TYPE_CHECKING:
    import numpy as np

_CODE = re.compile(r"[<>|=]?(?:[biufc]\d{1,2}|[SUV]\d{1,9}|[mM]8)", re.ASCII)


class NumpyType:
    """A numpy dtype as a pickle makes it: a code, and then its byte order."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or _CODE.fullmatch(code) is None:
            raise ValueError(f"numpy type {code!r} is not one of numbers, times or text")
        self._code = code.lstrip("<>|=")
        self._order = "|"

    def set_pickle_state(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("a numpy type of an unknown form")
        if any(one is not None for one in state[2:5]):
            raise ValueError("structured numpy types are not known")
        self._order = state[1]

    def made(self) -> np.dtype[Any]:
        import numpy as np

        return np.dtype(self._order.replace("|", "=") + self._code)


class NumpyArray:
    """A numpy array as a pickle makes it: empty at first, then filled."""

    def __init__(self, *_: object) -> None:
        self._array: np.ndarray[Any, Any] | None = None

    def set_pickle_state(self, state: object) -> None:
        import numpy as np

        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("a numpy array of an unknown form")
        _, shape, kind, fortran, data = state
        if not isinstance(kind, NumpyType) or not isinstance(data, (bytes, bytearray)):
            raise ValueError("a numpy array of objects")
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("a numpy array of an impossible shape")
        dtype = kind.made()
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("a numpy array whose bytes and shape do not fit")
        self._array = np.frombuffer(bytes(data), dtype).reshape(shape, order="F" if fortran else "C")

    @property
    def array(self) -> np.ndarray[Any, Any]:
        if self._array is None:
            raise ValueError("a numpy array without its elements")
        return self._array


def _from_buffer(data: object, kind: object, shape: object, order: object, *rest: object) -> NumpyArray:
    """How protocol 5 writes arrays."""
    if order not in ("C", "F") or any(one is not None for one in rest):
        raise ValueError("a numpy array in an unknown order")
    made = NumpyArray()
    made.set_pickle_state((1, shape, kind, order == "F", data))
    return made


def _scalar(kind: object, data: object) -> Any:
    import numpy as np

    if not isinstance(kind, NumpyType) or not isinstance(data, bytes):
        raise ValueError("a numpy scalar of an unknown form")
    dtype = kind.made()
    if len(data) != dtype.itemsize:
        raise ValueError("a numpy scalar whose bytes do not fit its type")
    return np.frombuffer(data, dtype)[0].item()


def _not_called(*args: object) -> object:
    raise TypeError("numpy.ndarray is not made by calling it")


NUMPY_MAKERS: Mapping[str, Maker] = {
    "numpy.dtype": NumpyType,
    "numpy.ndarray": _not_called,
    **{f"numpy.{core}.multiarray._reconstruct": NumpyArray for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
