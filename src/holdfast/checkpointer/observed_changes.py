"""Which leaves earlier saves have seen to change, and which to stay the same.

`ownership` tells which leaves should not change without an announcement. This module corrects it by what
earlier saves have observed. A leaf that changed while it was read in place made that save fail; it is copied
from then on. A frozen parameter (``requires_grad=False``) is copied until two saves have found it the same:
forward may change it, as that of a momentum encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.checkpointer.guard import Look, look_at
from holdfast.checkpointer.ownership import FROZEN, NOBODY
from holdfast.state import LeafSource

OwnerOf = Callable[[LeafSource], int | None]


class ObservedChanges:
    """What the saves of one training have seen of its leaves, by name."""

    def __init__(self) -> None:
        self._changing: frozenset[str] = frozenset()
        self._frozen: dict[str, Look] = {}

    def add_changed(self, names: Iterable[str]) -> None:
        """These leaves changed while a save read them in place."""
        self._changing |= frozenset(names)

    def corrected(self, owner_of: OwnerOf) -> OwnerOf:
        """The owners for one save: as `owner_of` says, but None for leaves that must be copied."""
        before, now = self._frozen, {}
        changing = self._changing

        def owner_if_unchanged(leaf: LeafSource) -> int | None:
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
        return owner_if_unchanged
