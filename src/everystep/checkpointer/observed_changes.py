"""Which leaves earlier saves have seen to change, and which to stay the same.

`ownership` tells which leaves should not change without an announcement. This module corrects it by what
earlier saves have observed. A leaf that changed while it was read in place made that save fail; it is copied
from then on. A frozen parameter (``requires_grad=False``) is copied until two saves have found it the same:
forward may change it, as that of a momentum encoder. Arrays that cannot change, as those of JAX, must be
other ones in a later save: a state that still has the old ones is not the one that is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from everystep.caller import stack_level
from everystep.checkpointer.guard import Look, look_at
from everystep.checkpointer.ownership import FROZEN, NOBODY, Owner
from everystep.state import LeafSource
from everystep.state.boxed import Immutable

OwnerOf = Callable[[LeafSource], Owner | None]


class ObservedChanges:
    """What the saves of one training have seen of its leaves, by name."""

    def __init__(self) -> None:
        self._changing: frozenset[str] = frozenset()
        self._frozen: dict[str, Look] = {}
        self._immutable: list[Look] | None = None
        self._renewed = False

    def add_changed(self, names: Iterable[str]) -> None:
        """These leaves changed while a save read them in place."""
        self._changing |= frozenset(names)

    def warn_if_stale(self, leaves: Iterable[LeafSource]) -> None:
        """Warns if the second save finds all arrays that cannot change as the first one did."""
        if self._renewed:
            return
        before = self._immutable
        looks = [look_at(leaf) for leaf in leaves if type(leaf.source.owner) is Immutable]
        self._immutable = [look for look in looks if look is not None]
        self._renewed = before is not None or not self._immutable
        if self._immutable and self._immutable == before:
            warnings.warn(
                "the arrays of the state are the same as in the checkpoint before. This Checkpointer saves "
                "the dict that it was made with: pass the new state to each save, as in save(step, state), "
                "or put the new arrays into that dict (state.update(...))",
                RuntimeWarning,
                stacklevel=stack_level(),
            )

    def corrected(self, owner_of: OwnerOf) -> OwnerOf:
        """The owners for one save: as `owner_of` says, but None for leaves that must be copied."""
        before, now = self._frozen, {}
        changing = self._changing

        def owner_if_unchanged(leaf: LeafSource) -> Owner | None:
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
