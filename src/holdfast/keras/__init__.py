"""Holdfast under Keras 3: `HoldfastCallback` for ``fit``, and `Batches`, data in an order of its own.

| module | what it owns |
|---|---|
| `callback` | saving and resuming a ``fit`` |
| `batches` | arrays in batches, in an order that depends on a seed and the epoch |
| `variables` | Keras variables as named arrays |
"""

from __future__ import annotations

from holdfast.integrations.versions import require

require("keras", "3.15", "3.16", extra="keras")

from holdfast.keras.batches import Batches
from holdfast.keras.callback import HoldfastCallback
from holdfast.keras.variables import load_weights

__all__ = ["Batches", "HoldfastCallback", "load_weights"]
