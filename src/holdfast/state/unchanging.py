"""Arrays whose memory nobody changes any more: snapshots that a framework itself gives out.

TensorFlow and JAX put new values into new memory while somebody still reads the old ones. An integration that
hands out such memory as numpy arrays says so here, and saves read it in place, without a copy of their own.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

_known: dict[int, weakref.ref[Any]] = {}


def unchanging(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A read-only view of the array, whose memory must not change while the view exists. Returns the view."""
    view: np.ndarray[Any, Any] = array.view()
    view.flags.writeable = False
    key = id(view)
    _known[key] = weakref.ref(view, lambda _: _known.pop(key, None))
    return view


def is_unchanging(array: object) -> bool:
    """Whether this very object came from `unchanging`."""
    found = _known.get(id(array))
    return found is not None and found() is array
