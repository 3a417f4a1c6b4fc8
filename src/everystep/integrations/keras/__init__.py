"""Everystep under Keras 3: `EverystepCallback` for ``fit``, and `Batches`, data in an order of its own.

| module | what it owns |
|---|---|
| `callback` | saving and resuming a ``fit`` |
| `batches` | arrays in batches, in an order that depends on a seed and the epoch |
| `variables` | Keras variables as named arrays |
| `names` | names of variables that are the same in every process; without Keras |

Names, and Keras, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everystep.integrations.shared.frameworks import names_on_first_use, require

if TYPE_CHECKING:
    from everystep.integrations.keras.batches import Batches as Batches
    from everystep.integrations.keras.callback import EverystepCallback as EverystepCallback
    from everystep.integrations.keras.variables import load_weights as load_weights

_HOME_OF = {"Batches": "batches", "EverystepCallback": "callback", "load_weights": "variables"}
__all__ = sorted(_HOME_OF)
__getattr__ = names_on_first_use(__name__, _HOME_OF, lambda: require("keras", "3.15", "3.16", extra="keras"))
