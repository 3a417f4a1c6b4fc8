"""Objects of a framework as parts of a state: attributes, users' entries, and whether a checkpoint fits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from everystep.errors import StateMismatch
from everystep.integrations.shared.states import (
    Attributes,
    ChangedAttributes,
    merged,
    require_fit,
    with_entries,
)


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


def test_entries_of_the_user_come_beside_ours_and_never_replace_them() -> None:
    assert with_entries({"model": 1}, {"note": 2}) == {"model": 1, "note": 2}
    with pytest.raises(ValueError, match="entries of these names itself: model, rng"):
        with_entries({"model": 1, "rng": 2, "loaders": 3}, {"rng": 4, "model": 5, "note": 6})


def test_the_same_names_and_shapes_fit_in_any_order() -> None:
    require_fit({"a": (2, 3), "b": []}, {"b": (), "a": [2, 3]}, "x")
    require_fit({}, {}, "x")
    with pytest.raises(StateMismatch, match=r"a: checkpoint \[2, 3\], target \[3, 2\]"):
        require_fit({"a": (2, 3), "b": []}, {"b": (), "a": [3, 2]}, "x")


def test_all_that_differs_is_named() -> None:
    saved, own = {"a.w": (2, 3), "old": (1,)}, {"a.w": (2, 4), "new": (1,)}
    with pytest.raises(StateMismatch, match="runs/x: checkpoint and target do not fit") as caught:
        require_fit(saved, own, "runs/x")
    assert "a.w: checkpoint [2, 3], target [2, 4]" in str(caught.value)
    assert (caught.value.missing, caught.value.extra) == (("new",), ("old",))
    assert len(caught.value.wrong) == 1


def test_groups_are_taken_together() -> None:
    assert merged([{"a": (1,)}, {"b": (2,)}]) == {"a": (1,), "b": (2,)}
