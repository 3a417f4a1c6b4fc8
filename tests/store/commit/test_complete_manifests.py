"""No way to a checkpoint commits a tree that refers to other leaves than those that are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import everystep
from everystep.integrations.dcp import Writer
from everystep.state import FlatState
from everystep.state.flatten import flatten
from everystep.state.node import unmatched
from everystep.universal import state_tree


def lost(flat: FlatState) -> FlatState:
    return replace(flat, tree={"step": 1, "w": flat.tree["w"]})  # type: ignore[index, call-overload]


def dangling(flat: FlatState) -> FlatState:
    return replace(flat, tree={**flat.tree, "more": [{"$leaf": "1"}]})  # type: ignore[dict-item]


def swapped(flat: FlatState) -> FlatState:
    return replace(flat, tree={**flat.tree, "m": {"$tuple": ["x", {"$leaf": "1"}]}})  # type: ignore[dict-item]


def alias_lost(flat: FlatState) -> FlatState:
    return replace(flat, aliases=(*flat.aliases, ("tied", "w")))


def own_lost(flat: FlatState) -> FlatState:
    return replace(flat, local={"seed": {"$tuple": [3]}})


BREAKS = [lost, dangling, swapped, alias_lost, own_lost]


@pytest.fixture
def state() -> dict[str, Any]:
    big = np.arange(300_000, dtype=np.float64)
    return {"w": big, "m": {"a": np.ones(3), "b": big}, "seed": everystep.per_rank({"s": np.ones(2)})}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("way", ["small", "single", "volumes"])
def test_a_tree_that_is_not_of_its_leaves_is_not_committed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Any,
    way: str,
    how: Callable[[FlatState], FlatState],
) -> None:
    if way == "small":
        state = {**state, "w": np.ones(2), "m": {"a": np.ones(3)}}
    (tmp_path / "volume").mkdir()
    options = everystep.Options(volumes=[tmp_path / "volume"]) if way == "volumes" else None
    for module in ("everystep.store.api", "everystep.store.ranks.group"):
        monkeypatch.setattr(f"{module}.flatten", lambda *args: how(flatten(*args)))
    with pytest.raises(everystep.UnsupportedState, match=r"leaf '.*'( has no place|, which is not)"):
        everystep.save(tmp_path / "c", state, options=options)
    assert not (tmp_path / "c").exists()
    assert not (tmp_path / "c.partial").exists()


def test_dcp_commits_no_such_tree_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystep.integrations.dcp.writer.leaf_node", lambda name: {"$leaf": "other"})
    with pytest.raises(CheckpointException, match=r"(?s)UnsupportedState: .*has no place in the tree"):
        dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def test_a_foreign_checkpoint_of_which_something_would_get_lost_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": {"w": torch.ones(3)}, "b": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    real = state_tree.described_tree

    def forgetful(*args: Any) -> Any:
        tree: Any = real(*args)
        tree.popitem()
        return tree

    monkeypatch.setattr(state_tree, "described_tree", forgetful)
    with pytest.raises(everystep.errors.UnsupportedSource, match="has no place in the tree"):
        everystep.load(tmp_path / "x.pt")


def test_what_flatten_makes_of_any_state_fits(state: Any) -> None:
    flat = flatten(
        {**state, "blob": b"x" * 100_000, "p": torch.nn.Parameter(torch.ones(2)), "$k": [state["w"]]}
    )
    names = {leaf.name for leaf in (*flat.leaves, *flat.local_leaves)}
    tied = {name for name, _ in (*flat.aliases, *flat.local_aliases)}
    assert "blob" in names
    assert tied
    assert unmatched((flat.tree, *flat.local.values()), names | tied) is None
    for name in names | tied:
        assert unmatched((flat.tree, *flat.local.values()), (names | tied) - {name}) is not None
