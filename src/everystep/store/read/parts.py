"""The parts of a checkpoint: what each rank wrote, read when it is first needed, checked, and kept.

The root has the part of rank 0 and says which others there are. Where it has a layout, that tells which of
them hold what a reader wants; otherwise all of them are asked.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint
from everystep.format.geometry import Box, TooTangled, disjoint, intersect, whole
from everystep.format.manifest import decode_part
from everystep.format.records import Leaf, Part, PartRef, Root
from everystep.plan.description import decode_plan
from everystep.plan.ranks import WritePlan
from everystep.state import LeafMeta, Node
from everystep.state.merging import merge_trees
from everystep.state.node import leaf_names
from everystep.store.os_errors import open_stored, patiently, read_up_to, reading
from everystep.store.read.file_access import FileAccess

_MAX_PINNED = 128
"""Parts whose shards stay within reach even if the checkpoint is replaced: each takes a file descriptor."""
_MAX_SOURCES = 1 << 22
"""Pieces that a layout is asked about. One that makes more of a request is not worth following."""


class Parts:
    """The parts of the checkpoint that `hold` holds. `where` is the path of its manifest."""

    def __init__(self, root: Root, hold: FileAccess, where: str) -> None:
        self._root = root
        self._hold = hold
        self._where = where
        self._refs = {ref.rank: ref for ref in root.parts}
        self._known: dict[int, Part] = {0: root.part}
        self._by_name: dict[int, dict[str, Leaf]] = {}
        self._lock = threading.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that wrote something, ascending."""
        return 0, *self._refs

    def __getitem__(self, rank: int) -> Part:
        """`CorruptCheckpoint` names the file when it is not the one that the root describes."""
        with self._lock:
            part = self._known.get(rank)
            if part is None:
                ref = self._refs[rank]
                part = self._known[rank] = patiently(lambda: self._read(ref))
            return part

    def __contains__(self, rank: object) -> bool:
        return rank == 0 or rank in self._refs

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, self.ranks)

    def file_of(self, rank: int) -> str:
        """Where the part of a rank stands."""
        return os.path.join(self._hold.path, self._refs[rank].file) if rank else self._where

    @functools.cached_property
    def stored_whole(self) -> bool:
        """Whether one process wrote all to its own directory, every leaf in one piece."""
        return self._alone and all(len(leaf.fragments) == 1 for leaf in self._root.part.leaves)

    @property
    def _alone(self) -> bool:
        """Whether the one part has been found to have all that the tree refers to."""
        return self._root.world == 1 and not self._root.layout

    @functools.cached_property
    def layout(self) -> WritePlan | None:
        """Who wrote what, if the root says so."""
        if not self._root.layout:
            return None
        plan = decode_plan(self._root.layout, self._where)
        if plan.topology.world != self._root.world:
            raise CorruptCheckpoint(
                f"a layout of {plan.topology.world} ranks in a checkpoint of {self._root.world}",
                path=self._where,
            )
        self._check_described(self._root.part, plan)
        return plan

    def _check_described(self, part: Part, plan: WritePlan) -> None:
        """What a layout says of a leaf, readers believe: so every part that is opened must say the same."""
        for leaf in part.leaves:
            if is_local(part, leaf.name):
                continue
            said = plan.leaf(leaf.name)
            if said is None or (said.dtype, said.shape) != (leaf.dtype, leaf.shape):
                meta = LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
                raise CorruptCheckpoint(
                    f"the part of rank {part.rank} says {meta}, the layout something else",
                    path=self._where,
                    leaf=leaf.name,
                )

    @functools.cached_property
    def metas(self) -> dict[str, LeafMeta]:
        """Every leaf that is not one rank's own. Opens other parts only where there is no layout."""
        if self.layout is not None:
            return {
                leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
                for leaf in self.layout.leaves
            }
        found: dict[str, LeafMeta] = {}
        for part in self:
            for leaf in part.leaves:
                if not is_local(part, leaf.name):
                    meta = LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
                    if found.setdefault(leaf.name, meta) != meta:
                        raise CorruptCheckpoint(
                            f"the part of rank {part.rank} says {meta}, another part {found[leaf.name]}",
                            path=self.file_of(part.rank),
                            leaf=leaf.name,
                        )
        return found

    def local_metas(self, rank: int) -> dict[str, LeafMeta]:
        """The leaves that belong to one rank alone; none if it did not take part."""
        if rank not in self or not self[rank].local:
            return {}
        part = self[rank]
        return {
            leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
            for leaf in part.leaves
            if is_local(part, leaf.name)
        }

    @functools.cached_property
    def _with_trees(self) -> list[Part]:
        found = [self[rank] for rank in (0, *self._root.trees)]
        for part in found[1:]:
            if part.tree is None:
                reason = f"the part of rank {part.rank} has no tree, where the root says it has"
                raise CorruptCheckpoint(reason, path=self.file_of(part.rank))
        return found

    @functools.cached_property
    def tree(self) -> Node:
        """The tree of the whole state: those of all ranks that have one of their own, merged."""
        root: Node = self._root.tree
        if self._alone:
            return root
        tree = merge_trees([root, *(part.tree for part in self._with_trees[1:])])
        if any(name not in self.metas and name not in self.aliases for name in leaf_names(tree)):
            raise CorruptCheckpoint("the tree refers to a leaf that is not there", path=self._where)
        return tree

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Further names of leaves that are not one rank's own. What is a leaf somewhere needs no alias."""
        found: dict[str, str] = {}
        for part in self._with_trees:
            for alias in part.aliases:
                if not is_local(part, alias.name) and (self._alone or alias.name not in self.metas):
                    if alias.of not in self.metas:
                        raise CorruptCheckpoint(
                            "alias of something that is not a leaf",
                            path=self.file_of(part.rank),
                            leaf=alias.name[:1000],
                        )
                    found.setdefault(alias.name, alias.of)
        return found

    def local_aliases(self, rank: int) -> dict[str, str]:
        """Further names of the leaves of one rank."""
        if rank not in self or not self[rank].local:
            return {}
        part = self[rank]
        return {alias.name: alias.of for alias in part.aliases if is_local(part, alias.name)}

    def names_for(self, rank: int) -> list[str]:
        """The names of all leaves that a rank can load, tied ones included."""
        own = {**self.local_metas(rank), **self.local_aliases(rank)}
        shared = self.metas if not self.stored_whole else self.leaves_of(0)
        return list(dict.fromkeys([*shared, *self.aliases, *own]))

    def leaves_of(self, rank: int) -> dict[str, Leaf]:
        """What a part says of each of its leaves."""
        found = self._by_name.get(rank)
        if found is None:
            found = self._by_name[rank] = {leaf.name: leaf for leaf in self[rank].leaves}
        return found

    def holding(self, wanted: Sequence[tuple[str, Box]]) -> list[Part]:
        """The parts with elements of these boxes of leaves, as far as the layout tells; else all.

        Of their leaves, they have only those that are wanted.
        """
        names = dict.fromkeys(name for name, _ in wanted)
        found: list[Part] = []
        for rank in self._writers(wanted):
            stored = self.leaves_of(rank)
            leaves = tuple(stored[name] for name in names if name in stored)
            if leaves:
                found.append(replace(self[rank], leaves=leaves))
        return found

    def _writers(self, wanted: Iterable[tuple[str, Box]]) -> Sequence[int]:
        if self._root.world == 1:
            return self.ranks
        found: set[int] = set()
        budget = _MAX_SOURCES
        for name, box in wanted:
            if name not in self.metas:
                found.add(local_rank(name) or 0)
            elif self.layout is None:
                return self.ranks
            else:
                for writer, _ in itertools.islice(self.layout.sources(name, box), budget):
                    found.add(writer)
                    budget -= 1
                if not budget:
                    return self.ranks
        return [rank for rank in self.ranks if rank in found]

    def residues(self, metas: Iterable[LeafMeta], alignment: int) -> dict[str, int]:
        """Where each leaf begins in its file, modulo the alignment: memory to match is filled without copies.

        Of leaves in several pieces nothing is said, but that they are all there: nobody should take memory
        for what only a damaged layout has.
        """
        if self.stored_whole:
            stored = self.leaves_of(0)
            return {meta.name: stored[meta.name].fragments[0].offset % alignment for meta in metas}
        shapes = {meta.name: meta.shape for meta in metas}
        left = {name: math.prod(shape) for name, shape in shapes.items()}
        for part in self.holding([(name, whole(shape)) for name, shape in shapes.items()]):
            for leaf in part.leaves:
                left[leaf.name] -= sum(math.prod(fragment.shape) for fragment in leaf.fragments)
        for name, count in left.items():
            if count > 0:
                raise CorruptCheckpoint(f"{count} of its elements are nowhere", path=self._where, leaf=name)
        return {}

    def checksums(self, meta: LeafMeta) -> dict[tuple[Box, int], str]:
        """Those of a leaf's fragments, by the box and the bytes that each checksum is of."""
        return {
            (Box(fragment.start, fragment.shape), part.chunk_nbytes): fragment.chunks
            for part in self.holding([(meta.name, whole(meta.shape))])
            for leaf in part.leaves
            for fragment in leaf.fragments
        }

    def check_agreement(self) -> None:
        """`CorruptCheckpoint` unless all parts, the tree and the layout fit together. Opens every part.

        Each leaf must be all there, no element of it twice, and described alike by everyone who has some.
        """
        boxes: dict[str, dict[int, list[Box]]] = {name: {} for name in self.metas}
        metas = dict(self.metas)
        for part in self:
            metas.update(self.local_metas(part.rank))
            for leaf in part.leaves:
                held = [Box(fragment.start, fragment.shape) for fragment in leaf.fragments]
                boxes.setdefault(leaf.name, {})[part.rank] = held
        for name, meta in metas.items():
            try:
                _check_whole(meta, boxes[name])
                if self.layout is not None and name in self.metas:
                    _check_writers(self.layout, meta, boxes[name])
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(error.reason, path=self._where, leaf=name) from None
        self.tree  # noqa: B018 -- checks that it refers to leaves that are there

    def _read(self, ref: PartRef) -> Part:
        shown = os.path.join(self._hold.path, ref.file)
        try:
            with reading(shown), open_stored(self._hold.file(ref.file), shown) as file:
                nbytes = os.fstat(file.fileno()).st_size
                if nbytes != ref.nbytes:
                    raise CorruptCheckpoint(
                        f"the part of rank {ref.rank} has {nbytes} bytes, where the root says {ref.nbytes}",
                        path=shown,
                    )
                data = read_up_to(file, nbytes + 1)
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                self._hold.require_current()
                raise IncompleteCheckpoint(f"the part of rank {ref.rank} is missing", path=shown) from error
            raise
        part = decode_part(data, shown, ref)
        if self.layout is not None:
            self._check_described(part, self.layout)
        if len(self._known) <= _MAX_PINNED:
            self._hold.pin(file.name for file in part.files if file.volume is None)
        return part


def _check_whole(meta: LeafMeta, held: Mapping[int, Sequence[Box]]) -> None:
    boxes = [box for its in held.values() for box in its]
    try:
        once = disjoint(boxes)
    except TooTangled as error:
        raise CorruptCheckpoint(str(error)) from None
    if not once:
        raise CorruptCheckpoint("two ranks have stored the same elements")
    left = math.prod(meta.shape) - sum(box.volume for box in boxes)
    if left:
        raise CorruptCheckpoint(f"{left} of its elements are nowhere")


def _check_writers(layout: WritePlan, meta: LeafMeta, held: Mapping[int, Sequence[Box]]) -> None:
    """Every rank must have stored what a reader will look for in its part."""
    pieces = itertools.islice(layout.sources(meta.name, whole(meta.shape)), _MAX_SOURCES)
    for rank, box in pieces:
        both = (intersect(box, its) for its in held.get(rank, ()))
        if sum(found.volume for found in both if found is not None) != box.volume:
            raise CorruptCheckpoint(f"rank {rank} has not stored what the layout says it has")


def local_rank(name: str) -> int | None:
    """The rank whose own a leaf of this name may be."""
    if not name.startswith("@"):
        return None
    digits = name[1:].partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else None


def is_local(part: Part, name: str) -> bool:
    """Whether a leaf belongs to the rank alone. Only a part with state of its own has such leaves."""
    return bool(part.local) and local_rank(name) == part.rank
