"""Entries that users add to the state of a framework."""

from __future__ import annotations

import pytest

from everystep.integrations.shared.entries import with_entries


def test_entries_of_the_user_come_beside_ours_and_never_replace_them() -> None:
    assert with_entries({"model": 1}, {"note": 2}) == {"model": 1, "note": 2}
    with pytest.raises(ValueError, match="entries of these names itself: model, rng"):
        with_entries({"model": 1, "rng": 2, "loaders": 3}, {"rng": 4, "model": 5, "note": 6})
