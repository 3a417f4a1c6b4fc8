"""What the manifest of a checkpoint says: its parts (what each rank wrote), leaves, tree and values.

Parts are read when they are first needed, checked, and kept.

The root has the part of rank 0 and says which others there are. Where it has a layout, that tells which of
them hold what a reader wants; otherwise all of them are asked.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, LeafNotFound
from everystep.format.dtypes import opaque
from everystep.format.geometry import Box, whole
from everystep.format.manifest import decode_part
from everystep.format.records import Leaf, Part, PartRef, Root
from everystep.plan.description import decode_plan
from everystep.plan.ranks import WritePlan
from everystep.state import Framework, LeafMeta, Node, leaf_names, values
from everystep.state.merging import merge_trees
from everystep.state.select import with_keys
from everystep.store.read.file_access import FileAccess
from everystep.store.read.read_errors import open_stored, patiently, read_up_to, reading

_MAX_PINNED = 128
"""Parts whose shards stay within reach even if the checkpoint is replaced: each takes a file descriptor."""
MAX_SOURCES = 1 << 22
"""If a layout cuts a request into more pieces than this, all parts are asked instead."""


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A leaf as it is stored.

    Attributes:
        dtype: Its element type, by its safetensors name.
        shape: Its shape.
        nbytes: The size of its elements.
        framework: ``"torch"`` or ``"numpy"``: what it was saved from.
        alias_of: The name of the leaf with which it shares its bytes, if it is another name of that.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    framework: Framework
    alias_of: str | None = None


class Parts:
    """What the manifest at `manifest_path` says, whose checkpoint `hold` holds; all parts as one state."""

    def __init__(self, root: Root, hold: FileAccess, manifest_path: str) -> None:
        self.root = root
        self.path = hold.path
        self.manifest_path = manifest_path
        self._hold = hold
        self._entries: Collection[str] | None = None
        # There is one part, and decoding has checked that it has every leaf of the tree.
        self._alone = root.world == 1 and not root.layout
        self._refs = {ref.rank: ref for ref in root.parts}
        self._known: dict[int, Part] = {0: root.part}
        self._by_name: dict[int, dict[str, Leaf]] = {}
        self._lock = threading.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote something, ascending."""
        return 0, *self._refs

    def __getitem__(self, rank: int) -> Part:
        """Raises `CorruptCheckpoint` if the file is not the one that the root describes."""
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
        """The path of the file that holds the part of a rank."""
        return os.path.join(self._hold.path, self._refs[rank].file) if rank else self.manifest_path

    @functools.cached_property
    def stored_whole(self) -> bool:
        """Whether one process wrote all to its own directory, every leaf in one piece."""
        return self._alone and {len(leaf.fragments) for leaf in self.root.part.leaves} <= {1}

    @functools.cached_property
    def layout(self) -> WritePlan | None:
        """Who wrote what, if the root says so."""
        if not self.root.layout:
            return None
        plan = decode_plan(self.root.layout, self.manifest_path)
        if plan.topology.world != self.root.world:
            raise CorruptCheckpoint(
                f"a layout of {plan.topology.world} ranks in a checkpoint of {self.root.world}",
                path=self.manifest_path,
            )
        self._check_described(self.root.part, plan)
        return plan

    def _check_described(self, part: Part, plan: WritePlan) -> None:
        """Readers trust the layout, so every part that is opened must describe its leaves in the same way."""
        for leaf in part.leaves:
            if is_local(part, leaf.name):
                continue
            said = plan.leaf(leaf.name)
            if said is None or (said.dtype, said.shape) != (leaf.dtype, leaf.shape):
                meta = LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
                raise CorruptCheckpoint(
                    f"the part of rank {part.rank} says {meta}, the layout something else",
                    path=self.manifest_path,
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
        part = self._part_with_own(rank)
        if part is None:
            return {}
        return {
            leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework)
            for leaf in part.leaves
            if is_local(part, leaf.name)
        }

    @functools.cached_property
    def _with_trees(self) -> list[Part]:
        found = [self.root.part, *(self[rank] for rank in self.root.trees)]
        for part in found[1:]:
            if part.tree is None:
                reason = f"the part of rank {part.rank} has no tree, where the root says it has"
                raise CorruptCheckpoint(reason, path=self.file_of(part.rank))
        return found

    @property
    def tree(self) -> Node:
        """The state with its arrays taken out, of all ranks together."""
        return self.merged_tree if self._entries is None else with_keys(self.merged_tree, self._entries)

    def keep_entries(self, keys: Collection[str]) -> None:
        """Leaves out all other entries of the state, as if they had not been saved."""
        self._entries = keys

    @functools.cached_property
    def merged_tree(self) -> Node:
        """The trees of all ranks that have one of their own, merged."""
        root: Node = self.root.tree
        if self._alone:
            return root
        tree = merge_trees([root, *(part.tree for part in self._with_trees[1:])])
        if any(name not in self.metas and name not in self.aliases for name in leaf_names(tree)):
            raise CorruptCheckpoint("the tree refers to a leaf that is not there", path=self.manifest_path)
        return tree

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Further names of the leaves that ranks share. A name that is a leaf in some part is left out."""
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
        part = self._part_with_own(rank)
        if part is None:
            return {}
        return {alias.name: alias.of for alias in part.aliases if is_local(part, alias.name)}

    def local(self, rank: int) -> dict[str, Node]:
        """The trees of what belongs to one rank alone, by place; none when there was no such rank."""
        part = self._part_with_own(rank)
        return {} if part is None else dict(part.local)

    def _part_with_own(self, rank: int) -> Part | None:
        """The part of a rank that has state of its own; None if there is none."""
        part = self.root.part if rank == 0 else self[rank] if rank in self._refs else None
        return None if part is None or not part.local else part

    def metas_for(self, rank: int) -> dict[str, LeafMeta]:
        """The leaves that a rank can restore: those of all, and its own."""
        own = self.local_metas(rank)
        return {**self.metas, **own} if own else self.metas

    def aliases_for(self, rank: int) -> dict[str, str]:
        """Further names of the leaves that a rank can restore."""
        own = self.local_aliases(rank)
        return {**self.aliases, **own} if own else self.aliases

    def meta(self, name: str) -> LeafMeta:
        """A leaf, under any of its names. `LeafNotFound` if there is none."""
        if not isinstance(name, str):
            raise TypeError(f"leaves are named by strings, not by {type(name).__name__}: {name!r}")
        found = self.metas.get(self.aliases.get(name, name))
        rank = local_rank(name)
        if found is None and rank is not None:
            found = self.local_metas(rank).get(self.local_aliases(rank).get(name, name))
        if found is None:
            raise LeafNotFound(self.no_leaf(name))
        return found

    def no_leaf(self, name: str) -> str:
        """For an error: that there is no such leaf."""
        return f"{self.path} has no leaf {name!r}; `everystep show` lists them"

    def has_leaf(self, name: object) -> bool:
        """Whether there is a leaf of that name. Opens other parts only for a name of a rank's own leaf."""
        if name in self.metas or name in self.aliases:
            return True
        return isinstance(name, str) and local_rank(name) is not None and name in self.leaf_infos

    @functools.cached_property
    def leaf_infos(self) -> dict[str, LeafInfo]:
        """Every leaf by name, tied ones and those of single ranks included. Opens every part."""
        metas, aliases = dict(self.metas), dict(self.aliases)
        for rank in self.ranks:
            metas.update(self.local_metas(rank))
            aliases.update(self.local_aliases(rank))
        found = {name: _info(meta, None) for name, meta in metas.items()}
        found.update({name: _info(metas[of], of) for name, of in aliases.items()})
        return found

    @functools.cached_property
    def shown_infos(self) -> dict[str, LeafInfo]:
        """The same for users: `leaf_infos` may have types that no array can have."""
        return {name: _shown(info) for name, info in self.leaf_infos.items()}

    @functools.cached_property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name; where every rank has its own, that of rank 0."""
        return values(self.tree, local=self.local(0), where=self.manifest_path)

    def names_for(self, rank: int) -> list[str]:
        """The names of all leaves that a rank can load, tied ones included."""
        shared = self.metas if not self.stored_whole else self.leaves_of(0)
        return list(dict.fromkeys([*shared, *self.aliases, *self.own_names(rank)]))

    def own_names(self, rank: int) -> list[str]:
        """The names of the leaves that belong to one rank alone, tied ones included."""
        if self._part_with_own(rank) is None:
            return []
        return [*self.local_metas(rank), *self.local_aliases(rank)]

    def leaves_of(self, rank: int) -> dict[str, Leaf]:
        """What a part says of each of its leaves."""
        found = self._by_name.get(rank)
        if found is None:
            found = self._by_name[rank] = {leaf.name: leaf for leaf in self[rank].leaves}
        return found

    def holding(self, wanted: Sequence[tuple[str, Box]]) -> list[Part]:
        """The parts that hold elements of these boxes, if the layout says which; otherwise all parts.

        They list only the wanted leaves.
        """
        names = dict.fromkeys(name for name, _ in wanted)
        found: list[Part] = []
        for rank in self._writers(wanted):
            stored = self.leaves_of(rank)
            leaves = tuple(stored[name] for name in names if name in stored)
            if leaves:
                found.append(structs.replace(self[rank], leaves=leaves))
        return found

    def _writers(self, wanted: Iterable[tuple[str, Box]]) -> Sequence[int]:
        if self.root.world == 1:
            return self.ranks
        found: set[int] = set()
        budget = MAX_SOURCES
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

        Leaves in several pieces are left out. For them this only checks that all their elements are stored,
        before memory is allocated for what a damaged layout claims.
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
                raise CorruptCheckpoint(
                    f"{count} of its elements are nowhere", path=self.manifest_path, leaf=name
                )
        return {}

    def checksums(self, meta: LeafMeta) -> dict[tuple[Box, int], str]:
        """The checksums of a leaf's fragments, by box and chunk size."""
        return {
            (Box(fragment.start, fragment.shape), part.chunk_nbytes): fragment.chunks
            for part in self.holding([(meta.name, whole(meta.shape))])
            for leaf in part.leaves
            for fragment in leaf.fragments
        }

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


def local_rank(name: str) -> int | None:
    """The rank that a leaf of this name may belong to alone."""
    if not name.startswith("@"):
        return None
    digits = name[1:].partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else None


def is_local(part: Part, name: str) -> bool:
    """Whether a leaf belongs to the rank alone. Only a part with state of its own has such leaves."""
    return bool(part.local) and local_rank(name) == part.rank


def _info(meta: LeafMeta, alias_of: str | None) -> LeafInfo:
    return LeafInfo(meta.dtype, meta.shape, meta.nbytes, meta.framework, alias_of)


def _shown(info: LeafInfo) -> LeafInfo:
    known = opaque(info.dtype)
    return info if known is None else replace(info, dtype=known[0], shape=known[1])
