"""A checkpoint of another model is named by what differs, before a framework loads any of it."""

from __future__ import annotations

import pytest

from everystep.errors import StateMismatch
from everystep.integrations.shared.fitting import merged, require_fit


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
