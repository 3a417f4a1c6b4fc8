"""Promise: the order of the samples follows from seed and epoch, and continues where it stopped."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import everystep
from everystep.errors import StateMismatch
from everystep.integrations.data import Sampler
from support.states.datasets import lists


def test_every_epoch_has_an_order_of_its_own_and_holds_every_sample() -> None:
    sampler = Sampler(50, seed=1)
    epochs = [list(sampler) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(Sampler(50, seed=1)) == epochs[0] != list(Sampler(50, seed=2))
    assert Sampler(50, seed=1).order(2).tolist() == epochs[2], "an order depends on the epochs before it"
    assert sampler.epoch == 3


def test_the_order_is_the_same_in_every_version() -> None:
    """Written down: a checkpoint of today must mean the same samples in years."""
    assert Sampler(10, seed=7).order(0).tolist() == [2, 8, 1, 3, 7, 6, 0, 4, 5, 9]
    assert Sampler(10, seed=7).order(1).tolist() == [2, 5, 7, 3, 0, 4, 6, 9, 8, 1]


def test_no_global_generator_is_read_or_moved() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = list(Sampler(20))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert list(Sampler(20)) == first


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    assert list(Sampler(["a", "b", "c"], shuffle=False)) == [0, 1, 2]


@given(
    length=st.integers(0, 40),
    world=st.integers(1, 7),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    stop=st.integers(0, 40),
)
def test_ranks_share_every_sample_evenly(
    length: int, world: int, shuffle: bool, epoch: int, stop: int
) -> None:
    def split(uneven: Any) -> list[list[int]]:
        made = [Sampler(length, shuffle=shuffle, rank=r, world=world, uneven=uneven) for r in range(world)]
        return [sampler.order(epoch).tolist() for sampler in made]

    padded, dropped = split("pad"), split("drop")
    assert len({len(share) for share in padded}) == len({len(share) for share in dropped}) == 1
    assert set(chain(*padded)) == set(range(length))
    assert sum(map(len, padded)) - length < world
    assert len(set(chain(*dropped))) == sum(map(len, dropped)) > length - world
    whole = Sampler(length, shuffle=shuffle).order(epoch).tolist()
    assert [index for turn in zip(*padded, strict=True) for index in turn][:length] == whole

    before = Sampler(length, shuffle=shuffle, rank=world - 1, world=world)
    before.epoch = epoch
    iterator = iter(before)
    taken = list(islice(iterator, stop))
    after = Sampler(length, shuffle=shuffle, rank=world - 1, world=world)
    state = before.state_dict()
    after.load_state_dict(state)
    rest = list(after) if state["epoch"] == epoch else []
    assert taken + rest == padded[-1]
    assert after.epoch == epoch + 1


def test_it_continues_through_a_checkpoint_and_takes_the_saved_seed(tmp_path: Path) -> None:
    sampler = Sampler(9, seed=4)
    iterator = iter(sampler)
    for _ in range(5):
        next(iterator)
    everystep.save(tmp_path / "c", {"order": sampler})
    rest = list(iterator) + list(sampler)
    again = Sampler(9, seed=5)
    everystep.load(tmp_path / "c", into={"order": again})
    assert list(again) + list(again) == rest
    assert again.seed == 4


def test_a_plain_loader_without_workers_can_use_it() -> None:
    sampler = Sampler(10, seed=3)
    loader = DataLoader(range(10), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    state = sampler.state_dict()
    rest = lists(iterator)
    sampler.load_state_dict(state)
    assert lists(loader) == rest


@pytest.mark.parametrize(
    "other",
    [{"source": 11}, {"shuffle": False}, {"uneven": "drop"}],
    ids=lambda other: next(iter(other)),
)
def test_a_position_in_another_order_is_refused(other: dict[str, Any]) -> None:
    state = Sampler(10).state_dict()
    target = Sampler(**{"source": 10, "seed": 3, **other})
    with pytest.raises(StateMismatch, match="another order of samples"):
        target.load_state_dict(state)
    assert target.seed == 3
    with pytest.raises(StateMismatch, match="not that of a Sampler"):
        target.load_state_dict({"step": 5})


@given(
    length=st.integers(0, 60),
    worlds=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    steps=st.integers(0, 20),
    uneven=st.sampled_from(["pad", "drop"]),
)
def test_other_ranks_share_the_rest_of_an_epoch(
    length: int, worlds: list[int], steps: int, uneven: Any
) -> None:
    """Again and again within one epoch: the common order goes on where the last ranks have left it."""
    common = Sampler(length, seed=5).order(0).tolist()
    state = Sampler(length, seed=5, world=worlds[0], uneven=uneven).state_dict()
    given: list[int] = []
    for number, world in enumerate(worlds):
        ranks = [Sampler(length, rank=rank, world=world, uneven=uneven) for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        last = number == len(worlds) - 1
        shares = [list(rank) if last else list(islice(rank, steps)) for rank in ranks]
        assert len({len(share) for share in shares}) == 1, "ranks would wait for each other"
        given += chain(*zip(*shares, strict=True))
        assert len({repr(rank.state_dict()) for rank in ranks}) == 1
        state = ranks[0].state_dict()
        if state["epoch"]:
            break
    assert (state["epoch"], state["position"], state["dealt"]) == (1, 0, 0)
    if uneven == "pad":
        assert given[:length] == common, "left out, or twice"
        assert given[length:] == (common * 7)[: len(given) - length], "filled up with the first of the order"
        assert len(given) - length < 7
    else:
        assert given == common[: len(given)]
        assert length - len(given) < 7


def test_an_epoch_that_was_over_stays_over_for_other_ranks() -> None:
    """What did not divide was left out of that epoch, and is no epoch of its own for fewer ranks."""
    before = Sampler(10, world=4, uneven="drop")
    assert len(list(islice(before, 2))) == 2
    after = Sampler(10, world=1, uneven="drop")
    after.load_state_dict(before.state_dict())
    assert list(after) == []
    assert (after.epoch, len(list(after))) == (1, 10)


def test_a_state_of_before_ranks_could_change_is_read() -> None:
    state = Sampler(10, seed=3, world=2).state_dict()
    del state["dealt"]
    one = Sampler(10)
    one.load_state_dict({**state, "position": 2})
    assert list(one) == Sampler(10, seed=3).order(0).tolist()[4:]


def test_neither_the_name_nor_a_sampler_imports_torch() -> None:
    script = """
        import sys
        from everystep.integrations.data import Loader, Sampler, resumable
        assert Loader and resumable and sorted(Sampler(3)) == [0, 1, 2]
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"seed": 1.5}, {"rank": 2, "world": 2}, {"world": 0}, {"uneven": "x"}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Sampler(10, **wrong)
