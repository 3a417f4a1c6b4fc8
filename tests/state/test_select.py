"""Promise: a tree cut down to some leaves still builds, with the rest left out."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch

from everystep.state import flatten, leaf_names, prune, unflatten


def cut(state: object, keep: set[str]) -> Any:
    flat = flatten(state)
    return unflatten(prune(flat.tree, keep), {leaf.name: leaf.source.owner for leaf in flat.leaves})


def test_mappings_lose_entries_and_sequences_keep_places() -> None:
    a, b = np.zeros(1), np.zeros(2)
    state = {
        "x": {"a": a, "n": 1},
        "l": [a + 1, b, 5],
        "o": OrderedDict(p=b + 1),
        3: (b + 2, deque([a + 2], 4)),
    }
    back = cut(state, {"x.a", "l.1", "3.1.0"})
    assert list(back) == ["x", "l", 3]
    assert back["x"] == {"a": a}
    assert back["l"] == [None, b, None]
    assert back[3][0] is None
    assert back[3][1].maxlen == 4


def test_nothing_kept_is_an_empty_mapping() -> None:
    assert cut({"a": np.zeros(1)}, set()) == {}


def test_a_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    back = cut(state, {"bias"})
    assert list(back) == ["bias"]
    assert back._metadata == state._metadata
    assert list(leaf_names(prune(flatten(state).tree, {"bias"}))) == ["bias"]
