"""Promise: a loader continues with the very next batch, and what came before it is not loaded again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everystep
from everystep.errors import StateMismatch, UnsupportedState
from everystep.integrations.data import Loader, Sampler
from support.states.datasets import (
    Augmented,
    Failing,
    Noted,
    Stream,
    Together,
    jitter,
    joined,
    lists,
    plain,
    take,
)


def global_states() -> tuple[Any, ...]:
    legacy = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        (legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]),
        torch.get_rng_state().tolist(),
    )


# --- epochs -------------------------------------------------------------------------------------------------


def test_a_loop_is_an_epoch_and_every_epoch_has_another_order() -> None:
    loader = Loader(range(10), batch_size=4, shuffle=True)
    epochs = [lists(loader) for _ in range(3)]
    assert loader.epoch == 3
    assert len(loader) == 3 == len(epochs[0])
    assert all(sorted(joined(epoch)) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    other = Loader(range(10), batch_size=4, shuffle=True, seed=1)
    assert lists(other) != epochs[0]
    assert lists(Loader(range(10), batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert lists(Loader(range(10), batch_size=4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(
    length=st.integers(0, 30),
    batch_size=st.none() | st.integers(1, 12),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    stop=st.integers(0, 70),
    seed=st.integers(0, 2**70),
)
@settings(max_examples=60)
def test_before_and_after_a_resume_are_the_uninterrupted_sequence(
    length: int, batch_size: int | None, drop_last: bool, shuffle: bool, stop: int, seed: int
) -> None:
    def make(seed: int) -> Loader:
        how: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
        return Loader(range(length), shuffle=shuffle, seed=seed, **how)

    def epochs(loader: Loader, end: int = 3) -> list[tuple[int, Any]]:
        found = []
        while loader.epoch < end:
            number = loader.epoch
            found += [(number, plain(batch)) for batch in loader]
        return found

    whole = epochs(make(seed))
    first = make(seed)
    before: list[tuple[int, Any]] = []
    while first.epoch < 3 and len(before) < stop:
        number = first.epoch
        for batch in first:
            before.append((number, plain(batch)))
            if len(before) == stop:
                break
    second = make(seed + 1)
    second.load_state_dict(first.state_dict())
    assert before + epochs(second) == whole


def test_saving_after_the_last_batch_resumes_at_the_end_of_the_epoch_not_beyond_it() -> None:
    """What a training does between epochs (validation, schedulers) has not happened yet at that save."""
    loader = Loader(range(6), batch_size=2, shuffle=True)
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 1), (0, 2), (0, 3)]
    assert (loader.epoch, loader.position) == (1, 0)
    again = Loader(range(6), batch_size=2, shuffle=True)
    again.load_state_dict(states[-1])
    assert lists(again) == []
    assert lists(again) == lists(loader)


def test_leaving_a_loop_early_goes_on_with_the_same_epoch() -> None:
    loader = Loader(range(10), batch_size=2, shuffle=True)
    whole = lists(Loader(range(10), batch_size=2, shuffle=True))
    first = []
    for batch in loader:
        first.append(plain(batch))
        if len(first) == 2:
            break
    assert first + lists(loader) == whole
    assert loader.epoch == 1


def test_the_rest_of_an_epoch_can_be_abandoned() -> None:
    loader, other = (Loader(range(10), batch_size=2, shuffle=True) for _ in range(2))
    lists(other)
    take(iter(loader), 2)
    loader.next_epoch()
    assert lists(loader) == lists(other)
    loader.epoch = 1
    other.epoch = 1
    assert lists(loader) == lists(other)
    with pytest.raises(ValueError, match="epoch must be"):
        loader.epoch = -1


def test_a_restore_in_the_middle_of_a_loop_takes_effect_at_the_next_batch() -> None:
    """As after a loss that went astray; also when the iterator was made before the restore."""
    loader = Loader(range(12), batch_size=2, shuffle=True)
    iterator = iter(loader)
    take(iterator, 1)
    state = loader.state_dict()
    wanted = take(iterator, 3)
    loader.load_state_dict(state)
    assert take(iterator, 3) == wanted
    again = Loader(range(12), batch_size=2, shuffle=True)
    early = iter(again)
    again.load_state_dict(state)
    assert take(early, 3) == wanted


def test_two_loops_over_one_loader_are_noticed() -> None:
    loader = Loader(range(10), batch_size=2)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert plain(next(second)) == [2, 3]
    with pytest.raises(RuntimeError, match="took over its position"):
        next(first)
    assert plain(next(second)) == [4, 5]


def test_an_iterator_that_has_ended_stays_ended() -> None:
    loader = Loader(range(2))
    iterator = iter(loader)
    assert lists(iterator) == [[0], [1]]
    assert lists(iterator) == []
    assert loader.epoch == 1


# --- without replaying --------------------------------------------------------------------------------------


def test_resuming_touches_no_sample_that_was_delivered(tmp_path: Path) -> None:
    loader = Loader(Noted(20, tmp_path / "before"), batch_size=3, shuffle=True)
    delivered = joined(take(iter(loader), 4))
    everystep.save(tmp_path / "c", {"data": loader})
    dataset = Noted(20, tmp_path / "after")
    again = Loader(dataset, batch_size=3, shuffle=True)
    everystep.load(tmp_path / "c", into={"data": again})
    rest = joined(lists(again))
    assert dataset.accesses() == rest
    assert sorted(delivered + rest) == list(range(20))


def test_it_goes_through_a_checkpointer_at_every_step(tmp_path: Path) -> None:
    def train(run: Path, until: int) -> list[Any]:
        loader = Loader(Augmented(), batch_size=4, shuffle=True, seed=5, collate_fn=jitter)
        seen = []
        with everystep.Checkpointer(run, {"data": loader, "rng": everystep.rng()}, mode="sync") as ckpt:
            step = ckpt.restore()
            while step < until:
                for batch in loader:
                    seen.append((plain(batch), torch.rand(()).item()))
                    step += 1
                    ckpt.save(step)
                    if step == until:
                        break
        return seen

    torch.manual_seed(3)
    whole = train(tmp_path / "whole", 14)
    torch.manual_seed(3)
    parts = train(tmp_path / "parts", 5)
    torch.manual_seed(4)
    parts += train(tmp_path / "parts", 6)  # 6 batches are an epoch: saved at its exact end
    torch.manual_seed(5)
    assert parts + train(tmp_path / "parts", 14) == whole


# --- random numbers -----------------------------------------------------------------------------------------


def test_augmentation_depends_on_the_place_and_leaves_the_global_generators_alone() -> None:
    def run(mess: int) -> list[Any]:
        found = []
        for batch in Loader(Augmented(), batch_size=4, shuffle=True, seed=5, collate_fn=jitter):
            found.append(plain(batch))
            random.seed(mess), np.random.seed(mess), torch.manual_seed(mess)
            random.gauss(0, 1), np.random.randn()
        return found

    whole = run(1)
    assert run(2) == whole
    loader = Loader(Augmented(), batch_size=4, shuffle=True, seed=5, collate_fn=jitter)
    before = global_states()
    iterator = iter(loader)
    take(iterator, 2)
    assert global_states() == before
    state = loader.state_dict()
    again = Loader(Augmented(), batch_size=4, shuffle=True, seed=5, collate_fn=jitter)
    again.load_state_dict(state)
    assert lists(again) == whole[2:]
    assert global_states() == before
    other = Loader(Augmented(), batch_size=4, shuffle=True, seed=6, collate_fn=jitter)
    assert plain(next(iter(other))) != whole[0]


def test_no_two_batches_epochs_or_ranks_draw_the_same_numbers() -> None:
    seen = set()
    for rank in (0, 1):
        loader = Loader([0] * 8, batch_size=1, rank=rank, world=2, collate_fn=lambda _: random.random())
        seen |= {*loader, *loader}
    assert len(seen) == 16


def test_another_bit_generator_under_numpys_global_functions_works_too() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        first, second = (lists(Loader(Augmented(), batch_size=4)) for _ in range(2))
        assert first == second
    finally:
        np.random.set_bit_generator(before)


# --- the settings of torch's loader -------------------------------------------------------------------------


def test_single_samples_batched_fetching_and_collating() -> None:
    assert lists(Loader(range(3), batch_size=None)) == [0, 1, 2]
    assert lists(Loader(Together(), batch_size=4, collate_fn=list)) == [
        [0, 10, 20, 30],
        [40, 50, 60, 70],
        [80, 90],
    ]
    pairs = Loader([{"x": i, "y": -i} for i in range(4)], batch_size=2)
    assert [{key: value.tolist() for key, value in batch.items()} for batch in pairs][1] == {
        "x": [2, 3],
        "y": [-2, -3],
    }


def test_ranks_share_an_epoch() -> None:
    shares = [lists(Loader(range(10), batch_size=2, shuffle=True, rank=r, world=2)) for r in (0, 1)]
    assert len(shares[0]) == len(shares[1]) == 3
    assert sorted(joined(joined(shares))) == list(range(10))
    states = [Loader(range(10), rank=r, world=2).state_dict() for r in (0, 1)]
    assert states[0] == states[1], "one state for all ranks"


@pytest.mark.parametrize("workers", [0, 2])
def test_other_ranks_and_batches_go_on_with_the_rest(workers: int, tmp_path: Path) -> None:
    """4 ranks with 3 samples each, then 2 with 5, then 1 with 4: every sample once, then a whole epoch."""
    common = Sampler(101, seed=8).order(1).tolist()
    given: list[int] = []
    saved: Path | None = None
    for world, size, steps in ((4, 3, 2), (2, 5, 3), (1, 4, None)):
        ranks = [
            Loader(
                range(101),
                batch_size=size,
                shuffle=True,
                seed=8,
                rank=rank,
                world=world,
                num_workers=workers if rank == 0 else 0,
            )
            for rank in range(world)
        ]
        for loader in ranks:
            if saved is None:
                loader.epoch = 1
            else:
                everystep.load(saved, into={"data": loader})
        shares = [joined(lists(loader) if steps is None else take(iter(loader), steps)) for loader in ranks]
        given += joined(list(zip(*shares, strict=True)))
        saved = tmp_path / str(world)
        everystep.save(saved, {"data": ranks[0]})
    assert given == common
    assert (loader.epoch, loader.position, loader.dealt) == (2, 0, 0)
    assert joined(lists(loader)) == Sampler(101, seed=8).order(2).tolist()


def test_batches_after_a_change_of_ranks_have_random_numbers_of_their_own() -> None:
    def make(world: int, workers: int = 0) -> Loader:
        options: dict[str, Any] = {"collate_fn": jitter, "num_workers": workers}
        return Loader(Augmented(), batch_size=2, shuffle=True, rank=0, world=world, **options)

    first = make(2)
    before = next(iter(first))
    one, same = make(1), make(1, workers=2)
    one.load_state_dict(first.state_dict())
    same.load_state_dict(first.state_dict())
    after = list(one)
    assert (before[:, 1:] - before[:, :1]).tolist() != (after[0][:, 1:] - after[0][:, :1]).tolist()
    assert all(map(torch.equal, after, list(same))), "not repeatable"
    midway = make(1)
    midway.load_state_dict(first.state_dict())
    next(iter(midway))
    again = make(1)
    again.load_state_dict(midway.state_dict())
    assert again.dealt == 4
    assert all(map(torch.equal, after[1:], list(again)))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"generator": torch.Generator()}, "follow from `seed`"),
        ({"in_order": False}, "cannot be repeated"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": None, "drop_last": True}, "none to drop"),
        ({"sampler": [1, 2], "shuffle": True}, "a sampler decides"),
        ({"sampler": [1, 2], "world": 2}, "a sampler decides"),
        ({"batch_sampler": [[1, 2]], "batch_size": 3}, "takes the place"),
        ({"seed": -1}, "seed must be"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
    ],
)
def test_settings_that_make_no_sense_are_refused(how: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Loader(range(10), **how)


def test_numbers_of_any_library_will_do() -> None:
    four = np.int64(4)
    loader = Loader(range(10), batch_size=four, shuffle=True, seed=four, rank=np.int8(1), world=np.uint8(2))
    loader.epoch = four
    same = Loader(range(10), batch_size=4, shuffle=True, seed=4, rank=1, world=2)
    same.epoch = 4
    assert repr(loader.state_dict()) == repr(same.state_dict())
    assert lists(loader) == lists(same)
    assert len(Sampler(np.int64(9))) == 9


def test_an_iterable_dataset_is_refused_with_an_alternative() -> None:
    with pytest.raises(UnsupportedState, match="StatefulDataLoader"):
        Loader(Stream(5))


# --- what does not fit, and what fails ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"dataset": range(11)}, "samples in the dataset: 10 when saved, 11 now"),
        ({"drop_last": True}, "drop_last"),
        ({"shuffle": False}, "shuffle"),
        ({"sampler": Sampler(10), "shuffle": False}, "sampler_seed"),
    ],
    ids=["length", "drop last", "shuffle", "sampler"],
)
def test_a_position_in_other_data_is_refused(how: dict[str, Any], match: str, tmp_path: Path) -> None:
    loader = Loader(range(10), batch_size=2, shuffle=True)
    take(iter(loader), 2)
    everystep.save(tmp_path / "c", {"data": loader})
    target = Loader(**{"dataset": range(10), "batch_size": 2, "shuffle": True, **how})
    with pytest.raises(StateMismatch, match=match):
        everystep.load(tmp_path / "c", into={"data": target})
    assert (target.epoch, target.position) == (0, 0)
    with pytest.raises(StateMismatch, match="not that of a Loader"):
        target.load_state_dict({"step": 5})


def test_a_batch_that_failed_is_made_again(tmp_path: Path) -> None:
    dataset = Failing(5, tmp_path / "back", OSError)
    loader = Loader(dataset, batch_size=2)
    iterator = iter(loader)
    assert take(iterator, 2) == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="file server"):
        next(iterator)
    assert loader.position == 2
    dataset.marker.touch()
    assert take(iterator, 2) == [[4, 5], [6, 7]]


def test_an_interrupt_while_a_batch_is_made_loses_no_batch(tmp_path: Path) -> None:
    dataset = Failing(5, tmp_path / "back", KeyboardInterrupt)
    iterator = iter(Loader(dataset, batch_size=2))
    take(iterator, 2)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    dataset.marker.touch()
    assert take(iterator, 2) == [[4, 5], [6, 7]]


def test_a_dataset_that_stops_early_is_not_taken_for_the_end_of_the_epoch(tmp_path: Path) -> None:
    loader = Loader(Failing(5, tmp_path / "back", StopIteration), batch_size=2)
    with pytest.raises(RuntimeError, match="ended at batch 2 of 6"):
        lists(loader)
    assert (loader.epoch, loader.position) == (0, 2)
