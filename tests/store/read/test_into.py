"""`into=`: a checkpoint put back into live modules, optimizers, arrays and values, in place."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep import StateMismatch
from everystep.store.read.checkpoint import open_newest
from everystep.store.read.parts import Parts


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


class Training:
    """A small training whose every bit matters."""

    def __init__(self, seed: int, optimizer: str = "AdamW") -> None:
        torch.manual_seed(seed)
        self.model = Net()
        kind: Any = getattr(torch.optim, optimizer)
        self.optimizer = kind(self.model.parameters(), lr=0.01 * (seed + 1))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.counts = {"seen": np.zeros(3, np.int64), "epoch": 0, "history": [0.5]}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "counts": self.counts,
        }

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            x = torch.arange(20) * (step + 1) % 10
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), (x + step) % 10).backward()
            self.optimizer.step()
            self.schedule.step()
            self.counts["seen"] += step
            self.counts["epoch"] = step
            self.counts["history"].append(float(step))

    def bits(self) -> Any:
        tensors = [*self.model.state_dict().values()]
        tensors += [
            value for entry in self.optimizer.state_dict()["state"].values() for value in entry.values()
        ]
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        return (
            [tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors],
            groups,
            self.schedule.state_dict(),
            self.counts["seen"].tobytes(),
            self.counts["epoch"],
            self.counts["history"],
        )


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("warm", [True, False], ids=["stepped", "fresh"])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path, optimizer: str, warm: bool) -> None:
    original = Training(0, optimizer)
    original.train(0, 3)
    everystep.save(tmp_path / "c", original.state)
    original.train(3, 3)
    resumed = Training(1, optimizer)  # other weights, other learning rate
    if warm:
        resumed.train(0, 2)
    result = everystep.load(tmp_path / "c", into=resumed.state)
    assert result["model"] is resumed.model
    assert result["optimizer"] is resumed.optimizer
    resumed.train(3, 3)
    assert resumed.bits() == original.bits()


def test_memory_that_exists_is_filled_in_place(tmp_path: Path) -> None:
    saved, target = Training(0), Training(1)
    saved.train(0, 2)
    target.train(0, 1)
    everystep.save(tmp_path / "c", saved.state)
    kept = [*target.model.parameters(), *target.model.buffers()]
    kept += [value for entry in target.optimizer.state.values() for value in entry.values() if value.dim()]
    addresses = [tensor.data_ptr() for tensor in kept]
    seen, history = target.counts["seen"], target.counts["history"]
    everystep.load(tmp_path / "c", into=target.state)
    assert [tensor.data_ptr() for tensor in kept] == addresses
    assert target.counts["seen"] is seen
    assert target.counts["history"] is history
    assert target.model.head.weight is target.model.embed.weight
    assert target.bits() == saved.bits()


def test_strided_and_reversed_targets_are_filled_in_place(tmp_path: Path, options: everystep.Options) -> None:
    rng = np.random.default_rng(0)
    state = {name: rng.random((300, 200)) for name in ("plain", "transposed", "reversed", "columns", "torch")}
    everystep.save(tmp_path / "c", state, options=options)
    target = {
        "plain": np.zeros((300, 200)),
        "transposed": np.zeros((200, 300)).T,
        "reversed": np.zeros((300, 200))[::-1, ::-1],
        "columns": np.zeros((300, 400))[:, ::2],
        "torch": torch.zeros(200, 300, dtype=torch.float64).T,
    }
    before = dict(target)
    everystep.load(tmp_path / "c", into=target)
    for name, array in state.items():
        assert target[name] is before[name]
        assert np.array_equal(np.asarray(target[name]), array)


def test_the_other_framework_takes_the_same_bytes(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"n": np.arange(6.0), "t": torch.arange(6)})
    target = {"n": torch.zeros(6, dtype=torch.float64), "t": np.zeros(6, np.int64)}
    everystep.load(tmp_path / "c", into=target)
    assert target["n"].tolist() == target["t"].tolist() == [0, 1, 2, 3, 4, 5]


def test_framework_and_into_exclude_each_other(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"n": np.arange(6.0)})
    with pytest.raises(TypeError, match="framework"):
        everystep.load(tmp_path / "c", into={"n": np.zeros(6)}, framework="torch")


def odd_target() -> dict[str, Any]:
    return {
        "same": np.zeros(3),
        "shape": np.zeros(5),
        "dtype": np.zeros(4, np.float32),
        "new": np.zeros(2),
        "n": 0,
    }


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    state = {"same": np.ones(3), "shape": np.ones(4), "dtype": np.ones(4), "gone": np.ones(2), "n": 7}
    everystep.save(tmp_path / "c", state)
    return tmp_path / "c"


def test_what_does_not_fit_is_listed_before_anything_is_touched(odd: Path) -> None:
    target = odd_target()
    with pytest.raises(StateMismatch) as caught:
        everystep.load(odd, into=target)
    error = caught.value
    assert error.missing == ("new",)
    assert error.extra == ("gone",)
    assert error.wrong == (
        "shape: checkpoint F64[4], target F64[5]",
        "dtype: checkpoint F64[4], target F32[4]",
    )
    for text in (str(odd), "new", "gone", "shape: checkpoint F64[4], target F64[5]", "strict=False"):
        assert text in str(error)
    assert target["n"] == 0
    assert all((value == 0).all() for value in target.values() if isinstance(value, np.ndarray))


def test_not_strict_restores_what_fits_and_says_what_did_not(odd: Path) -> None:
    target = odd_target()
    with pytest.warns(RuntimeWarning, match="do not fit") as caught:
        everystep.load(odd, into=target, strict=False)
    assert target["same"].tolist() == [1, 1, 1]
    assert target["n"] == 7
    for name in ("shape", "dtype", "new"):
        assert (target[name] == 0).all()
    assert "gone" not in target
    message = str(caught[0].message)
    for name in ("new", "gone", "shape: checkpoint F64[4], target F64[5]", "dtype:"):
        assert name in message
    assert caught[0].filename == __file__


def flatten_values(state: Any) -> Any:
    if isinstance(state, nn.Module):
        return flatten_values(dict(state.state_dict()))
    if isinstance(state, dict):
        return {key: flatten_values(item) for key, item in state.items()}
    return [flatten_values(item) for item in state] if isinstance(state, list) else np.asarray(state).tolist()


@pytest.mark.parametrize(
    "target",
    [
        {"net": {"w": np.zeros(3), "b": np.zeros(1)}, "n": 0},
        {"model": {"w": np.zeros(4), "b": np.zeros(2)}, "n": 0},
        {"w": np.zeros(3), "b": np.zeros(1)},
        {"model": {"w": np.zeros(3, np.float32)}},
        {"model": torch.nn.Linear(2, 2), "n": 0},
        {"model": [np.zeros(3)]},
    ],
    ids=["other names", "other shapes", "a level less", "other types", "a module", "a list"],
)
def test_not_strict_that_would_restore_no_array_is_an_error(target: Any, tmp_path: Path) -> None:
    """Or a training would go on with the weights that it started with, and a step that says otherwise."""
    everystep.save(tmp_path / "c", {"model": {"w": np.ones(3), "b": np.ones(1)}, "n": 7})
    before = copy.deepcopy(target)
    with pytest.raises(StateMismatch, match="has none to restore") as caught:
        everystep.load(tmp_path / "c", into=target, strict=False)
    assert "Nothing has been changed" in str(caught.value)
    assert caught.value.extra or caught.value.wrong
    assert flatten_values(target) == flatten_values(before)


def test_the_error_of_a_restore_of_nothing_shows_both_sides(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"model": {"w": np.ones(3), "b": np.ones(1)}})
    with pytest.raises(StateMismatch) as caught:
        everystep.load(tmp_path / "c", into={"w": np.zeros(3), "b": np.zeros(1)}, strict=False)
    for text in ("model.w", "    w", "have 'model.' before them"):
        assert text in str(caught.value)


def test_not_strict_may_restore_no_array_where_none_is_asked_for(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"w": np.ones(3), "n": 7})
    target: Any = {"n": 0}
    with pytest.warns(RuntimeWarning, match="All else has been restored"):
        everystep.load(tmp_path / "c", into=target, strict=False)
    assert target == {"n": 7}
    empty: Any = {"n": 0, "w": torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)}
    everystep.save(tmp_path / "d", {"n": 8, "w": torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)})
    everystep.load(tmp_path / "d", into=empty, strict=False)
    assert empty["n"] == 8


def test_a_selection_that_finds_no_place_is_an_error(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"a": np.ones(3), "b": np.ones(3)})
    target = {"b": np.zeros(3)}
    with pytest.raises(StateMismatch, match="has none to restore"):
        everystep.load(tmp_path / "c", into=target, select="a", strict=False)
    assert not target["b"].any()


@pytest.mark.parametrize("nbytes", [24, 5 << 20])
def test_equal_leaves_stored_apart_fill_a_target_that_ties_them(nbytes: int, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    everystep.save(tmp_path / "equal", {"a": values, "b": values.copy()})
    shared = np.zeros(nbytes, np.uint8)
    everystep.load(tmp_path / "equal", into={"a": shared, "b": shared})
    assert np.array_equal(shared, values)
    other = values.copy()
    other[-1] ^= 1
    everystep.save(tmp_path / "other", {"a": values, "b": other})
    shared[:] = 0
    with pytest.raises(StateMismatch, match="stored apart from a, target tied to it"):
        everystep.load(tmp_path / "other", into={"a": shared, "b": shared})
    assert not shared.any()


@pytest.mark.parametrize("equal", [True, False])
def test_leaves_stored_in_different_pieces_are_compared_by_their_bytes(
    equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16)
    everystep.save(tmp_path / "c", {"a": values, "b": values.clone() if equal else values.abs()})
    monkeypatch.setattr(Parts, "checksums", lambda self, meta: {meta.name: ""})  # as if cut differently
    with open_newest(tmp_path / "c") as checkpoint:
        assert checkpoint._reader.alike("a", "b") == equal


def test_not_strict_is_silent_when_all_fits(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"a": np.ones(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = everystep.load(tmp_path / "c", into={"a": np.zeros(3)}, strict=False)
    assert loaded["a"].tolist() == [1.0] * 3


def test_selected_leaves_are_restored_and_nothing_else(tmp_path: Path) -> None:
    saved, target = Training(0), Training(1)
    saved.train(0, 2)
    target.train(0, 1)
    everystep.save(tmp_path / "c", saved.state)
    untouched = (
        target.optimizer.state_dict()["param_groups"],
        target.counts["epoch"],
        target.counts["history"][:],
    )
    before = target.model.norm.weight.detach().clone()
    everystep.load(tmp_path / "c", into=target.state, select=["model.embed.*", "counts.seen"])
    assert torch.equal(target.model.embed.weight, saved.model.embed.weight)
    assert torch.equal(target.model.norm.weight, before)
    assert np.array_equal(target.counts["seen"], saved.counts["seen"])
    assert (
        target.optimizer.state_dict()["param_groups"],
        target.counts["epoch"],
        target.counts["history"],
    ) == untouched


def test_selecting_needs_no_place_for_the_rest(tmp_path: Path) -> None:
    """The model of a training checkpoint, without its optimizer."""
    saved = Training(0)
    saved.train(0, 2)
    everystep.save(tmp_path / "c", saved.state)
    model = Net()
    everystep.load(tmp_path / "c", into={"model": model}, select="model.*")
    for mine, theirs in zip(model.state_dict().values(), saved.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_selected_leaf_that_finds_no_place_is_a_mismatch(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"a": np.ones(3), "b": np.ones(2), "list": [np.ones(1), 5, np.ones(4)]})
    with pytest.raises(StateMismatch) as caught:
        everystep.load(tmp_path / "c", into={"b": np.zeros(2)}, select="a")
    assert caught.value.extra == ("a",)
    with pytest.raises(StateMismatch) as caught:
        everystep.load(tmp_path / "c", into={"a": np.zeros(4), "b": np.zeros(9)}, select="a")
    assert caught.value.wrong == ("a: checkpoint F64[3], target F64[4]",)
    target = {"list": [np.zeros(1), 6, np.zeros(4)]}
    everystep.load(tmp_path / "c", into=target, select="list.2")
    assert target["list"][0].tolist() == [0]
    assert target["list"][1] == 6
    assert target["list"][2].tolist() == [1, 1, 1, 1]


def test_an_optimizer_is_selected_whole_or_not_at_all(tmp_path: Path) -> None:
    saved, target = Training(0), Training(1)
    saved.train(0, 2)
    everystep.save(tmp_path / "c", saved.state)
    with pytest.raises(StateMismatch, match="takes all or none"):
        everystep.load(tmp_path / "c", into=target.state, select="optimizer.*.exp_avg")
    everystep.load(tmp_path / "c", into=target.state, select="optimizer.*")
    theirs = saved.optimizer.state_dict()["state"]
    for index, entry in target.optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, theirs[index][key])


def test_an_empty_array_is_read_before_what_lies_at_its_offset(tmp_path: Path) -> None:
    """It is read in place, the other one into new memory."""
    state = {"empty": np.zeros(0), "expanded": torch.ones(1).expand(3)}
    everystep.save(tmp_path / "c", state)
    restored = everystep.load(tmp_path / "c", into=state)
    assert torch.equal(restored["expanded"], torch.ones(3))
