"""Variables of Keras as named arrays, read in place where the backend allows it.

Relies on private names of Keras for its global ``SeedGenerator``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from everystep.integrations.keras.names import named
from everystep.integrations.shared.states import require_fit
from everystep.state.boxed import unchanging
from everystep.store import load


class Variables:
    """Variables of Keras as arrays. `named` finds them by name at each save, since some are made late."""

    def __init__(self, named: Callable[[], Mapping[str, Any]]) -> None:
        self._named = named

    def arrays(self) -> dict[str, Any]:
        """Read-only arrays, or tensors of torch: what restored ones are compared with."""
        return {name: _array(variable.value) for name, variable in self._named().items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: _stored(array) for name, array in self.arrays().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        named = self._named()
        saved, own = ({name: each.shape for name, each in side.items()} for side in (state, named))
        require_fit(saved, own)
        for name, variable in named.items():
            variable.assign(state[name])


def _array(value: Any) -> Any:
    """The value of a variable, in place."""
    backend = keras.backend.backend()
    if backend == "torch":
        return value.detach()
    return np.asarray(value.read_value() if backend == "tensorflow" else value)


def _stored(array: Any) -> Any:
    """TensorFlow and JAX put the next value elsewhere while the array is in use. Torch does not."""
    return unchanging(array) if isinstance(array, np.ndarray) else array


class GlobalSeed:
    """The state of the generator that Keras uses where none is given. There is none before its first use."""

    def state_dict(self) -> dict[str, Any]:
        found = get_global_attribute(GLOBAL_SEED_GENERATOR)
        return {} if found is None else {"state": _stored(_array(found.state.value))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            global_seed_generator().state.assign(state["state"])


def load_weights(model: Any, path: str | os.PathLike[str]) -> None:
    """Fills the variables of a model from a checkpoint of `EverystepCallback`.

    Args:
        model: The model to fill. It must be built.
        path: A checkpoint, or a run: then its newest.
    """
    variables = Variables(lambda: named(model.variables))
    state = {"model": variables.arrays()}
    load(path, into=state, select="model.*")
    variables.load_state_dict(state["model"])
