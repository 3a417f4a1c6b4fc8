"""All restores warn in the same words, of one process and of several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep.state import Mismatch
from everystep.store.read.restoring import Unrestored

NOTHING = Mismatch((), (), ())


def test_a_restore_that_restored_everything_warns_of_nothing() -> None:
    assert Unrestored(NOTHING, (), ()).texts(rank=0, world=1, saved_world=1) == []


def test_each_kind_has_one_text_that_names_rank_and_leaves() -> None:
    found = Unrestored(NOTHING, ["noise"], ["rng"], ["cache"])
    kept, left_out, beyond = found.texts(rank=1, world=2, saved_world=4)
    assert kept == (
        "noise of rank 1 stays as it is: it is marked per_rank, and the checkpoint (saved by 4 ranks) has "
        "none of rank 1"
    )
    assert left_out == (
        "the per_rank state of rank 1 was not restored, because the target has no place for it: rng"
    )
    assert beyond == (
        "the per_rank state of ranks 2 to 3 was not restored, because only 2 ranks loaded the checkpoint: "
        "cache"
    )


def test_many_leaves_are_counted_instead_of_listed() -> None:
    (text,) = Unrestored(NOTHING, [f"x{number}" for number in range(11)], ()).texts(0, 1, 1)
    assert "x7 and 3 more of rank 0" in text


def test_a_warning_names_the_users_line(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"a": np.ones(3)})
    with pytest.warns(RuntimeWarning, match="All else has been restored") as caught:
        everystep.load(tmp_path / "one", into={"a": np.zeros(3), "b": np.zeros(3)}, strict=False)
    assert [warning.filename for warning in caught] == [__file__]
