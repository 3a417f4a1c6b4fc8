"""Noticing changes that were not announced: while a save reads memory, and between saves.

`ownership` says which leaves should not change without an announcement. A `Guard` checks it during one save.
Two signs show a change. Torch counts the in-place operations on each tensor, but fused optimizers, ``.data``
and foreign code do not count. So a fingerprint, a hash over a sample of the bytes, is taken as well; it shows
any update of a whole tensor.

`ObservedChanges` remembers what the saves of a training have seen, and corrects `ownership` by it. A leaf
that changed while it was read in place made that save fail; it is copied from then on. A frozen parameter
(``requires_grad=False``) is copied until two saves have found it the same, because forward may change it, as
it does that of a momentum encoder. Arrays that cannot change, as those of JAX, must be other ones in a later
save: a state that still has the old ones is not the one that is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everystep import engine
from everystep.caller import stack_level
from everystep.checkpointer.ownership import FROZEN, UNCHANGED, Owner, OwnerOf, span
from everystep.engine import ByteSource, Memory, Strided
from everystep.state import LeafSource
from everystep.state.boxed import Immutable


@dataclass(slots=True)
class _Watched:
    leaves: list[LeafSource]
    versions: list[int | None]
    plain: list[LeafSource]
    addresses: list[int | None]
    fingerprints: list[int]


Signs = tuple[int, int | None, int]
"""The address of a leaf, torch's count of its changes, and a fingerprint, to compare with a later one."""


def _signs(leaf: LeafSource) -> Signs | None:
    """None for a leaf that has gaps in its memory: its changes may not show."""
    memory = _memory(leaf.source)
    if memory is None:
        return None
    (version,) = _versions([leaf])
    return memory.address, version, engine.fingerprints([memory])[0]


def _memory(source: ByteSource) -> Memory | None:
    """The memory that a source fills, in any order of its elements; None if there are gaps."""
    if type(source) is Strided:
        start, stop = span(source.address, source.itemsize, source.shape, source.strides)
        return Memory(start, source.nbytes, source.owner) if stop - start == source.nbytes else None
    return source if type(source) is Memory else None


class Guard:
    """What the leaves read in place looked like when the save began, by owner."""

    def __init__(self, in_place: Mapping[Owner, list[LeafSource]]) -> None:
        self._watched = {owner: _watch(leaves) for owner, leaves in in_place.items()}

    @property
    def owners(self) -> set[Owner]:
        """The owners whose leaves have not been compared yet."""
        return set(self._watched)

    def take(self, owner: Owner | None = None) -> list[str]:
        """Names of an owner's leaves (None: of every owner's) that have changed.

        Each owner is looked at once: after that it may change them. One that was interrupted does not count.
        """
        wanted = list(self._watched) if owner is None else [owner] if owner in self._watched else []
        found = [name for key in wanted for name in _changed(self._watched[key])]
        for key in wanted:
            del self._watched[key]
        return found


def _watch(leaves: list[LeafSource]) -> _Watched:
    plain: list[LeafSource] = []
    memories: list[Memory] = []
    for leaf in leaves:
        source = leaf.source
        memory = source if type(source) is Memory else _memory(source)
        if memory is not None:
            plain.append(leaf)
            memories.append(memory)
    fingerprints = engine.fingerprints(memories)
    return _Watched(leaves, _versions(leaves), plain, _addresses(plain), fingerprints)


def _changed(before: _Watched) -> list[str]:
    addresses = _addresses(before.plain)
    if addresses != before.addresses:
        # Memory that has moved is not to be looked at: it may be gone.
        found = zip(before.plain, before.addresses, addresses, strict=True)
        return [leaf.name for leaf, old, new in found if old != new]
    after = _watch(before.leaves)
    if after.versions == before.versions and after.fingerprints == before.fingerprints:
        return []
    versions = zip(before.leaves, before.versions, after.versions, strict=True)
    names = {leaf.name for leaf, old, new in versions if old != new}
    fingerprints = zip(before.plain, before.fingerprints, after.fingerprints, strict=True)
    names |= {leaf.name for leaf, old, new in fingerprints if old != new}
    return [leaf.name for leaf in before.leaves if leaf.name in names]


def _addresses(leaves: list[LeafSource]) -> list[int | None]:
    """Where tensors lie: ``share_memory_`` and ``resize_`` of their storages change that."""
    found: list[int | None] = []
    for leaf in leaves:
        address = getattr(leaf.source.owner, "data_ptr", None)
        found.append(None if address is None else int(address()))
    return found


def _versions(leaves: list[LeafSource]) -> list[int | None]:
    """Torch's counts of the changes of tensors; None for what does not count."""
    found: list[int | None] = []
    for leaf in leaves:
        try:
            found.append(getattr(leaf.source.owner, "_version", None))
        except RuntimeError:  # tensors made in inference mode do not count
            found.append(None)
    return found


class ObservedChanges:
    """What the saves of one training have seen of its leaves, by name."""

    def __init__(self) -> None:
        self._changing: frozenset[str] = frozenset()
        self._frozen: dict[str, Signs] = {}
        self._immutable: list[Signs] | None = None
        self._renewed = False

    def add_changed(self, names: Iterable[str]) -> None:
        """These leaves changed while a save read them in place."""
        self._changing |= frozenset(names)

    def warn_if_stale(self, leaves: Iterable[LeafSource]) -> None:
        """Warns if the second save finds all arrays that cannot change as the first one did."""
        if self._renewed:
            return
        before = self._immutable
        found = [_signs(leaf) for leaf in leaves if type(leaf.source.owner) is Immutable]
        self._immutable = [signs for signs in found if signs is not None]
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
            signs = _signs(leaf)
            if signs is None:
                return None
            now[leaf.name] = signs
            return UNCHANGED if before.get(leaf.name) == signs else None

        self._frozen = now
        return owner_if_unchanged
