"""Promise: loaders and samplers made for torch become resumable, or are told why they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from everystep.errors import StateMismatch, UnsupportedState
from everystep.integrations.data import Loader, Sampler, resumable
from support.states.datasets import Augmented, Stream, jitter, joined, lists, take

DATA = list(range(20))


def loaders() -> dict[str, Any]:
    weighted = WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 20)
    owned = RandomSampler(DATA, replacement=True, num_samples=50, generator=torch.Generator())
    spread = DistributedSampler(DATA, num_replicas=2, rank=1)  # type: ignore[arg-type]
    batches = BatchSampler(RandomSampler(DATA), 3, drop_last=True)
    return {
        "sequential": DataLoader(DATA, batch_size=3),  # type: ignore[arg-type]
        "shuffled": DataLoader(DATA, batch_size=3, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        "unbatched": DataLoader(DATA, batch_size=None, shuffle=True),  # type: ignore[arg-type]
        "weighted": DataLoader(DATA, batch_size=3, sampler=weighted),  # type: ignore[arg-type]
        "subset": DataLoader(DATA, sampler=SubsetRandomSampler(range(7))),  # type: ignore[arg-type]
        "owned": DataLoader(DATA, batch_size=4, sampler=owned),  # type: ignore[arg-type]
        "distributed": DataLoader(DATA, batch_size=3, sampler=spread),  # type: ignore[arg-type]
        "batches": DataLoader(DATA, batch_sampler=batches),  # type: ignore[arg-type]
        "lists": DataLoader(DATA, batch_sampler=[[1, 2], [3], [4, 5, 6]]),  # type: ignore[arg-type]
        "part": DataLoader(DATA, sampler=SequentialSampler(range(5))),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("kind", loaders())
def test_a_loader_of_torch_continues(kind: str) -> None:
    loader = resumable(loaders()[kind], seed=3)
    torch.manual_seed(1)
    before = torch.get_rng_state().tolist()
    lists(loader)
    first = take(iter(loader), 2)
    state = loader.state_dict()
    rest = lists(loader)
    assert torch.get_rng_state().tolist() == before
    torch.manual_seed(2)
    again = resumable(loaders()[kind], seed=3)
    again.load_state_dict(state)
    assert lists(again) == rest
    assert len(first) + len(rest) == len(loader) == len(loaders()[kind])
    assert again.epoch == 2


def test_samplers_give_what_they_promise() -> None:
    made = {kind: lists(resumable(loader)) for kind, loader in loaders().items()}
    assert made["sequential"] == lists(loaders()["sequential"])
    assert made["lists"] == [[1, 2], [3], [4, 5, 6]]
    assert made["part"] == [[0], [1], [2], [3], [4]]
    assert sorted(made["unbatched"]) == DATA
    assert len(made["shuffled"]) == 6
    assert sorted(joined(made["subset"])) == list(range(7))
    assert len(joined(made["distributed"])) == 10
    two = resumable(loaders()["distributed"])
    assert lists(two) != lists(two), "set_epoch was not called"
    again = resumable(loaders()["weighted"])
    assert lists(again) != lists(again)


def test_ranks_of_a_distributed_sampler_share_one_state_and_have_their_own_numbers() -> None:
    def make(rank: int) -> Loader:
        spread = DistributedSampler(DATA, num_replicas=2, rank=rank)  # type: ignore[arg-type]
        return resumable(DataLoader(DATA, batch_size=2, sampler=spread, collate_fn=draw))  # type: ignore[arg-type]

    ranks = [make(0), make(1)]
    assert take(iter(ranks[0]), 2) != take(iter(ranks[1]), 2)
    assert ranks[0].state_dict() == ranks[1].state_dict()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_another_number_of_ranks_takes_over_from_a_distributed_sampler(
    shuffle: bool, drop_last: bool
) -> None:
    def make(rank: int, world: int) -> Loader:
        spread = DistributedSampler(
            DATA,  # type: ignore[arg-type]
            num_replicas=world,
            rank=rank,
            shuffle=shuffle,
            seed=7,
            drop_last=drop_last,
        )
        loader = DataLoader(DATA, batch_size=2, sampler=spread)  # type: ignore[arg-type]
        made = resumable(loader)
        assert len(made) == len(loader)
        if not shuffle:
            assert lists(made) == lists(loader), "another share"
            made.epoch = 0
        return made

    three, two = [make(rank, 3) for rank in range(3)], [make(rank, 2) for rank in range(2)]
    given = joined(joined([take(iter(loader), 2) for loader in three]))
    for loader in two:
        loader.load_state_dict(three[0].state_dict())
        given += joined(lists(loader))
    assert sorted(given) == DATA
    assert {loader.seed for loader in (*two, *three)} == {7}


def draw(samples: list[int]) -> float:
    return torch.rand(()).item()


def test_settings_are_taken_over() -> None:
    loader = DataLoader(
        Augmented(),
        batch_size=4,
        num_workers=1,
        collate_fn=jitter,
        prefetch_factor=3,
        timeout=60,
        shuffle=True,
    )
    made = resumable(loader, seed=5)
    assert (made._torch.num_workers, made._torch.prefetch_factor, made._torch.timeout) == (1, 3, 60)
    assert made.batch_size == 4
    direct = Loader(Augmented(), batch_size=4, shuffle=True, seed=5, collate_fn=jitter)
    assert lists(made) == lists(direct)


def test_a_sampler_of_ours_keeps_its_seed_and_its_share() -> None:
    def make() -> Loader:
        return Loader(DATA, batch_size=2, sampler=Sampler(DATA, seed=9, rank=1, world=2))

    assert joined(lists(make())) == Sampler(DATA, seed=9, rank=1, world=2).order(0).tolist()
    loader = make()
    take(iter(loader), 2)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert lists(again) == lists(loader)


class Unrepeatable:
    """A sampler with a generator of its own that starts anywhere."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.permutation(20).tolist())


def test_a_sampler_that_cannot_be_repeated_is_found_out() -> None:
    loader = Loader(DATA, batch_size=2, sampler=Unrepeatable())
    take(iter(loader), 3)
    assert len(lists(loader)) == 7, "without a restore it may draw as it likes"
    take(iter(loader), 3)
    again = Loader(DATA, batch_size=2, sampler=Unrepeatable())
    again.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="order for epoch 1 differs"):
        next(iter(again))


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def test_what_cannot_be_adopted_says_why() -> None:
    with pytest.raises(UnsupportedState, match="has no length"):
        Loader(DATA, sampler=Endless())
    with pytest.raises(UnsupportedState, match="StatefulDataLoader"):
        resumable(DataLoader(Stream(5)))
    with pytest.raises(UnsupportedState, match="not a torch DataLoader"):
        resumable([1, 2])
