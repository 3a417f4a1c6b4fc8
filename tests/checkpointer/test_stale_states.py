"""Arrays that cannot change, as those of JAX: a state that still has the old ones is not the trained one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.state.boxed import unchanging

STALE = "the same as in the checkpoint before"


@pytest.mark.parametrize("mode", ["sync", "snapshot"])
def test_saving_the_same_arrays_twice_warns_once(tmp_path: Path, mode: Any) -> None:
    state = {"w": unchanging(np.ones(5)), "n": 1}
    with everystep.Checkpointer(tmp_path, state, mode=mode, preemption=False) as ckpt:
        ckpt.save(1)
        state["n"] = 2
        with pytest.warns(RuntimeWarning, match=STALE):
            ckpt.save(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save(3)


def test_new_arrays_and_arrays_that_can_change_bring_no_warning(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": unchanging(np.ones(5)), "frozen": unchanging(np.ones(3))}
    plain = {"w": np.ones(5), "gaps": unchanging(np.ones((5, 4))[:, ::2])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with everystep.Checkpointer(tmp_path / "a", state, mode="snapshot", preemption=False) as ckpt:
            ckpt.save(1)
            state["w"] = unchanging(np.full(5, 2.0))
            ckpt.save(2)
            ckpt.save(3)
        with everystep.Checkpointer(tmp_path / "b", plain, mode="snapshot", preemption=False) as ckpt:
            ckpt.save(1)
            ckpt.save(2)
    assert everystep.load(tmp_path / "a")["w"].tolist() == [2.0] * 5
    assert everystep.load(tmp_path / "b")["gaps"].tolist() == [[1.0] * 2] * 5
