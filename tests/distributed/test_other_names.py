"""Restoring on several ranks what has other names, is tied, or decides by itself what it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS


class Old(nn.Module):
    """Knows its weight under an old name, too, and takes a history of any length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("history", torch.zeros(length))
        self.register_load_state_dict_pre_hook(self._upgrade)

    @staticmethod
    def _upgrade(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}w" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}w")
        module.history = torch.empty_like(state_dict[f"{prefix}history"])


class Model(nn.Module):
    def __init__(self, seed: int, length: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.old = Old(length)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def _saved() -> dict[str, torch.Tensor]:
    """As an older version wrote it, under DistributedDataParallel, with the tied weight once."""
    named = {
        "embed.weight": Model(0).embed.weight.detach(),
        "old.w": torch.arange(3.0),
        "old.history": torch.ones(7),
    }
    return {f"module.{key}": value.clone() for key, value in named.items()}


def _is_restored(model: Model) -> bool:
    saved = _saved()
    return (
        torch.equal(model.head.weight, saved["module.embed.weight"])
        and torch.equal(model.old.weight, saved["module.old.w"])
        and torch.equal(model.old.history, saved["module.old.history"])
    )


def _restore(folder: Path) -> list[Any]:
    found: list[Any] = []
    if torch.distributed.get_rank() == 0:
        torch.save({"model": _saved()}, folder / "old.pt")
    torch.distributed.barrier()
    for source in (folder / "own", folder / "old.pt"):
        if source.name == "own":
            everystep.save(source, {"model": _saved()}, step=9, timeout=PATIENCE_SECONDS)
        into = {"model": Model(1)}
        with pytest.raises(everystep.StateMismatch, match=re.escape('rename={"module.": ""}')):
            everystep.load(source, into, timeout=PATIENCE_SECONDS)
        everystep.load(source, into, rename={"module.": ""}, timeout=PATIENCE_SECONDS)
        found.append(_is_restored(into["model"]))
        state = {"model": Model(2, 3), "n": 0}
        run = folder / f"run-{source.name}"
        with everystep.Checkpointer(run, state, mode="sync", timeout=PATIENCE_SECONDS) as ckpt:
            found.append(ckpt.restore(init_from=source, rename={"module.": ""}))
            ckpt.save(1)
        found.append(_is_restored(state["model"]))
        again = {"model": nn.ModuleDict({"inner": Model(3)}), "n": 0}
        with everystep.Checkpointer(run, again, mode="sync", timeout=PATIENCE_SECONDS) as ckpt:
            found.append(ckpt.restore(rename={"": "inner."}))
        found.append(_is_restored(again["model"]["inner"]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_ties_and_deciding_modules_are_the_same_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    assert values(launch(ranks, _restore, tmp_path)) == [[True, 0, True, 1, True] * 2] * ranks


def _refuse(folder: Path) -> list[str]:
    found = []
    for number, name in enumerate(["module.surprise", "module.old.surprise", "module.embed.surprise"]):
        path = folder / f"own-{number}"
        everystep.save(path, {"model": {**_saved(), name: torch.ones(1)}}, timeout=PATIENCE_SECONDS)
        with pytest.raises(everystep.StateMismatch) as caught:
            everystep.load(path, {"model": Model(1, 7)}, rename={"module.": ""}, timeout=PATIENCE_SECONDS)
        found.append("surprise" in str(caught.value))
    return found


def test_a_leaf_that_no_rank_has_a_place_for_is_an_error_on_all(tmp_path: Path) -> None:
    assert values(launch(2, _refuse, tmp_path)) == [[True, True, True]] * 2
