"""What happens to one batch where it is made: in a worker process, or in the main one without workers.

Owns `Ticket`, the order for one batch that travels to the worker, and `BatchDataset`, which makes the batch.
A ticket says everything the batch depends on, so a worker keeps no state: which worker makes a batch, how
many there are, and what it made before do not matter.

torch's ``DataLoader`` is used without its own batching, with tickets in the place of indices; that gives it
one call per batch into which the seeding fits before the first sample is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from everystep.integrations.data import seeding


class Ticket(NamedTuple):
    """One batch to make: the place its random numbers come from, and its samples."""

    seed: int
    place: tuple[int, ...]
    """Epoch, batch, rank; and what others had been given of the epoch, if anything."""
    indices: Any
    """A list of indices; one index when the loader does not batch."""


class BatchDataset:
    """The dataset that torch's ``DataLoader`` sees: tickets in, finished batches out."""

    def __init__(self, samples: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self.samples = samples
        self.collate = collate
        self.batched = batched

    def __getitem__(self, ticket: Ticket) -> Any:
        from torch.utils.data import get_worker_info

        source = seeding.stream(ticket.seed, seeding.BATCH, *ticket.place)
        if get_worker_info() is not None:
            seeding.plant(source)
            return self._make(ticket.indices)
        with seeding.undisturbed():
            seeding.plant(source)
            return self._make(ticket.indices)

    def _make(self, indices: Any) -> Any:
        if not self.batched:
            found = self.samples[indices]
        elif getattr(self.samples, "__getitems__", None):
            found = self.samples.__getitems__(indices)
        else:
            found = [self.samples[index] for index in indices]
        return self.collate(found)


def as_is(batch: Any) -> Any:
    """The collate function torch calls: the batch is finished already."""
    return batch


class WorkerStart:
    """A ``worker_init_fn`` that shows the user's function (and code) the user's own dataset."""

    def __init__(self, wanted: Callable[[int], None] | None) -> None:
        self.wanted = wanted

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.samples)  # the class forbids plain assignment
        if self.wanted is not None:
            self.wanted(worker)
