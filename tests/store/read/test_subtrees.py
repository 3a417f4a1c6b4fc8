"""The name of a subtree stands for all that is in it: in `select`, in ``ck["model"]``, and in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep import inspect
from everystep.state.name_groups import did_you_mean, grouped


class Schedule:
    """An object whose state has no arrays."""

    def __init__(self, last: int) -> None:
        self.last = last

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"h": [{"w": np.full(2, value)}, {"w": np.full(3, value)}], "version": int(value)},
        "optimizer": {f"p{index}": {"m": np.full(2, value)} for index in range(20)},
        "schedule": Schedule(int(value)),
        "run": {"epoch": int(value), "seed": int(value)},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("subtrees") / "c"
    everystep.save(path, state(7.0))
    return path


def test_a_subtree_comes_back_with_its_values(saved: Path) -> None:
    found = everystep.load(saved, select="model")
    assert list(found) == ["model"]
    assert found["model"]["version"] == 7
    assert found["model"]["h"][1]["w"].tolist() == [7, 7, 7]


def test_subtrees_values_and_globs_go_together(saved: Path) -> None:
    found = everystep.load(saved, select=["run.epoch", "model.h.0", "optimizer.p?.m", "schedule"])
    assert found["run"] == {"epoch": 7}
    assert found["schedule"] == {"last": 7}
    assert found["model"]["h"][1] is None
    assert len(found["optimizer"]) == 10


def test_into_a_target_only_the_subtree_is_restored(saved: Path) -> None:
    into = state(0.0)
    everystep.load(saved, into, select=["model", "schedule", "run.epoch"])
    assert into["model"]["h"][0]["w"].tolist() == [7, 7]
    assert (into["model"]["version"], into["schedule"].last) == (7, 7)
    assert into["run"] == {"epoch": 7, "seed": 0}
    assert into["optimizer"]["p0"]["m"].tolist() == [0, 0]


def test_what_the_target_has_more_in_a_selected_subtree_is_a_mismatch(saved: Path) -> None:
    into = state(0.0)
    into["model"]["head"] = np.zeros(1)
    with pytest.raises(everystep.StateMismatch) as caught:
        everystep.load(saved, into, select="model")
    assert caught.value.missing == ("model.head",)
    assert into["model"]["version"] == 0
    into["optimizer"]["head"] = np.zeros(1)
    del into["model"]["head"]
    everystep.load(saved, into, select="model")
    assert into["model"]["version"] == 7


def test_a_leaf_of_the_very_name_comes_before_the_subtree(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": np.zeros(1), "w.scale": np.ones(1)})
    assert list(everystep.load(tmp_path / "c", select="w")) == ["w"]
    with everystep.open(tmp_path / "c") as checkpoint:
        assert checkpoint["w"].shape == (1,)


def test_keys_with_dots_do_not_lose_leaves(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"a.b": {"w": np.zeros(1)}, "a": {"b": {"w": np.ones(1)}}})
    found = everystep.load(tmp_path / "c", select="a.b")
    assert (found["a.b"]["w"][0], found["a"]["b"]["w"][0]) == (0, 1)


def test_an_open_checkpoint_has_subtrees(saved: Path) -> None:
    with everystep.open(saved) as checkpoint:
        model = checkpoint["model"]
        assert list(model) == ["h.0.w", "h.1.w"]
        assert model["h.1.w"][1:].tolist() == model["h.1"]["w"][1:].tolist() == [7, 7]
        assert {name: array.shape for name, array in model.read().items()} == {"h.0.w": (2,), "h.1.w": (3,)}
        assert (len(model), model.nbytes, "h.0" in model, "h.2" in model) == (2, 40, True, False)
        assert checkpoint.read("model.h.1").keys() == {"model.h.1.w"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("modle", "did you mean 'model'?"),
        ("model.h.0.x.y", "everystep show"),
        ("h.0", "did you mean 'model.h.0'?"),
        ("modle.*", "did you mean 'model.*'?"),
        ("nope*", "everystep show"),
        ("optimiser.p3.m", "did you mean 'optimizer.p3.m'?"),
        ("run.epoch", "is a value"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(saved: Path, name: str, said: str) -> None:
    with everystep.open(saved) as checkpoint:
        with pytest.raises(everystep.errors.LeafNotFound) as caught:
            checkpoint[name]
        assert said in str(caught.value)
        with pytest.raises(everystep.StateMismatch) as mismatch:
            checkpoint.read(name)
        assert said in str(mismatch.value)


def test_export_and_show_take_a_subtree(saved: Path, tmp_path: Path) -> None:
    assert list(inspect.describe(saved, leaves="model").leaves) == ["model.h.0.w", "model.h.1.w"]
    assert inspect.export(saved, tmp_path / "m.safetensors", select=["model"]).leaves == 2


def test_the_error_for_a_target_with_only_the_model_suggests_select(saved: Path) -> None:
    into = {"model": state(0.0)["model"]}
    with pytest.raises(everystep.StateMismatch) as caught:
        everystep.load(saved, into)
    text = str(caught.value)
    assert 'call load(..., select="model")' in text
    assert "optimizer.* (20 leaves)" in text
    assert len(caught.value.extra) == 22
    everystep.load(saved, into, select="model")
    assert into["model"]["version"] == 7


def test_a_misspelt_key_is_recognised(saved: Path) -> None:
    with pytest.raises(everystep.StateMismatch, match="did you mean 'model'"):
        everystep.load(saved, {"modle": state(0.0)["model"]})
    other = {"modle": {"entirely": np.zeros(1), "different": np.zeros(2)}}
    with pytest.raises(everystep.StateMismatch, match="no 'modle'; did you mean 'model'"):
        everystep.load(saved, other)


def test_names_are_grouped_by_whole_subtrees_and_over_numbers() -> None:
    layers = [f"model.h.{index}.bias" for index in range(12)]
    adam = [f"optimizer.p{index}.m" for index in range(100)]
    fitting = [f"model.h.{index}.weight" for index in range(12)]
    assert grouped([*layers, *adam], fitting) == ["model.h.*.bias (12 leaves)", "optimizer.* (100 leaves)"]
    assert grouped(["a.b", "c"]) == ["a.b", "c"]
    assert len(grouped([f"w{index}" for index in range(1000)])) == 21


def test_no_guess_is_better_than_a_wild_one() -> None:
    assert did_you_mean("encoder", ["model.w", "optimizer.m"]) == ""
    assert did_you_mean("", ["model.w"]) == ""
