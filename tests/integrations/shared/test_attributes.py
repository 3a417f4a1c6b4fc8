"""Attributes as state: by name, and of callbacks that save none those that have changed."""

from __future__ import annotations

import math

import numpy as np

from everystep.integrations.shared.attributes import Attributes, ChangedAttributes


class Callback:
    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best = math.inf
        self.wait = 0
        self.history: dict[str, list[float]] = {}
        self.weights: list[np.ndarray[tuple[int], np.dtype[np.float64]]] | None = None
        self.compare = min
        self.delta = 1.0


def test_attributes_are_saved_and_restored_by_name() -> None:
    before, after = Callback(1), Callback(2)
    before.wait, before.best = 5, 0.25
    Attributes(after, "wait", "best").load_state_dict(Attributes(before, "wait", "best").state_dict())
    assert (after.wait, after.best, after.patience) == (5, 0.25, 2)


def trained(patience: int = 3) -> tuple[Callback, ChangedAttributes]:
    callback = Callback(patience)
    memory = ChangedAttributes(callback, derived=["delta"])
    callback.best, callback.history["loss"], callback.weights = 0.5, [0.5], [np.ones(2)]
    callback.delta = -1.0
    return callback, memory


def test_only_what_has_changed_is_saved() -> None:
    assert trained()[1].state_dict().keys() == {"best", "history", "weights"}


def test_restored_attributes_wait_for_the_release() -> None:
    saved = trained()[1].state_dict()
    other = Callback(7)
    memory = ChangedAttributes(other)
    memory.load_state_dict(saved)
    assert other.best == math.inf
    memory.release()
    assert (other.best, other.history, other.patience, other.wait) == (0.5, {"loss": [0.5]}, 7, 0)
    other.best = 0.1
    memory.release()  # once only
    assert other.best == 0.1


def test_what_is_saved_is_seen_to_change_in_place() -> None:
    callback = trained()[0]
    fresh = ChangedAttributes(callback)
    callback.history["loss"].append(0.25)
    assert fresh.state_dict()["history"] == {"loss": [0.5, 0.25]}
    assert "weights" in fresh.state_dict()  # arrays are not compared: they may have changed
    assert "best" not in fresh.state_dict()
