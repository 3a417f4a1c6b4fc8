"""Which leaves are trusted to stay as they are while a save reads them in place.

`ownership` tells what should not change unannounced. This is what earlier saves have shown. A leaf that
changed while it was read is copied from then on: that save failed, the next one must not. And a frozen
parameter (``requires_grad=False``) is copied until it was the same in two saves: forward may update it, as
that of a momentum encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.checkpointer.guard import Look, look_at
from holdfast.checkpointer.ownership import FROZEN, NOBODY
from holdfast.state import LeafSource

OwnerOf = Callable[[LeafSource], int | None]


class ObservedChanges:
    """What is known of the leaves of one training, by name."""

    def __init__(self) -> None:
        self._changing: frozenset[str] = frozenset()
        self._frozen: dict[str, Look] = {}

    def lose(self, names: Iterable[str]) -> None:
        """These have changed while they were read in place."""
        self._changing |= frozenset(names)

    def confirm(self, owner_of: OwnerOf) -> OwnerOf:
        """Who owns what, for one save: nobody, of what is not trusted."""
        before, now = self._frozen, {}
        changing = self._changing

        def trusted(leaf: LeafSource) -> int | None:
            owner = owner_of(leaf)
            if owner is None or leaf.name in changing:
                return None
            if owner != FROZEN:
                return owner
            look = look_at(leaf)
            if look is None:
                return None
            now[leaf.name] = look
            return NOBODY if before.get(leaf.name) == look else None

        self._frozen = now
        return trusted
