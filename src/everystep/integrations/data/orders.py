"""The batches of an epoch, from whatever decides their order: `Sampler`, or samplers made for torch.

Owns the translation of a ``sampler`` or ``batch_sampler`` into a list of batches per epoch. A sampler made
for torch is run through once per epoch with its random numbers seeded from the place, which gives indices but
loads no samples; a digest of the result goes into the saved state, so that a sampler which cannot be repeated
is found out instead of silently giving other data.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from everystep.errors import UnsupportedState
from everystep.integrations.data import seeding
from everystep.integrations.data.sampler import Sampler, batches_in, check_order, take_over


class Epoch(ABC):
    """The batches of one epoch."""

    digest: str | None = None
    """Of the whole order, when it is not a function of what is saved."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> Any: ...


class Order(ABC):
    """Batches for every epoch."""

    rank: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """Batches per epoch."""

    @abstractmethod
    def epoch(self, seed: int, epoch: int, dealt: int) -> Epoch:
        """The batches of one epoch, without its first `dealt` samples."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same batch."""

    def take_over(self, saved: Mapping[str, Any], position: int, dealt: int) -> tuple[int, int]:
        """Position and `dealt` here for those of a saved order; `StateMismatch` where there are none."""
        check_order(saved, self.describe())
        return position, dealt


class _Cut(Epoch):
    """Indices cut into batches as they are asked for."""

    def __init__(self, indices: Any, size: int | None, count: int, digest: str | None = None) -> None:
        self.indices = indices
        self.size = size
        self.count = count
        self.digest = digest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        if self.size is None:
            index = self.indices[number]
            return index.item() if hasattr(index, "item") else index
        found = self.indices[number * self.size : (number + 1) * self.size]
        return found.tolist() if hasattr(found, "tolist") else found


class OwnOrder(Order):
    """The order of a `Sampler`: any epoch's order is known from the seed alone."""

    def __init__(self, sampler: Sampler, size: int | None, *, drop_last: bool, own_seed: bool) -> None:
        self.sampler = sampler
        self.size = size
        self.drop_last = drop_last
        self.own_seed = own_seed
        """Whether the sampler's own seed decides, because the user made it, and not the loader's."""
        self.rank = sampler.rank

    def __len__(self) -> int:
        return batches_in(len(self.sampler), self.size, self.drop_last)

    def epoch(self, seed: int, epoch: int, dealt: int) -> Epoch:
        indices = self.sampler.order(epoch, None if self.own_seed else seed, dealt=dealt)
        return _Cut(indices, self.size, batches_in(len(indices), self.size, self.drop_last))

    def take_over(self, saved: Mapping[str, Any], position: int, dealt: int) -> tuple[int, int]:
        return take_over(saved, self.describe(), position, dealt)

    def describe(self) -> dict[str, Any]:
        own = {"sampler_seed": self.sampler.seed} if self.own_seed else {}
        return {**self.sampler.describe(), "batch_size": self.size, "drop_last": self.drop_last, **own}


class ForeignOrder(Order):
    """The order of a sampler of indices that was made for torch."""

    def __init__(self, sampler: Any, size: int | None, *, drop_last: bool) -> None:
        _check_length(sampler, "sampler")
        self.sampler = sampler
        self.size = size
        self.drop_last = drop_last
        self.rank = _rank(sampler)

    def __len__(self) -> int:
        return batches_in(len(self.sampler), self.size, self.drop_last)

    def epoch(self, seed: int, epoch: int, dealt: int) -> Epoch:
        indices = _run([self.sampler], seed, epoch)
        count = batches_in(len(indices), self.size, self.drop_last)
        return _Cut(indices, self.size, count, _digest(indices, self.sampler))

    def describe(self) -> dict[str, Any]:
        return {
            "length": len(self.sampler),
            "sampler": type(self.sampler).__name__,
            "batch_size": self.size,
            "drop_last": self.drop_last,
        }


class BatchOrder(Order):
    """The order of a batch sampler that was made for torch."""

    def __init__(self, batch_sampler: Any) -> None:
        _check_length(batch_sampler, "batch_sampler")
        self.batch_sampler = batch_sampler
        self.inner = getattr(batch_sampler, "sampler", None)
        self.rank = _rank(batch_sampler) or _rank(self.inner)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def epoch(self, seed: int, epoch: int, dealt: int) -> Epoch:
        samplers = [self.batch_sampler] if self.inner is None else [self.batch_sampler, self.inner]
        batches = _run(samplers, seed, epoch)
        return _Cut(batches, None, len(batches), _digest(batches, *samplers))

    def describe(self) -> dict[str, Any]:
        return {"batches": len(self), "batch_sampler": type(self.batch_sampler).__name__}


def order_of(
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    drop_last: bool,
    sampler: Any,
    batch_sampler: Any,
    ranks: dict[str, Any],
) -> Order:
    """The order that the settings of a loader ask for; `ValueError` for settings at odds."""
    if (sampler is not None or batch_sampler is not None) and (shuffle or ranks["world"] != 1):
        raise ValueError(
            "a sampler decides the order and the share of a rank: do not pass shuffle or world with it"
        )
    if batch_sampler is not None:
        if batch_size not in (1, None) or drop_last or sampler is not None:
            raise ValueError("batch_sampler takes the place of batch_size, sampler and drop_last")
        return BatchOrder(batch_sampler)
    if batch_size is None and drop_last:
        raise ValueError("batch_size=None makes no batches, so drop_last has none to drop")
    if sampler is None:
        made = Sampler(dataset, shuffle=bool(shuffle), **ranks)
        return OwnOrder(made, batch_size, drop_last=drop_last, own_seed=False)
    if isinstance(sampler, Sampler):
        return OwnOrder(sampler, batch_size, drop_last=drop_last, own_seed=True)
    return ForeignOrder(sampler, batch_size, drop_last=drop_last)


def _check_length(sampler: Any, word: str) -> None:
    if not hasattr(sampler, "__len__"):
        raise UnsupportedState(
            f"the {word} {type(sampler).__name__} has no length, so its epochs cannot be resumed. Give it a "
            "__len__, or use a loader with its own state, such as torchdata's StatefulDataLoader"
        )


def _rank(sampler: Any) -> int:
    rank = getattr(sampler, "rank", 0)
    return rank if type(rank) is int else 0


def _run(samplers: Sequence[Any], seed: int, epoch: int) -> list[Any]:
    """Everything that the first sampler gives in an epoch, with random numbers of seed and epoch only."""
    import torch

    source = seeding.stream(seed, seeding.SAMPLER, epoch)
    generators = {
        id(found): found
        for sampler in samplers
        if isinstance(found := getattr(sampler, "generator", None), torch.Generator)
    }
    with seeding.undisturbed(*generators.values()):
        seeding.plant(source)
        for generator in generators.values():
            generator.manual_seed(int(source.generate_state(1, "u8")[0]))
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):  # torch's DistributedSampler
                sampler.set_epoch(epoch)
        return list(samplers[0])


def _digest(indices: list[Any], *samplers: Any) -> str | None:
    # A sampler that gives every rank its share differs from rank to rank, which a common state cannot.
    if any(getattr(sampler, "num_replicas", 1) != 1 for sampler in samplers):
        return None
    return hashlib.blake2b(repr(indices).encode(), digest_size=8).hexdigest()
