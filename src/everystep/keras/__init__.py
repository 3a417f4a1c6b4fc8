"""Everystep under Keras 3: `EverystepCallback` for ``fit``, and `Batches`, data in an order of its own.

| module | what it owns |
|---|---|
| `callback` | saving and resuming a ``fit`` |
| `batches` | arrays in batches, in an order that depends on a seed and the epoch |
| `variables` | Keras variables as named arrays |
"""

from __future__ import annotations

from everystep.integrations.versions import require

require("keras", "3.15", "3.16", extra="keras")

from everystep.keras.batches import Batches
from everystep.keras.callback import EverystepCallback
from everystep.keras.variables import load_weights

__all__ = ["Batches", "EverystepCallback", "load_weights"]
