"""The moments of a run, and the objects that observe them.

A Checkpointer reports each moment to its `RunObservers`, in the thread in which it happens. The event log
(`events`) writes some of the moments down, and calls the callbacks that users subscribe. A drill (`drilling`)
keeps a diary of all of them. The store reports the steps of one save through another interface,
`everystep.store.SaveObserver`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from msgspec import Struct

from everystep.checkpointer.events import Event


class Opening(Struct, frozen=True):
    """The run is about to be opened. That removes what an earlier process left unfinished."""


class Restoring(Struct, frozen=True):
    """`restore` begins."""


class NothingToRestore(Struct, frozen=True):
    """`restore` has found no checkpoint: training begins at step 0."""


class Completed(Struct, frozen=True):
    """Training has completed so many steps. It comes at every call of `save`, also for a skipped step."""

    step: int


class Saving(Struct, frozen=True):
    """A save begins. `mode` is the one at work."""

    step: int
    mode: str


class Durable(Struct, frozen=True):
    """A checkpoint is durable, at `path`. Retention has not removed anything for it so far."""

    step: int
    path: str


class Closed(Struct, frozen=True):
    """The Checkpointer has released the run."""


Moment: TypeAlias = Event | Opening | Restoring | NothingToRestore | Completed | Saving | Durable | Closed


class RunObserver(Protocol):
    """It is called for every moment of a run. An error that it raises fails what was about to happen."""

    def observe(self, moment: Moment) -> None: ...


class RunObservers:
    """The observers of one run, called in the order in which they were added."""

    def __init__(self) -> None:
        self._observers: list[RunObserver] = []

    def add(self, observer: RunObserver) -> None:
        self._observers.append(observer)

    def tell(self, moment: Moment) -> None:
        for observer in self._observers:
            observer.observe(moment)
