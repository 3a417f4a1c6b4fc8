"""Random numbers that are a function of where in the training they are drawn, and of nothing else.

Owns how a seed and a place (epoch, batch, rank) become the states of Python's, NumPy's and torch's global CPU
generators, and how the generators of the main process are left as they were. The streams of NumPy's
``SeedSequence`` and bit generators do not change between its versions, so neither does what is made of them.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random.mtrand import get_bit_generator

ORDER, SAMPLER, WORKERS, BATCH = range(4)
"""What a stream is for: none of them may repeat another's numbers."""


def whole(value: Any, word: str, least: int = 0) -> int:
    """The value as an int, whatever library counted it; `ValueError` when it is none, or too small."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{word} must be a whole number, at least {least}, not {value!r}")
    return number


def stream(seed: int, purpose: int, *place: int) -> np.random.SeedSequence:
    """The randomness of one place. `spawn_key` keeps the place apart from seeds of any size."""
    return np.random.SeedSequence(seed, spawn_key=(purpose, *place))


def plant(source: np.random.SeedSequence) -> None:
    """Set the global CPU generators of Python, NumPy and (when it is imported) torch from one source."""
    words = source.generate_state(8, np.uint64)
    random.seed(int.from_bytes(words[:4].astype("<u8").tobytes(), "little"))
    _plant_numpy(words[4:7].astype("<u8").view("<u4"))
    torch = sys.modules.get("torch")
    if torch is not None:
        # Not `torch.manual_seed`: that reaches out to the accelerators, whose numbers belong to the training.
        torch.default_generator.manual_seed(int(words[7]))


def _plant_numpy(words: npt.NDArray[np.uint32]) -> None:
    current = get_bit_generator()
    if isinstance(current, np.random.MT19937):
        np.random.seed(words)  # ten times as fast as what follows, and only for the Mersenne twister
    else:  # numpy.random.set_bit_generator has been called
        fresh = type(current)(np.random.SeedSequence(words.tolist()))
        np.random.set_state({**fresh.state, "has_gauss": 0, "gauss": 0.0})


@contextmanager
def undisturbed(*generators: Any) -> Iterator[None]:
    """Leave the global CPU generators, and the torch generators given, as they were before the block."""
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    torch = sys.modules.get("torch")
    owned = [*generators, *([torch.default_generator] if torch is not None else [])]
    states = [generator.get_state() for generator in owned]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        for generator, state in zip(owned, states, strict=True):
            generator.set_state(state)
