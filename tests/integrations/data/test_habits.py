"""Promise: whatever a loop's habits, every epoch is delivered once and whole, also across a restore.

Loops differ in how they end an epoch: most ask until there is no more, others count and never ask for one
more (Lightning, a step limit, `zip` with something shorter), or read ahead, in a thread even.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from everystep.integrations.data import Loader, Sampler, resumable
from support.states.datasets import joined, lists, plain, take

DATA = list(range(11))
EPOCHS = 3
Habit = Callable[[Any], Iterator[Any]]


def exhausting(loader: Any) -> Iterator[Any]:
    yield from loader


def counting(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    for _ in range(len(loader)):
        try:
            batch = next(iterator)
        except StopIteration:  # the rest of an epoch that was resumed has fewer
            return
        yield batch


def breaking(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader, 1):
        yield batch
        if number == len(loader):
            break


def breaking_early(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader, 1):
        yield batch
        if number == 2:
            break


def zipping(loader: Any) -> Iterator[Any]:
    for _, batch in zip(range(len(loader)), loader, strict=False):
        yield batch


def zipping_last(loader: Any) -> Iterator[Any]:
    for batch, _ in zip(loader, range(len(loader)), strict=False):
        yield batch


def slicing(loader: Any) -> Iterator[Any]:
    return islice(loader, len(loader))


HABITS = [exhausting, counting, breaking, breaking_early, zipping, zipping_last, slicing]


def one_ahead(loader: Any) -> Iterator[Any]:
    """Accelerate's: fetches the next batch before it hands out this one, to know which is the last."""
    iterator = iter(loader)
    held = list(islice(iterator, 1))
    while held:
        following = list(islice(iterator, 1))
        yield held[0]
        held = following


def one_ahead_counting(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    held = next(iterator)
    for _ in range(len(loader) - 1):
        following = next(iterator)
        yield held
        held = following
    yield held


def in_a_thread(loader: Any) -> Iterator[Any]:
    """Takes as many as there are from a thread, which asks for one more when it likes."""
    batches: queue.Queue[Any] = queue.Queue(maxsize=2)
    iterator = iter(loader)

    def fill() -> None:
        for batch in iterator:
            batches.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    for _ in range(len(loader)):
        yield batches.get(timeout=60)


AHEAD = [one_ahead, one_ahead_counting, in_a_thread]


def loaders(**how: Any) -> dict[str, Callable[[], Loader]]:
    data: Any = DATA

    def adopted(**more: Any) -> Loader:
        return resumable(DataLoader(data, **more, **how), seed=4)

    return {
        "divides": lambda: Loader(DATA[:9], batch_size=3, shuffle=True, **how),
        "with a rest": lambda: Loader(DATA, batch_size=4, shuffle=True, **how),
        "drops the rest": lambda: Loader(DATA, batch_size=4, shuffle=True, drop_last=True, **how),
        "single samples": lambda: Loader(DATA[:4], batch_size=None, shuffle=True, **how),
        "of a rank": lambda: Loader(DATA, batch_size=2, shuffle=True, rank=1, world=2, **how),
        "one batch": lambda: Loader(DATA, batch_size=20, shuffle=True, **how),
        "adopted": lambda: adopted(batch_size=4, shuffle=True),
        "adopted, drops": lambda: adopted(batch_size=4, shuffle=True, drop_last=True),
        "foreign sampler": lambda: adopted(batch_size=4, sampler=WeightedRandomSampler([1.0] * 11, 11)),
        "batch sampler": lambda: adopted(batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
        "own sampler": lambda: Loader(DATA, batch_size=4, sampler=Sampler(DATA, seed=2), **how),
    }


def whole_epochs(make: Callable[[], Loader], count: int = EPOCHS) -> list[list[Any]]:
    """What each epoch consists of, without going through those before it."""
    found = []
    for epoch in range(count):
        loader = make()
        loader.epoch = epoch
        found.append(lists(loader))
    return found


@pytest.mark.parametrize("habit", [*HABITS, *AHEAD])
@pytest.mark.parametrize("kind", loaders())
def test_every_pass_of_a_loop_is_an_epoch(kind: str, habit: Habit) -> None:
    make = loaders()[kind]
    loader = make()
    epochs: list[list[Any]] = []
    while len(joined(epochs)) < EPOCHS * len(loader):
        epochs.append(lists(habit(loader)))
        assert epochs[-1], "an empty epoch"
    if habit is breaking_early:
        epochs = [joined(epochs)[at : at + len(loader)] for at in range(0, EPOCHS * len(loader), len(loader))]
    assert epochs == whole_epochs(make)


@pytest.mark.parametrize("habit", [exhausting, counting, zipping, *AHEAD])
@pytest.mark.parametrize("kind", ["with a rest", "foreign sampler"])
@pytest.mark.parametrize("persistent", [False, True])
def test_every_pass_of_a_loop_is_an_epoch_with_workers(kind: str, habit: Habit, persistent: bool) -> None:
    loader = loaders(num_workers=1, timeout=240, persistent_workers=persistent)[kind]()
    assert [lists(habit(loader)) for _ in range(2)] == whole_epochs(loaders()[kind], 2)


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kind", loaders())
def test_saved_after_any_batch_the_loop_goes_on_with_the_next(kind: str, habit: Habit) -> None:
    make = loaders()[kind]
    wanted = joined(whole_epochs(make))
    first = make()
    states, seen = [], []
    while len(seen) < len(wanted):
        for batch in habit(first):
            seen.append(plain(batch))
            states.append(first.state_dict())
    assert seen == wanted
    for used, state in enumerate(states, 1):
        again = make()
        again.load_state_dict(state)
        at_an_end = used % len(again) == 0
        first_pass = lists(habit(again))
        assert (first_pass == []) == at_an_end, "an epoch that was over ends at once, and no other does"
        rest = first_pass
        while len(rest) < len(wanted) - used:
            found = lists(habit(again))
            assert found, "a second empty epoch"
            rest += found
        assert wanted[:used] + rest[: len(wanted) - used] == wanted


def test_a_step_back_to_the_end_of_an_epoch_ends_at_once_too() -> None:
    """A restore in the process that delivered it is a restore."""
    make = loaders()["with a rest"]
    loader = make()
    take(iter(loader), 3)
    state = loader.state_dict()
    take(iter(loader), 1)
    loader.load_state_dict(state)
    assert lists(loader) == []
    assert lists(loader) == whole_epochs(make)[1]


def test_between_two_epochs_a_counting_loop_can_say_that_the_next_one_begins() -> None:
    make = loaders()["with a rest"]
    loader = make()
    lists(counting(loader))
    assert (loader.epoch, loader.position) == (0, 3), "the end is known to who asks for it"
    loader.next_epoch()
    again = make()
    again.load_state_dict(loader.state_dict())
    assert lists(again) == whole_epochs(make)[1]


def test_an_iterator_made_but_not_used_begins_no_second_epoch() -> None:
    make = loaders()["with a rest"]
    loader = make()
    take(iter(loader), 3)
    iter(loader)
    assert loader.state_dict()["epoch"] == 1
    iter(loader)
    assert lists(loader) == whole_epochs(make)[1]


def test_an_iterator_that_gave_its_last_batch_just_ends_when_the_next_epoch_has_begun() -> None:
    loader = Loader(DATA, batch_size=4)
    old = iter(loader)
    take(old, 3)
    new = iter(loader)
    assert lists(old) == []
    assert loader.epoch == 1, "the old one must not end the new epoch"
    assert len(lists(new)) == 3


def test_ends_asked_for_by_two_threads_at_once_end_one_epoch() -> None:
    """A thread that reads ahead finds the end while the training begins its next epoch."""
    for _ in range(200):
        loader = Loader(DATA[:2])
        old = iter(loader)
        take(old, 2)
        start = threading.Barrier(2)

        def find_the_end(old: Iterator[Any] = old, start: threading.Barrier = start) -> None:
            start.wait(60)
            assert list(old) == []

        thread = threading.Thread(target=find_the_end)
        thread.start()
        start.wait(60)
        new = iter(loader)
        thread.join(60)
        assert loader.epoch == 1
        assert len(lists(new)) == 2


# --- the sampler alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("habit", HABITS)
def test_a_sampler_alone_is_as_patient(habit: Habit) -> None:
    wanted = joined([Sampler(5, seed=3).order(epoch).tolist() for epoch in range(EPOCHS)])
    sampler = Sampler(5, seed=3)
    states, seen = [], []
    while len(seen) < len(wanted):
        for index in habit(sampler):
            seen.append(index)
            states.append(sampler.state_dict())
    assert seen == wanted
    for used, state in enumerate(states, 1):
        again = Sampler(5, seed=3)
        again.load_state_dict(state)
        rest = list(habit(again))
        assert (rest == []) == (used % 5 == 0)
        while len(rest) < len(wanted) - used:
            found = list(habit(again))
            assert found, "a second empty epoch"
            rest += found
        assert seen[:used] + rest[: len(wanted) - used] == wanted


@pytest.mark.parametrize("habit", [exhausting, counting, zipping])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(None, False), (5, False), (5, True), (4, False)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_torch_over_our_sampler_has_no_empty_epoch(
    habit: Habit, batch_size: int | None, drop_last: bool, workers: int
) -> None:
    data: Any = DATA[:10]
    sampler: Any = Sampler(10, seed=3)
    loader: Any = DataLoader(
        data, batch_size=batch_size, sampler=sampler, drop_last=drop_last, num_workers=workers
    )
    for epoch in range(2):
        found = lists(habit(loader))
        assert (joined(found) if batch_size else found) == Sampler(10, seed=3).order(epoch).tolist()


def test_an_epoch_set_by_hand_is_not_skipped() -> None:
    sampler = Sampler(4, seed=3)
    take(iter(sampler), 4)
    sampler.epoch, sampler.position = 7, 0
    assert list(sampler) == Sampler(4, seed=3).order(7).tolist()


# --- an oracle ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("habit", [exhausting, counting, breaking, zipping, slicing])
@pytest.mark.parametrize("drop_last", [False, True])
def test_torchdata_delivers_as_many_batches_in_every_pass(habit: Habit, drop_last: bool) -> None:
    """Where the two mean the same: not after a loop that was left early, which torchdata starts again."""
    made = pytest.importorskip("torchdata.stateful_dataloader")

    def passes(loader: Any, again: Any) -> list[Any]:
        found: list[Any] = [lists(habit(loader)) for _ in range(3)]
        found.append(take(iter(loader), 2))
        again.load_state_dict(loader.state_dict())
        return found + [lists(habit(again)) for _ in range(3)]

    def theirs() -> Any:
        return made.StatefulDataLoader(DATA, batch_size=4, drop_last=drop_last)

    def ours() -> Loader:
        return Loader(DATA, batch_size=4, drop_last=drop_last)

    assert passes(ours(), ours()) == passes(theirs(), theirs())
