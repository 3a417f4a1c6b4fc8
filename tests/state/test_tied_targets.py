"""Promise: what shares memory with a restored leaf is restored, under whichever of its names it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.errors import StateMismatch
from support.foreign.foreign_checkpoints import write_hf
from support.states.memory_store import restore, save


class Tied(nn.Module):
    """As GPT-2: the head is the embedding. Hugging Face stores it once, as the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def stored_once(model: nn.Module, without: str = "head.weight") -> dict[str, Any]:
    return {key: value.clone() for key, value in model.state_dict().items() if key != without}


@pytest.mark.parametrize("without", ["head.weight", "embed.weight"])
@pytest.mark.parametrize("hooked", [False, True])
def test_one_name_is_enough(without: str, hooked: bool) -> None:
    source, target = Tied(0), Tied(1)
    if hooked:
        target.register_load_state_dict_post_hook(lambda *rest: None)
    restore({"model": target}, save({"model": stored_once(source, without)}))
    assert target.head.weight is target.embed.weight
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value), key


def test_untied_parts_are_still_missing() -> None:
    target = Tied(1)
    target.head.weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(StateMismatch) as caught:
        restore({"model": target}, save({"model": stored_once(Tied(0))}))
    assert caught.value.missing == ("model.head.weight",)


def test_a_leaf_that_is_not_restored_restores_nothing_that_is_tied_to_it() -> None:
    saved = stored_once(Tied(0))
    saved["embed.weight"] = torch.zeros(6, 4)
    with pytest.raises(StateMismatch) as caught:
        restore({"model": Tied(1)}, save({"model": saved}))
    assert caught.value.missing == ("model.head.weight",)
    assert caught.value.wrong == ("model.embed.weight: checkpoint F32[6,4], target F32[5,4]",)


def test_ties_between_parts_of_the_state() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        encoder, head = nn.Linear(3, 3), nn.Linear(3, 3)
        head.weight, head.bias = encoder.weight, encoder.bias
        return {"head": head, "first": [encoder.weight.detach()[0]], "encoder": encoder}

    source, target = make(0), make(1)
    restore(target, save({"encoder": source["encoder"]}))
    for one, other in zip(source["head"].parameters(), target["head"].parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(target["first"][0], source["encoder"].weight[0])


def test_arrays_that_are_partly_tied_are_missing() -> None:
    base = np.zeros(6)
    with pytest.raises(StateMismatch) as caught:
        restore({"a": base[:4], "b": base[2:], "c": base[1:3]}, save({"a": np.ones(4)}))
    assert caught.value.missing == ("b",)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_hugging_face_go_into_a_tied_model(tmp_path: Path, strict: bool) -> None:
    source, target = Tied(0), Tied(1)
    bare = nn.Module()
    for key, value in stored_once(source).items():
        bare.register_buffer(key.replace(".", "__"), value)
    path = write_hf(tmp_path / "hf", bare)
    given = {"re:(.*)__(.*)": "\\1.\\2"}
    rules = [everystep.universal.rule(old, everystep.universal.rename(new)) for old, new in given.items()]
    everystep.load(path, into={"model": target}, rename=rules, strict=strict)
    assert torch.equal(target.head.weight, source.embed.weight)
    fresh = Tied(2)
    state = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        with pytest.warns(RuntimeWarning, match="left 'optimizer' as it was"):
            assert ckpt.restore(init_from=path, rename=rules) == 0
        ckpt.save(1)
    assert torch.equal(fresh.head.weight, source.embed.weight)
    assert torch.equal(fresh.norm.weight, source.norm.weight)
