"""Bytes of leaves, from the files of a checkpoint into fresh arrays or memory that a caller has.

It knows leaves and files. What the leaves mean (the tree, the values, a target to restore) is left to
`stored_checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import structs

from everystep.engine import ALIGNMENT, Memory, Tuning
from everystep.errors import LeafNotFound, UnsupportedState
from everystep.format.dtypes import itemsize
from everystep.format.geometry import whole
from everystep.format.records import Leaf
from everystep.state import Framework, FreshArrays, LeafMeta, check_framework, empty
from everystep.store.read.file_access import FileAccess
from everystep.store.read.gather import FileReads, fetch, plan_fetch
from everystep.store.read.parts import Parts, local_rank
from everystep.store.read.requests import BoxRequest
from everystep.store.read.shard_reader import ShardReader, whole_leaf

_BATCH_NBYTES = 256 << 20
"""Host memory that tensors pass through on their way to a device. A larger tensor takes its own size."""


class LeafReader:
    """Reads the leaves of `parts`, whose files `hold` gives access to."""

    def __init__(self, hold: FileAccess, parts: Parts, tuning: Tuning) -> None:
        self.path = hold.path
        self.parts = parts
        self._hold = hold
        self._tuning = tuning

    def fetch(
        self,
        wanted: Sequence[BoxRequest],
        *,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads boxes of leaves into their destinations, from the files that hold them.

        Every byte read is verified by default. `CorruptCheckpoint` names file and leaf.
        """
        if self.parts.stored_whole and self._fetch_whole(wanted, verify=verify, progress=progress):
            return
        self.carry_out(self.reads(wanted, verify=verify), verify=verify, progress=progress)

    def reads(self, wanted: Sequence[BoxRequest], *, verify: bool = True) -> list[FileReads]:
        """What has to be read, file by file, to fill the destinations of boxes of leaves."""
        metas = {name: self._meta(name) for name in dict.fromkeys(want.leaf for want in wanted)}
        wanted = [structs.replace(want, leaf=metas[want.leaf].name) for want in wanted if want.box.volume]
        metas = {meta.name: meta for meta in metas.values()}
        boxes = [(want.leaf, want.box) for want in wanted]
        return plan_fetch(self.parts.holding(boxes), wanted, metas, self.path, verify=verify)

    def carry_out(
        self,
        reads: Sequence[FileReads],
        *,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Reads out of files what `reads` says."""
        fetch(reads, self.reader, verify=verify, progress=progress)

    def _fetch_whole(
        self, wanted: Sequence[BoxRequest], *, verify: bool, progress: Callable[[int], None] | None
    ) -> bool:
        """Whole leaves of one process go straight from its files; False when this is something else."""
        stored = self.parts.leaves_of(0)
        leaves: dict[str, Leaf] = {}
        for want in wanted:
            leaf = stored.get(want.leaf)
            if leaf is None or want.box.shape != leaf.shape or want.leaf in leaves:
                return False
            leaves[want.leaf] = leaf
        reader, whole = self.reader(0), len(leaves) == len(stored)
        if all(
            type(want.destination) is Memory
            and want.destination.nbytes == leaves[want.leaf].fragments[0].nbytes
            for want in wanted
        ):
            addresses = [want.destination.address for want in wanted]
            reader.read_whole_leaves(
                [*leaves.values()], addresses, verify=verify, whole=whole, progress=progress
            )
        else:
            requests = [whole_leaf(leaves[want.leaf], want.destination) for want in wanted]
            reader.read(requests, verify=verify, whole=whole, progress=progress)
        return True

    def fresh(
        self, names: Iterable[str], framework: Framework | None = None
    ) -> tuple[dict[str, Any], list[BoxRequest]]:
        """New arrays for leaves, of the framework each was saved from or of this one; what to fetch for them.

        The other framework need not be installed.
        """
        if framework is not None:
            check_framework(framework)
        metas = {name: self._meta(name) for name in names}
        residues = self.parts.residues(metas.values(), ALIGNMENT)
        arrays: dict[str, Any] = {}
        wanted: list[BoxRequest] = []
        for name, meta in metas.items():
            kind = framework or meta.framework
            try:
                arrays[name], memory = empty(meta.dtype, meta.shape, kind, residues.get(name, 0))
            except UnsupportedState as error:
                raise UnsupportedState(f"{meta.name}: {error}") from error
            wanted.append(BoxRequest(meta.name, whole(meta.shape), memory))
        return arrays, wanted

    def _read_fresh(
        self,
        names: Sequence[str],
        framework: Framework | None,
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        if self.parts.stored_whole:
            return self._read_whole(names, framework, verify=verify, progress=progress)
        stored = {name: self._meta(name).name for name in names}
        arrays, wanted = self.fresh(dict.fromkeys(stored.values()), framework)
        self.fetch(wanted, verify=verify, progress=progress)
        return {name: arrays[stored[name]] for name in names}

    def _read_whole(
        self,
        names: Sequence[str],
        framework: Framework | None,
        *,
        verify: bool,
        progress: Callable[[int], None] | None,
    ) -> dict[str, Any]:
        """`_read_fresh` where one process stored every leaf in one piece: with little work for each."""
        if framework is not None:
            check_framework(framework)
        stored = self.parts.leaves_of(0)
        aliases = {**self.parts.aliases, **self.parts.local_aliases(0)}
        arrays: dict[str, Any] = {}
        leaves: list[Leaf] = []
        addresses: list[int] = []
        fresh = FreshArrays()
        for name in names:
            leaf = stored.get(aliases.get(name, name) if aliases else name)
            if leaf is None:
                raise self._no_leaf(name)
            if leaf.name not in arrays:
                (fragment,) = leaf.fragments
                try:
                    arrays[leaf.name], address = fresh.make(
                        leaf.dtype,
                        leaf.shape,
                        framework or leaf.framework,
                        fragment.nbytes,
                        fragment.offset % ALIGNMENT,
                    )
                except UnsupportedState as error:
                    raise UnsupportedState(f"{leaf.name}: {error}") from error
                leaves.append(leaf)
                addresses.append(address)
        self.reader(0).read_whole_leaves(
            leaves, addresses, verify=verify, whole=len(leaves) == len(stored), progress=progress
        )
        if not aliases:
            return arrays
        return {name: arrays[aliases.get(name, name)] for name in names}

    def _read_to_device(
        self, names: Sequence[str], framework: Framework | None, device: Any, *, verify: bool
    ) -> dict[str, Any]:
        """Fresh arrays whose tensors are on a device. Host memory holds one batch at a time."""
        if framework == "numpy":
            raise TypeError('device= is for torch tensors, and framework="numpy" asks for none')
        arrays: dict[str, Any] = {}
        moved: dict[str, Any] = {}
        for batch in self._batches(names):
            for name, array in self._read_fresh(batch, framework, verify=verify).items():
                meta = self._meta(name)
                if meta.name not in moved:  # names of one leaf stay one tensor
                    is_torch = (framework or meta.framework) == "torch"
                    moved[meta.name] = array.to(device) if is_torch else array
                arrays[name] = moved[meta.name]
        return {name: arrays[name] for name in names}

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        nbytes = 0
        for name in names:
            size = nbytes_of(self._meta(name))
            if batch and nbytes + size > _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += size
        if batch:
            yield batch

    def _no_leaf(self, name: str) -> LeafNotFound:
        return LeafNotFound(f"{self.path} has no leaf {name!r}; `everystep show` lists them")

    @property
    def tuning(self) -> Tuning:
        """How it is read: others of the same work are to be read so, too."""
        return self._tuning

    @property
    def window_nbytes(self) -> int:
        """What one read has in memory at most, beside its destinations."""
        return self._tuning.window_nbytes * self._tuning.depth

    def reader(self, rank: int) -> ShardReader:
        """The shards of a rank."""
        return ShardReader(self.parts[rank], self._hold, self._tuning)

    def _meta(self, name: str) -> LeafMeta:
        """Of a leaf, under any of its names."""
        if not isinstance(name, str):
            raise TypeError(f"leaves are named by strings, not by {type(name).__name__}: {name!r}")
        found = self.parts.metas.get(self.parts.aliases.get(name, name))
        rank = local_rank(name)
        if found is None and rank is not None:
            found = self.parts.local_metas(rank).get(self.parts.local_aliases(rank).get(name, name))
        if found is None:
            raise self._no_leaf(name)
        return found


def nbytes_of(meta: LeafMeta) -> int:
    return math.prod(meta.shape) * itemsize(meta.dtype)
