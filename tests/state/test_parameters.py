"""Promise: a tensor comes back as the type it was, a parameter as a parameter, with its `requires_grad`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.errors import CorruptCheckpoint
from everystep.state import unflatten
from support.states.memory_store import restore, save


def weights() -> dict[str, Any]:
    return {
        "plain": torch.randn(3),
        "parameter": nn.Parameter(torch.randn(3)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "counts": nn.Parameter(torch.arange(3), requires_grad=False),
        "leaf": torch.randn(3, requires_grad=True),
        "result": torch.randn(3, requires_grad=True) * 2,
        "scalar": nn.Parameter(torch.tensor(2.0)),
        "empty": nn.Parameter(torch.empty(0)),
        "half": nn.Parameter(torch.randn(4).bfloat16()),
        "strided": nn.Parameter(torch.randn(4, 3).t()),
    }


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert found.requires_grad == wanted.requires_grad
    assert found.is_leaf
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("options", [everystep.Options(), everystep.Options(small_nbytes=0)])
def test_every_kind_of_tensor_comes_back_as_what_it_was(tmp_path: Path, options: everystep.Options) -> None:
    state = {
        "flat": weights(),
        "list": [weights()],
        "tuple": (OrderedDict(weights()), {1: nn.Parameter(torch.ones(1))}),
    }
    everystep.save(tmp_path / "c", state, options=options)
    assert everystep.verify(tmp_path / "c").problems == ()
    loaded = everystep.load(tmp_path / "c")
    for found, wanted in (
        (loaded["flat"], state["flat"]),
        (loaded["list"][0], state["list"][0]),  # type: ignore[index]
        (loaded["tuple"][0], state["tuple"][0]),  # type: ignore[index]
        (loaded["tuple"][1], state["tuple"][1]),  # type: ignore[index]
    ):
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            same(found[name], tensor)
    loaded["flat"]["parameter"].sum().backward()
    assert loaded["flat"]["parameter"].grad is not None


def test_a_parameter_by_itself(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", nn.Parameter(torch.ones(2)))
    same(everystep.load(tmp_path / "c"), nn.Parameter(torch.ones(2)))


def test_part_of_a_checkpoint_has_the_same_types(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"a": weights(), "b": 1})
    (found,) = everystep.load(tmp_path / "c", select="a.frozen")["a"].values()
    assert type(found) is nn.Parameter
    assert not found.requires_grad


def test_tied_parameters_come_back_as_one(tmp_path: Path) -> None:
    shared, leaf = nn.Parameter(torch.randn(3)), torch.randn(3, requires_grad=True)
    state = {"a": shared, "b": shared, "data": shared.data, "c": leaf, "d": leaf, "e": leaf.detach()}
    everystep.save(tmp_path / "c", state)
    found = everystep.load(tmp_path / "c")
    assert found["a"] is found["b"]
    assert found["c"] is found["d"]
    for name, wanted in state.items():
        same(found[name], wanted)
    with torch.no_grad():
        found["a"] += 1
        found["c"] += 1
    assert torch.equal(found["data"], found["a"]), "it is another memory"
    assert torch.equal(found["e"], found["c"])


def test_for_numpy_they_are_arrays(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", weights())
    for name, found in everystep.load(tmp_path / "c", framework="numpy").items():
        assert isinstance(found, np.ndarray), name


def test_without_torch_they_are_arrays_too(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in weights().items() if name != "half"}
    everystep.save(tmp_path / "c", state)
    script = """
        import sys
        sys.modules["torch"] = None
        import everystep, numpy
        found = everystep.load(sys.argv[1], framework="numpy")
        assert all(type(array) is numpy.ndarray for array in found.values())
        print(found["counts"].tolist())
        try:
            everystep.load(sys.argv[1])
        except everystep.UnsupportedState as error:
            assert "framework='numpy'" in str(error)
            print("told")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:2] == ["[0, 1, 2]", "told"]


def test_in_place_the_target_stays_what_it_is(tmp_path: Path) -> None:
    """What requires gradients is a decision of the program that restores, too: it freezes what it likes."""
    everystep.save(tmp_path / "c", {"a": nn.Parameter(torch.ones(2)), "b": torch.ones(2), "c": None})
    target = {"a": torch.zeros(2), "b": nn.Parameter(torch.zeros(2), requires_grad=False), "c": None}
    kept = dict(target)
    everystep.load(tmp_path / "c", into=target)
    assert all(target[name] is kept[name] for name in kept)
    same(target["a"], torch.ones(2))
    same(target["b"], nn.Parameter(torch.ones(2), requires_grad=False))


def test_a_place_that_is_still_empty_takes_it_as_it_was() -> None:
    target: dict[str, Any] = {"a": None}
    restore(target, save({"a": nn.Parameter(torch.ones(2))}))
    same(target["a"], nn.Parameter(torch.ones(2)))


def test_checkpoints_of_before_hold_plain_tensors() -> None:
    tensor = torch.ones(2)
    assert unflatten({"a": {"$leaf": "a"}}, {"a": tensor}) == {"a": tensor}


def test_the_states_of_modules_are_plain_tensors_as_torch_makes_them(tmp_path: Path) -> None:
    everystep.save(tmp_path / "c", {"model": nn.Linear(2, 2)})
    assert {type(tensor) for tensor in everystep.load(tmp_path / "c")["model"].values()} == {torch.Tensor}


@pytest.mark.parametrize(
    "body", [["a", True, True], ["a", True], ["a", 1, 0], "a", [1, True, True], ["b", True, True], [], None]
)
def test_a_malformed_reference_is_damage(body: Any) -> None:
    with pytest.raises(CorruptCheckpoint):
        unflatten({"a": {"$tensor": body}}, {"a": torch.arange(2)})


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_torchs_own_checkpointing_reads_them(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from everystep.integrations.dcp import Reader

    wanted = nn.Parameter(torch.randn(3))
    everystep.save(tmp_path / "c", {"a": wanted})
    target = {"a": torch.zeros(3)}
    dcp.load(target, storage_reader=Reader(tmp_path / "c"), no_dist=True)
    assert torch.equal(target["a"], wanted)
