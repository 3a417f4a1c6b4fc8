"""What makes two fits the same fit: their data, sample weights and parameters, as short texts.

Data is described by its XXH3 checksum, type and shape. Parameters are described by their values, so that a
refusal can name what differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from everystep.engine import xxh3_64

WITHOUT_EFFECT = frozenset({"shelf", "verbose", "verbose_interval", "copy_x", "n_jobs"})
"""Parameters that do not change what a fit finds."""


def of_text(text: str) -> str:
    return f"{xxh3_64(text.encode()):016x}"


def of_identity(identity: Mapping[str, str]) -> str:
    """Sixteen hexadecimal digits for a fit."""
    return of_text(json.dumps(sorted(identity.items())))


def describe(data: Any) -> str:
    """Type, shape and checksum of an array or sparse matrix: ``float64 70000x784 4f0c…``; none for None."""
    if data is None:
        return "none"
    if sparse.issparse(data):
        rows = data.tocsr()
        parts = " ".join(describe(part) for part in (rows.data, rows.indices, rows.indptr))
        return f"sparse {_shape(rows)} {rows.dtype} {of_text(parts)}"
    array = np.asarray(data)
    if array.dtype.hasobject:
        return f"{array.dtype} {_shape(array)} {of_text(repr(array.tolist()))}"
    return f"{array.dtype} {_shape(array)} {_checksum(np.ascontiguousarray(array))}"


def of_parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that decide what a fit finds, each as text."""
    return {
        name: _parameter(value) for name, value in sorted(parameters.items()) if name not in WITHOUT_EFFECT
    }


def _parameter(value: Any) -> str:
    if isinstance(value, np.random.RandomState):
        kind, key, *rest = value.get_state(legacy=True)
        return f"{kind} {describe(key)} {rest}"
    if isinstance(value, np.ndarray) or sparse.issparse(value):
        return describe(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_parameter, value))}]"
    if isinstance(value, np.generic):
        return repr(value.item())
    if callable(value):  # there is no telling whether two functions do the same; their names must do
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)


def _shape(array: Any) -> str:
    return "x".join(map(str, array.shape)) or "scalar"


def _checksum(array: np.ndarray[Any, Any]) -> str:
    """The checksum of all bytes. Memory limits it: on two cores, several threads took longer than one."""
    return f"{xxh3_64(memoryview(array.reshape(-1).view(np.uint8).data)):016x}"
