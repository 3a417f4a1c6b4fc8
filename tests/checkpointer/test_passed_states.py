"""Programs that pass a new state to each save, and take a new one from `restore`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep import Checkpointer
from everystep.engine import faults
from everystep.state.boxed import BoxedArray, unchanging
from everystep.state.targets import Rebuilt

COPIES = "the state holds no optimizer"


def fixed(value: float) -> BoxedArray:
    """A stand-in for an array of JAX: a step makes a new one."""
    return unchanging(np.full(300_000, value))  # too large for the short cut of small states


def test_each_save_stores_the_state_it_is_given(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is copied, so there is nothing to notice
        with Checkpointer(tmp_path) as ckpt:
            assert ckpt.mode == "overlap"
            for step in (1, 2, 3):
                ckpt.save(step, {"w": fixed(step), "steps": (step, [np.float32(step)])}, {"loss": 1 / step})
            ckpt.wait()
            assert [(event.in_place_nbytes, event.copied_nbytes) for event in saved(ckpt)] == [
                (2_400_000, 0)
            ] * 3
    for step in (1, 2, 3):
        found = everystep.load(tmp_path / f"step-{step:012}")
        assert (found["w"] == step).all()
        assert found["steps"] == (step, [np.float32(step)])
        assert type(found["steps"][1][0]) is np.float32
    assert everystep.open(tmp_path).metrics == {"loss": 1 / 3}


def test_metrics_in_the_place_of_a_state_are_not_saved_as_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"w": np.ones(3)}, mode="sync") as ckpt:
        with pytest.raises(TypeError, match=r"step 1 was not saved.*metrics=\{\.\.\.\}"):
            ckpt.save(1, {"loss": 0.25})
        ckpt.save(1, metrics={"loss": 0.25})
        ckpt.save(2, {"w": np.zeros(3), "loss": 0.25})
    assert everystep.open(tmp_path / f"step-{1:012}").metrics == {"loss": 0.25}
    assert set(everystep.load(tmp_path / f"step-{2:012}")) == {"w", "loss"}
    with Checkpointer(tmp_path / "unbound", mode="sync") as ckpt:
        ckpt.save(1, {"count": 3})
    assert everystep.load(tmp_path / "unbound") == {"count": 3}


def saved(ckpt: Checkpointer) -> list[Any]:
    return [event for event in ckpt.events if type(event).__name__ == "Saved"]


def test_a_restore_returns_new_values_for_those_that_cannot_be_changed(tmp_path: Path) -> None:
    weights = np.arange(4.0)
    with Checkpointer(tmp_path, mode="sync") as ckpt:
        assert ckpt.restore(into=(1, 2)) == (0, (1, 2))  # a new run: what was given
        ckpt.save(7, (weights, 3, {"scale": np.float16(0.5)}, (torch.ones(2), "name")))
    mine, tensor = np.zeros(4), torch.zeros(2)
    target = (mine, 0, {"scale": np.float16(0)}, (tensor, ""))
    with Checkpointer(tmp_path, mode="sync") as ckpt:
        step, state = ckpt.restore(into=target)
        assert step == 7
        assert state[0] is mine  # what can be filled is filled
        assert mine.tolist() == [0, 1, 2, 3]
        assert state[1] == 3
        assert state[2] is target[2]
        assert state[2] == {"scale": np.float16(0.5)}
        assert state[3][0] is tensor
        assert tensor.tolist() == [1, 1]
        assert state[3][1] == "name"
        assert target[1] == 0
        ckpt.save(8, state)
        assert ckpt.last_durable == 8


class Doubled(Rebuilt[float]):
    """A number that is stored as an array of twice its value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"twice": np.full(3, 2 * self.value)}

    def load_state_dict(self, state: object) -> None:
        raise AssertionError("it is rebuilt instead")

    def memory(self, entries: Any) -> dict[str, Any]:
        self.entries = list(entries)
        return {"twice": np.zeros(3)}

    def rebuild(self, memory: dict[str, Any]) -> None:
        self.value = memory["twice"][0] / 2


def test_what_is_rebuilt_is_returned_by_its_value_or_kept_in_its_place(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "whole", mode="sync") as ckpt:
        assert ckpt.restore(into=Doubled(1.0)) == (0, 1)
        ckpt.save(1, Doubled(21.0))
        assert ckpt.restore(into=Doubled(0.0)) == (1, 21)
    inner = Doubled(5.0)
    with Checkpointer(tmp_path / "part", {"inner": inner}, mode="sync") as ckpt:
        ckpt.save(1)
        inner.value = 0
        assert ckpt.restore() == 1
        assert inner.value == 5
    assert inner.entries == ["twice"]
    other = Doubled(0.0)
    with pytest.raises(everystep.StateMismatch, match=r"inner\.twice"):
        everystep.load(tmp_path / "part", into=other)
    assert other.value == 0


def test_a_state_passed_to_a_save_takes_the_place_of_the_bound_one_for_that_save(tmp_path: Path) -> None:
    bound = {"w": np.ones(3)}
    with Checkpointer(tmp_path, bound, mode="sync") as ckpt:
        ckpt.save(1, {"w": np.full(3, 5.0)})
        ckpt.save(2)
        with pytest.warns(RuntimeWarning, match="going back to step 1"):
            step, other = ckpt.restore(1, into={"w": np.zeros(3)})
        assert (step, other["w"].tolist()) == (1, [5, 5, 5])
        assert bound["w"].tolist() == [1, 1, 1]
    assert everystep.load(tmp_path)["w"].tolist() == [1, 1, 1]


def test_without_a_state_each_call_needs_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ValueError, match=r"step 4 was not saved: .* save\(step, state\)"):
            ckpt.save(4)
        with pytest.raises(ValueError, match=r"restore\(into=...\)"):
            ckpt.restore()
        assert ckpt.steps == []


def test_a_skipped_save_waits_until_the_one_before_is_durable(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=2) as ckpt, faults.injected("sync_dir:1:slow300+"):
        pending = ckpt.save(2, {"w": fixed(2)})
        assert pending is not None
        assert not pending.done()
        assert ckpt.save(3, {"w": fixed(3)}) is None
        assert ckpt.last_durable == 2  # so a crash in step 4 costs one step


def test_hooked_optimizers_are_those_of_the_state_that_is_saved(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
    one, two = (torch.optim.SGD(model.parameters(), momentum=0.9) for model in (first, second))
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": first, "optimizer": one})
        assert len(one._optimizer_step_pre_hooks) == 1
        ckpt.save(2, {"model": second, "optimizer": two})
        assert (len(one._optimizer_step_pre_hooks), len(two._optimizer_step_pre_hooks)) == (0, 1)
        ckpt.wait()
        assert saved(ckpt)[-1].in_place_nbytes > 0
    assert not two._optimizer_step_pre_hooks


def test_a_passed_state_that_is_copied_warns_once_with_the_remedy(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        with pytest.warns(RuntimeWarning, match=COPIES):
            ckpt.save(1, {"w": np.ones(3)})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save(2, {"w": np.ones(3)})
            ckpt.save(3, {"w": np.ones(3)})  # passed each time: not stale


def test_a_passed_array_may_change_after_the_save(tmp_path: Path) -> None:
    array = np.ones(300_000)
    with Checkpointer(tmp_path) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pending = ckpt.save(1, {"w": array})
        array[:] = 9
        assert pending is not None
        pending.result(60)
    assert (everystep.load(tmp_path)["w"] == 1).all()
