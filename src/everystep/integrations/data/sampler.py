"""`Sampler`: the order of a dataset's samples, epoch by epoch, as a function of a seed.

Owns the permutation of an epoch and its split among ranks, and how another number of them goes on with it.
Nothing here draws from a global generator, so the order of any epoch can be told without having gone through
those before it.

Every rank takes each `world`-th index, and all take equally many: so what ranks have been given together is
always a beginning of the common order, and its length is all that others need to know (`dealt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from everystep.errors import StateMismatch
from everystep.integrations.data import seeding
from everystep.integrations.data.seeding import whole

Uneven = Literal["pad", "drop"]


class Sampler:
    """Indices of a dataset, in another random order in every epoch, that continue where they stopped.

    Iterating gives the rest of the current epoch; then the next one begins, also when the last index was
    taken without asking for one more. The order depends on `seed` and the number of the epoch only. Another
    number of ranks may load a position: they share the rest of the epoch.

    Args:
        source: The dataset, or its length.
        shuffle: Shuffle every epoch. Otherwise the indices come in order.
        seed: What the order follows from.
        rank: The number of this process: it gets every `world`-th index of the common order, from this one
            on.
        world: How many processes share the indices. All get equally many.
        uneven: What to do if the length does not divide by `world`. ``"pad"`` gives every sample to some rank
            and repeats the first of the order to fill up; ``"drop"`` leaves the last of the order out.

    >>> sampler = Sampler(5, seed=3)
    >>> first = [next(iter(sampler)), next(iter(sampler))]
    >>> state = sampler.state_dict()
    >>> rest = list(sampler)
    >>> sorted(first + rest), sampler.epoch
    ([0, 1, 2, 3, 4], 1)
    >>> again = Sampler(5, seed=3)
    >>> again.load_state_dict(state)
    >>> list(again) == rest
    True

    The position is that of the indices handed out. A ``DataLoader`` with workers asks for them ahead of the
    training: `Loader` counts what was delivered instead.
    """

    def __init__(
        self,
        source: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        uneven: Uneven = "pad",
    ) -> None:
        self.length = len(source) if isinstance(source, Sized) else whole(source, "the length of a dataset")
        self.rank, self.world = whole(rank, "rank"), whole(world, "world", 1)
        if rank >= world:
            raise ValueError(f"rank must be between 0 and world - 1, not {rank} of {world}")
        if uneven not in ("pad", "drop"):
            raise ValueError(f"uneven must be 'pad' or 'drop', not {uneven!r}")
        self.shuffle = shuffle
        self.seed = whole(seed, "seed")
        self.uneven = uneven
        self.epoch = 0
        self.position = 0
        """Indices of this epoch handed out to this rank, after those `dealt`."""
        self.dealt = 0
        """Indices of this epoch that another number of ranks had been given before this one took over."""
        self._spent: tuple[int, int, int] | None = None
        """Where this sampler handed out the last index of an epoch: that epoch is over."""
        self._turns = 0
        """Counts the epochs ended: an iterator of an earlier one has nothing more to give."""
        self._order: tuple[tuple[int, int, int], npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Indices per epoch and rank."""
        return share(self.length, self.world, self.uneven)

    def order(self, epoch: int, seed: int | None = None, *, dealt: int = 0) -> npt.NDArray[np.int64]:
        """The indices of an epoch for this rank. Changes no position.

        Args:
            epoch: The number of the epoch.
            seed: Another seed than the sampler's own.
            dealt: Leaves out so many of the first indices of the common order.
        """
        if self.shuffle:
            source = seeding.stream(self.seed if seed is None else seed, seeding.ORDER, epoch)
            # RandomState: its methods never change, while those of numpy.random.Generator may.
            everything = np.random.RandomState(np.random.PCG64(source)).permutation(self.length)
        else:
            everything = np.arange(self.length)
        end = dealt + share(self.length - dealt, self.world, self.uneven) * self.world
        if end > self.length:
            everything = np.resize(everything, end)  # repeats from its beginning
        return everything[dealt:end][self.rank :: self.world].astype(np.int64, copy=False)

    def __iter__(self) -> Iterator[int]:
        if self._spent == self._place():
            self._turn_over()
        return self._rest()

    def _rest(self) -> Iterator[int]:
        turn = self._turns
        while self.position < len(order := self._current()):
            self.position += 1
            if self.position == len(order):
                self._spent = self._place()
            yield int(order[self.position - 1])
            if turn != self._turns:
                return
        self._turn_over()

    def _place(self) -> tuple[int, int, int]:
        return self.epoch, self.position, self.dealt

    def _turn_over(self) -> None:
        """The current epoch has ended, and the next one begins."""
        self.epoch += 1
        self.position = self.dealt = 0
        self._spent = None
        self._turns += 1

    def _current(self) -> npt.NDArray[np.int64]:
        key = (self.seed, self.epoch, self.dealt)
        if self._order is None or self._order[0] != key:
            self._order = key, self.order(self.epoch, dealt=self.dealt)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and position, and what they are only valid for. The same on every rank."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "dealt": self.dealt,
            "order": self.describe(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved position. The saved seed replaces the given one, so that the order goes on.

        Args:
            state: What `state_dict` returned.
        """
        try:
            seed, epoch, position, saved = (state[key] for key in ("seed", "epoch", "position", "order"))
        except (KeyError, TypeError) as error:
            raise StateMismatch(f"the saved state is not that of a {type(self).__name__}") from error
        position, dealt = take_over(saved, self.describe(), position, state.get("dealt", 0))
        self.seed = whole(seed, "seed")
        self.epoch, self.position, self.dealt = epoch, position, dealt
        self._spent = None

    def describe(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same sample."""
        return {
            "length": self.length,
            "shuffle": self.shuffle,
            "world": self.world,
            "uneven": self.uneven,
        }


def share(count: int, world: int, uneven: Uneven) -> int:
    """How many of `count` indices each of `world` ranks is given."""
    whole, rest = divmod(count, world)
    return whole + (rest > 0 and uneven == "pad")


def batches_in(count: int, size: int | None, drop_last: bool) -> int:
    """How many batches `count` indices make; without a size, each is delivered by itself."""
    if size is None:
        return count
    return count // size if drop_last else -(-count // size)


def take_over(saved: Mapping[str, Any], own: Mapping[str, Any], position: int, dealt: int) -> tuple[int, int]:
    """Position and `dealt` for the order that `own` describes, where another left off.

    Other ranks, or another batch size, begin after the last index that was delivered: none of the order
    is left out or comes twice. For what else is different, see `check_order`.
    """
    check_order({**saved, **_cut(own)}, own)
    if _cut(saved) == _cut(own):
        return position, dealt
    world, size = saved["world"], saved.get("batch_size")
    each = share(saved["length"] - dealt, world, saved["uneven"])
    if position >= batches_in(each, size, saved.get("drop_last", False)):
        return 0, saved["length"]  # that epoch was over, and it stays so
    return 0, min(saved["length"], dealt + position * (size or 1) * world)


def _cut(order: Mapping[str, Any]) -> dict[str, Any]:
    """Into how many shares an order is cut, and these into which batches."""
    return {key: order[key] for key in ("world", "batch_size") if key in order}


_WORDS = {
    "length": "samples in the dataset",
    "batches": "batches per epoch",
    "world": "ranks (world)",
}


def check_order(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `StateMismatch` when a saved position would mean other samples here."""
    different = [key for key in {**saved, **own} if saved.get(key) != own.get(key)]
    if different:
        listed = "; ".join(
            f"{_WORDS.get(key, key)}: {saved.get(key)} when saved, {own.get(key)} now" for key in different
        )
        raise StateMismatch(
            f"the saved position belongs to another order of samples ({listed}). Build dataset and loader as "
            "before. To start an epoch with different ones, leave the loader out of the restored state and "
            "set its `epoch`. The loader has not been changed",
            wrong=different,
        )
