"""`Loader`: a torch ``DataLoader`` that continues in the middle of an epoch.

Owns the position (which batches have been delivered to the training) and the iteration. Which samples make up
a batch belongs to `orders`, making it to `batches`; processes, prefetching and pinning are torch's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from everystep.errors import StateMismatch, UnsupportedState
from everystep.integrations.data import seeding
from everystep.integrations.data.batches import BatchDataset, Ticket, WorkerStart, as_is
from everystep.integrations.data.orders import Epoch, order_of
from everystep.integrations.data.sampler import Uneven
from everystep.integrations.data.seeding import whole


class Loader:
    """Batches of a map-style dataset, loaded by torch's ``DataLoader``, with a position that can be saved.

    Put it into the state like a model. ``for batch in loader`` gives the rest of the current epoch, and then
    the next epoch begins. If you leave the loop early and iterate again, it goes on with the next batch of
    the same epoch (`next_epoch` abandons the rest instead). A loop that has received the last batch need not
    ask for one more: the next loop begins the next epoch.

    The saved position counts the batches that the loop has received, not those that workers have prepared.
    Resuming loads none of the earlier samples. If the position was saved after the last batch, it resumes at
    the end of the epoch: the first loop after the restore ends at once. A state restored in the middle of a
    loop takes effect at its next batch.

    The order of the samples depends on `seed` and the epoch only. Before each batch is made, the CPU
    generators of Python, NumPy and torch are seeded from `seed`, epoch, batch and rank: augmentation is the
    same on every run, with any number of workers, and the main process's generators stay undisturbed.

    Another number of ranks, or another `batch_size`, may restore the state: the rest of the epoch is shared
    among them, no sample left out and none given twice.

    Args:
        dataset: A map-style dataset. One that is iterable only keeps its own position.
        batch_size: Samples per batch. None: every sample is delivered by itself.
        shuffle: Shuffle every epoch.
        seed: The order of the samples and all random numbers of the batches follow from it.
        drop_last: Leave out the last batch of an epoch if it is smaller.
        sampler: The order of the samples instead of Everystep's own. It is seeded for every epoch.
        batch_sampler: As `sampler`, for whole batches.
        collate_fn: Makes a batch of a list of samples, as for ``DataLoader``.
        rank: The number of this process among those that share the data.
        world: How many processes share the data.
        uneven: What to do if the samples do not divide evenly: ``"pad"`` or ``"drop"``, as for `Sampler`.
        options: Other arguments of ``DataLoader``: `num_workers`, `prefetch_factor`, `persistent_workers`,
            `pin_memory`, `multiprocessing_context`, `timeout`, `worker_init_fn`.

    >>> loader = Loader(range(10), batch_size=4, shuffle=True, seed=1)
    >>> first = next(iter(loader))
    >>> state = loader.state_dict()
    >>> rest = [batch.tolist() for batch in loader]
    >>> again = Loader(range(10), batch_size=4, shuffle=True, seed=1)
    >>> again.load_state_dict(state)
    >>> [batch.tolist() for batch in again] == rest
    True
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        rank: int = 0,
        world: int = 1,
        uneven: Uneven = "pad",
        **options: Any,
    ) -> None:
        from torch.utils.data import IterableDataset, default_collate, default_convert

        if isinstance(dataset, IterableDataset):
            raise UnsupportedState(
                f"{type(dataset).__name__} is an IterableDataset: only it knows its position. Use a loader "
                "with state_dict and load_state_dict, such as torchdata's StatefulDataLoader, and put it "
                "into the state"
            )
        if batch_size is not None:
            batch_size = whole(batch_size, "batch_size (None for no batches)", 1)
        self.dataset = dataset
        self.batch_size = batch_size if batch_sampler is None else None
        self._seed = whole(seed, "seed")
        self._order = order_of(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            ranks={"rank": rank, "world": world, "uneven": uneven},
        )
        batched = batch_size is not None or batch_sampler is not None
        collate = collate_fn or (default_collate if batched else default_convert)
        self._torch = _torch_loader(BatchDataset(dataset, collate, batched=batched), _Rest(self), options)
        self._epoch = 0
        self._position = 0
        self._dealt = 0
        self._current: tuple[tuple[int, int, int], Epoch] | None = None
        self._promised: str | None = None
        self._iterating = 0
        """Counts the iterations begun: only the newest may take batches."""
        self._moves = 0
        """Counts the changes of position from outside, which the iteration under way must follow."""
        self._is_spent = False
        """Whether this process was given the last batch of the current epoch."""
        self._turning = threading.Lock()
        """Held where an epoch ends: a loop that reads ahead may ask for the end in a thread of its own."""

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def epoch(self) -> int:
        """The current epoch, from 0. Setting it begins that epoch from its start."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._move(whole(epoch, "epoch"), 0)

    @property
    def position(self) -> int:
        """Batches of this epoch delivered so far, after the samples `dealt`."""
        return self._position

    @property
    def dealt(self) -> int:
        """Samples of this epoch that another number of ranks had been given before this one took over.

        0 but in the rest of an epoch that was restored with another number of ranks or another `batch_size`.
        """
        return self._dealt

    def next_epoch(self) -> None:
        """Abandons the rest of the current epoch: the next batch is the first of the next one."""
        self._move(self._epoch + 1, 0)

    def __len__(self) -> int:
        """Batches per epoch, also when the current one was resumed in its middle."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        with self._turning:
            self._iterating += 1
            if self._is_spent:
                self._turn_over()
            return _Iteration(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the training is in the data: plain values, the same on every rank."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "dealt": self._dealt,
            "order": self._order.describe(),
            "digest": self._digest(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch that had been delivered. The saved seed replaces the given one.

        Args:
            state: What `state_dict` returned.
        """
        try:
            seed, epoch, position = state["seed"], state["epoch"], state["position"]
            order, digest = state["order"], state["digest"]
        except (KeyError, TypeError) as error:
            raise StateMismatch(f"the saved state is not that of a {type(self).__name__}") from error
        position, dealt = self._order.take_over(order, position, state.get("dealt", 0))
        self._seed = whole(seed, "seed")
        self._move(epoch, position, dealt)
        self._promised = digest

    # --- position

    def _move(self, epoch: int, position: int, dealt: int = 0) -> None:
        self._epoch = epoch
        self._position = position
        self._dealt = dealt
        self._is_spent = False
        self._promised = None
        self._current = None
        self._moves += 1

    def _turn_over(self) -> None:
        """The current epoch has ended, and the next one begins."""
        self._epoch += 1
        self._position = self._dealt = 0
        self._is_spent = False
        self._promised = None

    def _digest(self) -> str | None:
        """The digest of the current epoch's order, once a batch of it has been delivered."""
        if self._position == 0:
            return None
        return self._promised if self._current is None else self._current[1].digest

    def _batches(self) -> Epoch:
        key = self._seed, self._epoch, self._dealt
        if self._current is None or self._current[0] != key:
            made = self._order.epoch(self._seed, self._epoch, self._dealt)
            if self._promised is not None and made.digest != self._promised:
                raise StateMismatch(
                    f"the sampler's order for epoch {self._epoch} differs from the order before the save: it "
                    "has its own generator, or was built differently. So it is not known which "
                    f"{self._position} batches were delivered. Use everystep.integrations.data.Sampler, or a "
                    "sampler that draws from torch's global generator"
                )
            self._current = key, made
        return self._current[1]

    def _rest(self) -> Iterator[Ticket]:
        """Orders for the rest of the epoch. torch takes them ahead of what it delivers."""
        return _tickets(self._batches(), self._position, self._seed, self._place())

    def _place(self) -> tuple[int, ...]:
        """Where the batches stand. With their numbers, their random numbers follow from it."""
        # The first batch after `dealt` samples is not that of the whole epoch: it must not have its numbers.
        after = (self._dealt,) if self._dealt else ()
        return self._epoch, self._order.rank, *after

    def _open(self) -> Iterator[Any]:
        # What workers draw before their first batch (in worker_init_fn) follows from the place as well.
        source = seeding.stream(self._seed, seeding.WORKERS, *self._place())
        self._torch.generator.manual_seed(int(source.generate_state(1, "u8")[0]))
        return iter(self._torch)


def _tickets(batches: Epoch, start: int, seed: int, place: tuple[int, ...]) -> Iterator[Ticket]:
    # A function of its own: the generator lives in torch's iterator and must not keep the `Loader` alive.
    epoch, *rest = place
    for number in range(start, len(batches)):
        yield Ticket(seed, (epoch, number, *rest), batches[number])


class _Rest:
    """The sampler that torch's loader sees.

    Does not keep the `Loader` alive, which keeps torch's: workers of an iterator that is found by garbage
    collection, and not let go by its last owner, do not hear that they should end, and torch waits 5 s for
    each.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[Ticket]:
        loader = self._loader()
        assert loader is not None  # an iteration under way holds it
        return loader._rest()


class _Iteration:
    """One ``for`` loop over a loader. Holds torch's iterator, so that leaving the loop ends its workers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._turn = loader._iterating
        self._inner: Iterator[Any] | None = None
        self._next: tuple[int, int] | None = None
        """The moves and position of the loader for which the inner iterator has the next batch."""
        self._got_last = False
        self._ended = False

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._ended:
            raise StopIteration
        if self._turn != loader._iterating:
            self._superseded()
        if self._next != (loader._moves, loader._position):
            # After a failed batch (which torch has passed by), an interrupt, or a restore: a new iterator
            # starts there. Workers of the old one end before new ones start.
            self._inner = None
        if loader._position >= len(loader._batches()):
            with loader._turning:
                if self._turn != loader._iterating:
                    self._superseded()
                loader._turn_over()
            self._inner = None
            self._ended = True
            raise StopIteration
        self._next = None
        batch = self._take(loader)
        loader._position += 1
        loader._is_spent = self._got_last = loader._position >= len(loader._batches())
        self._next = loader._moves, loader._position
        return batch

    def _superseded(self) -> NoReturn:
        self._inner = None
        if self._got_last:  # it has missed nothing
            self._ended = True
            raise StopIteration
        raise RuntimeError(
            "another iteration over this loader has started and took over its position. Use one loader "
            "for each loop"
        )

    def _take(self, loader: Loader) -> Any:
        try:
            if self._inner is None:
                self._inner = loader._open()
            return next(self._inner)
        except StopIteration as error:
            raise RuntimeError(
                f"the data ended at batch {loader._position} of {len(loader._batches())}: "
                "dataset or collate_fn raised StopIteration"
            ) from error
        except Exception as error:
            if not loader._torch.num_workers:
                raise
            # The worker's traceback is in the message. The one here leads to torch's iterator, and back to
            # the error itself: such a circle keeps the workers until a garbage collection (see `_Rest`).
            raise error.with_traceback(None)  # noqa: B904


def _torch_loader(batches: BatchDataset, rest: _Rest, options: dict[str, Any]) -> Any:
    from torch import Generator
    from torch.utils.data import DataLoader

    if options.pop("generator", None) is not None:
        raise ValueError("a resumable loader takes no generator: its random numbers follow from `seed`")
    if not options.get("in_order", True):
        raise ValueError("in_order=False delivers batches in an order that cannot be repeated")
    start = WorkerStart(options.pop("worker_init_fn", None))
    # Its own generator: torch's loader draws from the global one whenever an iteration begins.
    return DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=None,
        sampler=rest,
        collate_fn=as_is,
        worker_init_fn=start,
        generator=Generator(),
        **options,
    )
