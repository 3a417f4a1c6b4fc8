"""What ranks of different structures say is stored whole, or refused: nothing is lost between them."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import everystep
from everystep.state import flatten
from everystep.state.merging import merge_trees
from everystep.store.ranks.checks.values import contradictions, facts_of
from support.worlds.launcher import launch, values

_SCALARS = st.sampled_from([None, True, 1, 1.0, "a", 2**70, float("nan"), b"x"])
_ARRAYS = st.builds(lambda: np.zeros(2))
_KEYS = st.sampled_from(["a", "b", "a.b", 1, "1", ("t", 1)])
_TREES = st.recursive(
    _SCALARS | _ARRAYS | st.frozensets(st.integers(0, 2)),
    lambda inner: (
        st.dictionaries(_KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.lists(inner, max_size=2).map(deque)
        | st.dictionaries(_KEYS, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)
_OPTIMIZERS = st.builds(
    lambda names, rates: {
        "state": {name: {"step": 1} for name in names},
        "param_groups": [{"lr": rate, "params": names} for rate in rates],
    },
    st.lists(st.sampled_from("uvw"), unique=True, max_size=3),
    st.lists(st.sampled_from([0.1, 0.2]), max_size=2),
)


@given(st.lists(_TREES | _OPTIMIZERS, min_size=2, max_size=3), st.booleans())
def test_trees_that_do_not_contradict_each_other_are_all_in_their_union(
    states: list[Any], inside: bool
) -> None:
    trees = [flatten({"x": state} if inside else state).tree for state in states]
    said = [facts_of(tree) for tree in trees]
    structure = {rank: facts.structure for rank, facts in enumerate(said)}
    plain = {rank: facts.values for rank, facts in enumerate(said)}
    if contradictions(structure) or contradictions(plain):
        return
    merged = facts_of(merge_trees(trees))
    for facts in said:
        assert facts.structure.items() <= merged.structure.items()
        assert facts.values.items() <= merged.values.items()


_W = np.arange(4.0)
CONTRADICTIONS = {
    "a value": ("epoch", lambda rank: {"epoch": rank}),
    "a list": ("seen", lambda rank: {"seen": list(range(rank + 1))}),
    "arrays in a list": ("parts", lambda rank: {"parts": [_W] * 1 if rank == 0 else [_W, _W + 1]}),
    "a set": ("names", lambda rank: {"names": {rank}}),
    "a kind": ("extra", lambda rank: {"extra": {} if rank == 0 else []}),
    "an array and a number": ("scale", lambda rank: {"scale": _W if rank == 0 else 1.0}),
    "a key with a dot": ("a.b", lambda rank: {"a.b": rank}),
    "a nested value": ("a.b.c", lambda rank: {"a": {"b": {"c": rank, str(rank): 0}}}),
    "a deque": ("last", lambda rank: {"last": deque([rank])}),
}


def _contradicting(run: Path) -> list[str]:
    import torch.distributed as dist

    rank = dist.get_rank()
    said = []
    for number, (place, make) in enumerate(CONTRADICTIONS.values()):
        state = {**make(rank), "layers": {f"l{rank}": _W + rank}}
        with pytest.raises(everystep.errors.RanksDisagree, match="cannot be stored as one") as caught:
            everystep.save(run / str(number), state, timeout=60.0)
        assert repr(place) in str(caught.value), str(caught.value)
        assert caught.value.ranks == (0, 1)
        assert not (run / str(number)).exists()
        said.append(place)
    return said


def test_what_ranks_of_other_structures_contradict_each_other_in_is_named(tmp_path: Path) -> None:
    found = values(launch(2, _contradicting, tmp_path))
    assert found == [[place for place, _ in CONTRADICTIONS.values()]] * 2


def _stages(run: Path) -> list[Any]:
    """Two stages of a pipeline, each with an optimizer of its own parameters."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    layer = torch.nn.Linear(3, 3)
    module = torch.nn.ModuleDict({f"stage{rank}": layer})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    state = {"model": module, "optimizer": optimizer, "epoch": 0}
    found: list[Any] = []
    with everystep.Checkpointer(run, state, mode="sync", timeout=60.0) as checkpointer:
        checkpointer.save(1)
        # Planned once; what changes later is compared in every save.
        optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        with pytest.raises(
            everystep.errors.RanksDisagree, match=r"optimizer\.param_groups\.0\.lr'"
        ) as caught:
            checkpointer.save(2)
        found.append(caught.value.ranks)
        optimizer.param_groups[0]["lr"] = 0.2
        state["epoch"] = 1
        checkpointer.save(3)
        optimizer.param_groups[0]["lr"] = 0.5
        assert checkpointer.restore() == 3
        return [*found, optimizer.param_groups[0]["lr"], state["epoch"], checkpointer.steps]


def test_stages_that_agree_are_stored_and_those_that_part_later_are_not(tmp_path: Path) -> None:
    assert values(launch(2, _stages, tmp_path)) == [[(0, 1), 0.2, 1, [1, 3]]] * 2


def _large_bytes(run: Path) -> list[Any]:
    """Bytes that are stored as a leaf. One of them changes where no sample would look."""
    import torch.distributed as dist

    blob = bytearray(1 << 20)
    state = {"blob": bytes(blob), "array": blob}
    found: list[Any] = []
    with everystep.Checkpointer(run, state, mode="sync", timeout=60.0) as checkpointer:
        checkpointer.save(1)
        blob[300_001] = dist.get_rank()
        for name, value in (("blob", bytes(blob)), ("array", blob)):
            state.update({"blob": bytes(1 << 20), "array": bytearray(1 << 20), name: value})
            with pytest.raises(everystep.errors.RanksDisagree, match=repr(name)) as caught:
                checkpointer.save(2)
            found.append(max(caught.value.ranks))
        state["array"] = bytearray(b"x" * 99_999)
        checkpointer.save(3)
        state["array"] = bytearray()
        checkpointer.restore()
        return [*found, bytes(state["array"][:2]), len(state["array"]), checkpointer.steps]


def test_large_bytes_that_part_are_not_stored(tmp_path: Path) -> None:
    assert values(launch(2, _large_bytes, tmp_path)) == [[1, 1, b"xx", 99_999, [1, 3]]] * 2


def _ties(run: Path) -> list[str]:
    import torch.distributed as dist

    rank = dist.get_rank()
    a, b, c = _W, _W + 5, _W
    found = []
    for number, state in enumerate(
        [
            {"a": a, "b": a if rank == 0 else b},
            {"a": a, "c": c.copy(), "b": a},
        ]
    ):
        if number == 1 and rank == 1:
            state["b"] = state["c"]
        with pytest.raises(everystep.errors.RanksDisagree, match="Tie it on all ranks") as caught:
            everystep.save(run / str(number), state, timeout=60.0)
        found.append(str(caught.value.leaf))
    info = everystep.save(run / "tied", {"a": a, "b": a}, timeout=60.0)
    return [*found, str(info.leaves)]


def test_names_tied_on_some_ranks_only_are_refused(tmp_path: Path) -> None:
    assert values(launch(2, _ties, tmp_path)) == [["b", "b", "1"]] * 2
