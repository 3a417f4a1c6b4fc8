"""Which changes of the state are announced before they are made: by hooked optimizers, and by `update`.

Owns whether a save may overlap with training at all. Which leaves an announcement covers is `ownership`'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from everystep.caller import stack_level
from everystep.checkpointer.observed_changes import OwnerOf
from everystep.checkpointer.ownership import Hooks, Owner, find_optimizers, owners


class AnnouncedChanges:
    """Of one training. `before_step(owner)` is called before a hooked optimizer changes what it owns.

    `optimizers`: those to hook; None: all that are in the state.
    """

    def __init__(self, before_step: Callable[[Owner], None], optimizers: Sequence[Any] | None) -> None:
        self._hooks = Hooks(before_step)
        self._optimizers = None if optimizers is None else list(optimizers)
        self._has_updates = False
        self._updating = 0
        self._noticed = False

    def attach(self, state: object) -> None:
        """Hooks the optimizers of the state, and lets go of those that are not in it any more."""
        self._hooks.attach(find_optimizers(state, self._optimizers))

    def detach(self) -> None:
        self._hooks.detach()

    @property
    def announced(self) -> bool:
        """Whether anything announces its changes, so that leaves may be read in place now.

        Not inside of an `update`: there they change at any moment.
        """
        return not self._updating and (self._has_updates or bool(self._hooks.optimizers))

    @contextmanager
    def update(self) -> Iterator[None]:
        """The user changes the state in this block, and from now on only in such blocks."""
        self._has_updates = True
        self._updating += 1
        try:
            yield
        finally:
            self._updating -= 1

    def owner_of(self, state: object) -> OwnerOf:
        """The owner of each leaf that may be read in place now."""
        return owners(state, self._hooks, updates=self._has_updates).of

    def warn_if_none(self) -> None:
        """Warns, once, that saves cannot overlap with training."""
        if self.announced or self._updating or self._noticed:
            return
        self._noticed = True
        warnings.warn(
            "the state holds no optimizer whose steps could be waited for, so saves copy it first "
            '(mode="snapshot"). To overlap, give optimizers=[...] to the Checkpointer, or change the weights '
            "inside of `with checkpointer.update():`",
            RuntimeWarning,
            stacklevel=stack_level(),
        )
