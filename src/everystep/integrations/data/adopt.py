"""`resumable`: a `Loader` made of an existing torch ``DataLoader``.

Owns which of its settings are taken over as they are, and which samplers become Everystep's own order.
"""

from __future__ import annotations

from typing import Any

from everystep.errors import UnsupportedState
from everystep.integrations.data.loader import Loader


def resumable(loader: Any, *, seed: int = 0) -> Loader:
    """A `Loader` with the dataset and settings of a torch ``DataLoader``.

    ``shuffle=True`` becomes Everystep's own order by `seed`, and so does a ``DistributedSampler``, by its own
    seed if none is given: shares of ranks are as large, another number of ranks can take over, and calls of
    ``set_epoch`` are not needed. Other samplers are kept, and seeded for every epoch. If one draws from a
    generator that cannot be seeded, resuming raises an error. The given loader's `generator` is not used.

    Args:
        loader: The torch ``DataLoader``. It is not changed.
        seed: The order of the samples and all random numbers of the batches follow from it.

    >>> from torch.utils.data import DataLoader
    >>> sum(batch.sum().item() for batch in resumable(DataLoader(range(10), batch_size=4, shuffle=True)))
    45
    """
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
    )

    if not isinstance(loader, DataLoader):
        raise UnsupportedState(
            f"{type(loader).__name__} is not a torch DataLoader. Put a loader with state_dict and "
            "load_state_dict directly into the state"
        )
    dataset: Any = loader.dataset
    how: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
        cut = loader.batch_sampler
        sampler = loader.sampler if cut is None else cut.sampler
        how = (
            {"batch_size": None}
            if cut is None
            else {"batch_size": cut.batch_size, "drop_last": cut.drop_last}
        )
        if type(sampler) is RandomSampler and _shuffles_all(sampler, dataset):
            how["shuffle"] = True
        elif type(sampler) is DistributedSampler and sampler.dataset is dataset:
            seed = seed or sampler.seed
            how |= {"shuffle": sampler.shuffle, "rank": sampler.rank, "world": sampler.num_replicas}
            how["uneven"] = "drop" if sampler.drop_last else "pad"
        elif type(sampler) is not SequentialSampler or sampler.data_source is not dataset:
            how["sampler"] = sampler
    for name in _OPTIONS:
        if hasattr(loader, name):
            how[name] = getattr(loader, name)
    if loader.num_workers == 0:
        del how["prefetch_factor"]
    return Loader(dataset, seed=seed, collate_fn=loader.collate_fn, **how)


_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def _shuffles_all(sampler: Any, dataset: Any) -> bool:
    return sampler.data_source is dataset and not sampler.replacement and sampler.num_samples == len(dataset)
