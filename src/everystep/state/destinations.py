"""Where the leaves of a checkpoint go in a target: into which memory, whole or in part, and who shares it.

Owns the memory side of a restore: destinations, ties, views that overlap, and telling autograd. Which leaf
belongs to which array is decided in `restore`; what an array is, in `targets` and `sharded`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from everystep.engine.buffers import Consumed, Destination, Memory, Strided
from everystep.errors import StateMismatch
from everystep.format.geometry import Box
from everystep.state import sharded
from everystep.state.boxed import BoxedArray
from everystep.state.leaves import Sharding
from everystep.state.node import corrupt, shorten
from everystep.state.overlaps import FilledMemory, Host, clash
from everystep.state.targets import array_destination, copy_into, has_span, memory_key, replaceable, span

Lookup = Callable[[str], Any]
"""Gives the array of a leaf or alias name, once it has been read."""

FillPlan = Callable[[Lookup], Any]
"""Puts one place of the target in order and returns what belongs there."""


class FilledArray:
    """One array of the target that receives a leaf: directly, or by a copy of what was read elsewhere.

    `array` is the memory of `target` that is here: the same object, or its part if ranks share it.
    """

    __slots__ = ("array", "direct", "leaf", "name", "sharding", "staged", "target", "tied")

    def __init__(
        self, target: Any, array: Any, name: str, leaf: str, sharding: Sharding | None, *, direct: bool
    ) -> None:
        self.target = target
        self.array = array
        self.name = name
        self.leaf = leaf
        self.sharding = sharding
        self.direct = direct
        self.staged: Any = None
        self.tied: FilledArray | None = None

    def __call__(self, lookup: Lookup) -> Any:
        if self.staged is not None:
            copy_into(self.array, self.staged)
        elif not self.direct:
            copy_into(self.array, lookup(self.leaf) if self.sharding is None else self._tied_part())
        return self.target

    def _tied_part(self) -> Any:
        assert self.tied is not None, "the part of a leaf has a place of its own to be read to, or a tie"
        return self.tied.array if self.tied.staged is None else self.tied.staged

    def stage(self) -> Destination:
        """Read this part to fresh memory, and copy it when all is read."""
        import torch

        self.direct = False
        self.staged = torch.empty(tuple(self.array.shape), dtype=self.array.dtype)
        return Memory(self.staged.data_ptr(), self.staged.nbytes, self.staged)


class TiedElsewhere(Exception):
    """Two different leaves of the checkpoint are one array in the target; carries the name of the other."""


def never_alike(one: str, other: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Later:
    """An array that is written after the first `count` of `before`, because its memory may be theirs."""

    filled: FilledArray
    where: Host
    before: list[tuple[str, Host]]
    count: int


class MemoryPlan:
    """The arrays that one restore fills, and from which leaves.

    `destinations` is by leaf name; by the alias's name where leaves tied in the checkpoint lie differently in
    the target, so that each is read by itself. Of those in `parts`, only a part is read. `boxes` are what is
    read besides: boxes of leaves, each to a place of its own.
    """

    def __init__(
        self,
        aliases: Mapping[str, str],
        shardings: sharded.Shardings,
        alike: Callable[[str, str], bool] = never_alike,
    ) -> None:
        self.used = False
        """Whether any leaf has a place."""
        self._alike = alike
        self.destinations: dict[str, Destination] = {}
        self.parts: dict[str, tuple[Sharding, tuple[int, ...]]] = {}
        self.boxes: list[tuple[str, Box, Destination]] = []
        self._aliases = aliases
        self._shardings = shardings
        self._first: dict[str, FilledArray] = {}
        self._at: dict[str, FilledArray] = {}
        self._all: list[FilledArray] = []
        self._by_memory: dict[tuple[Any, ...], str] = {}
        self._fresh: dict[str, None] = {}
        self.filled = FilledMemory()
        self._later: list[_Later] = []

    def want(self, leaf: str) -> None:
        """Read a leaf into a new array, unless an array of the target is read whole and can serve."""
        self.used = True
        self._fresh[leaf] = None

    def plan_array(self, target: Any, name: str, place: str) -> FillPlan:
        """The plan for an array of the target that receives a leaf of its type."""
        leaf = self._aliases.get(name, name)
        part = sharded.held(target, place, self._shardings)
        if part is not None and (part.tensor is None or not part.tensor.numel()):
            self.used = True
            return lambda lookup: target  # nothing of it is here
        array, sharding = (target, None) if part is None else (part.tensor, part.sharding)
        where = array_destination(array)
        if where is None and sharding is None:
            self.want(leaf)
            if replaceable(target):
                return lambda lookup: lookup(leaf)
            self.filled.add(target)
            return FilledArray(target, target, name, leaf, None, direct=False)
        memory = memory_key(where)
        if memory is not None:
            tied = self._by_memory.setdefault((memory, sharding), leaf)
            if tied != leaf:
                if not self._alike(tied, leaf):
                    raise TiedElsewhere(tied)
                return lambda lookup: target  # the other leaf has the same bytes, and is read to there
        self.used = True
        self.filled.add(target)
        filled = FilledArray(target, array, name, leaf, sharding, direct=True)
        self._all.append(filled)
        first = self._first.setdefault(leaf, filled)
        if first is not filled and first.sharding == sharding:
            # Tied in the checkpoint, apart in the target: read once, copied to the others.
            filled.tied = first
            filled.direct = memory is not None and memory == memory_key(array_destination(first.array))
            return filled
        key = leaf if first is filled else self._key_of_another(first, name)
        self._at[key] = filled
        self.destinations[key] = filled.stage() if where is None else where
        if sharding is not None:
            self.parts[key] = sharding, tuple(array.shape)
        return filled

    def plan_boxes(self, target: BoxedArray, name: str) -> FillPlan:
        """The plan for an array of which several boxes are here, in memory that nothing else shares.

        Returns another object of the same memory: what is still the target's own has not been filled.
        """
        self.used = True
        leaf = self._aliases.get(name, name)
        for box, array in target.boxes:
            where = array_destination(array)
            assert where is not None, "boxes to be filled are writable"
            self.boxes.append((leaf, box, where))
        filled = replace(target)
        return lambda lookup: filled

    def _key_of_another(self, first: FilledArray, name: str) -> str:
        """The name under which a leaf is read once more; it was the first's if that is an alias."""
        if name in self.destinations:
            if first.name in self.destinations:
                corrupt(f"it refers to leaf {shorten(name)!r} twice")
            self.destinations[first.name] = self.destinations.pop(name)
            self._at[first.name] = self._at.pop(name)
            if name in self.parts:
                self.parts[first.name] = self.parts.pop(name)
        return name

    def settle_overlaps(self) -> None:
        """Two leaves must not be read into the same bytes at once: the later one is read apart and copied.

        Views of one buffer in the target (a matrix and its first row) are how this comes about. That they fit
        together is known only when all is read: `join_overlaps` looks.
        """
        spans = [(*span(where), name) for name, where in self.destinations.items() if has_span(where)]
        reach = -1
        before: list[tuple[str, Host]] = []
        for start, end, name in sorted(spans, key=lambda found: (found[0], -found[1])):
            where = self.destinations[name]
            assert not isinstance(where, Consumed)
            if start >= reach:
                reach = end
                before = [(name, where)]
                continue
            reach = max(reach, end)
            filled = self._at[name]
            self._later.append(_Later(filled, where, before, len(before)))
            before.append((name, where))
            if filled.sharding is not None:
                self.destinations[name] = filled.stage()
            else:
                filled.direct = False
                del self.destinations[name]
                self.want(filled.leaf)

    def join_overlaps(self, lookup: Lookup) -> None:
        """Write what was read apart. `StateMismatch` where that changes bytes that another leaf has there.

        What a checkpoint has of overlapping views agrees where they overlap, if they overlapped when it was
        saved. In a target that overlaps otherwise one of them would be wrong without notice.
        """
        for later in self._later:
            filled = later.filled
            read = filled.staged if filled.staged is not None else lookup(filled.leaf)
            stored = array_destination(read)
            assert isinstance(stored, (Memory, Strided)), "what was read apart is plain memory"
            other = clash(later.where, stored, later.before[: later.count])
            if other is not None:
                raise StateMismatch(
                    f"{filled.name} and {other} share memory in the target, but differ there in the "
                    "checkpoint: only one of them could be restored. Give them memory of their own. "
                    "Arrays of the target are already overwritten",
                    wrong=[filled.name, other],
                )
            copy_into(filled.array, read)
            filled.staged = None
            filled.direct = True

    def fresh(self) -> tuple[str, ...]:
        """The leaves to read into new arrays."""
        return tuple(leaf for leaf in self._fresh if self._whole(leaf) is None)

    def _whole(self, leaf: str) -> FilledArray | None:
        """The array of the target that has all of a leaf in its own memory."""
        first = self._first.get(leaf)
        return first if first is not None and first.direct and first.sharding is None else None

    def lookup(self, arrays: Mapping[str, object]) -> Lookup:
        """Finds arrays among those of the target and the new ones."""

        def look(name: str) -> object:
            leaf = self._aliases.get(name, name)
            filled = self._whole(leaf)
            return arrays[leaf] if filled is None else filled.target

        return look

    def tell_autograd(self) -> None:
        """The engine writes behind torch's back; a graph that saved these tensors must find out."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        count = torch.autograd.graph.increment_version
        for filled in self._all:
            if filled.sharding is not None:
                # DTensor counts on the outside, whatever its part counts.
                if filled.sharding.mesh_shape is not None:
                    count(filled.target)
                count(filled.array)
            elif filled.direct and isinstance(filled.target, torch.Tensor):
                count(filled.target)
