"""States that say who they are: the bytes alone tell which save they come from, and whether all do."""

from __future__ import annotations

from typing import Any

import numpy as np

import everystep

State = dict[str, Any]

WIDE = 1000
"""Elements of the largest leaf: so few that thousands of checkpoints take seconds, yet several sectors."""


def make_state(step: int, version: int = 0, wide: int = WIDE) -> State:
    """The state of `step`; `version` tells apart saves of one step. Floats of all bit patterns, NaNs too."""
    salt = (step * 1_000_003 + version * 7919) & 0xFFFFFFFF
    bits = np.arange(wide, dtype=np.uint32) * np.uint32(2_654_435_761) + np.uint32(salt)
    return {
        "step": step,
        "version": version,
        "wide": bits.view(np.float32),
        "narrow": {"u8": (bits[:13] & np.uint32(0xFF)).astype(np.uint8), "f64": np.full(3, salt + 0.5)},
    }


def blank_state(wide: int = WIDE) -> State:
    """The same tree, holding nothing yet."""
    return {
        "step": -1,
        "version": -1,
        "wide": np.zeros(wide, np.float32),
        "narrow": {"u8": np.zeros(13, np.uint8), "f64": np.zeros(3)},
    }


class WrongBytes(AssertionError):
    """What came back was never saved: the one thing that must not happen, whatever the disk does."""


def identify(state: State) -> tuple[int, int]:
    """(step, version) of a state that came back. Bytes of two saves mixed, or of none, are `WrongBytes`."""
    step, version = state["step"], state["version"]
    wanted = (
        _bytes(make_state(step, version, len(state["wide"])))
        if step >= 0
        else _bytes(blank_state(len(state["wide"])))
    )
    if _bytes(state) != wanted:
        raise WrongBytes(f"the state says step {step} version {version}, but its arrays are not of that save")
    return step, version


def load_identity(path: str) -> tuple[int, int]:
    """Which save is at `path`; also what the manifest says must agree."""
    with everystep.open(path) as checkpoint:
        found = identify(checkpoint.load())
        if checkpoint.step != found[0]:
            raise WrongBytes(f"{path}: manifest of step {checkpoint.step}, arrays of step {found[0]}")
        return found


def _bytes(state: State) -> tuple[bytes, ...]:
    arrays = (state["wide"], state["narrow"]["u8"], state["narrow"]["f64"])
    return tuple(array.tobytes() for array in arrays)
