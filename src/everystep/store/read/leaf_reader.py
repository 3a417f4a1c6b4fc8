"""Bytes of leaves, from the files of a checkpoint into new arrays or into memory of the caller.

It knows leaves and files. What the leaves mean (the tree, the values, a target to restore) is left to
`checkpoint` and `restoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import structs

from everystep.engine import ALIGNMENT, Memory, Tuning
from everystep.errors import LeafNotFound, UnsupportedState
from everystep.format.geometry import whole
from everystep.format.records import Leaf
from everystep.state import Framework, FreshArrays, check_framework, empty
from everystep.store.read.file_access import FileAccess
from everystep.store.read.gather import FileReads, fetch, plan_fetch
from everystep.store.read.parts import Parts
from everystep.store.read.requests import BoxRequest
from everystep.store.read.shard_reader import ShardReader, whole_leaf

_BATCH_NBYTES = 256 << 20
"""Host memory that tensors pass through on their way to a device. A larger tensor takes its own size."""


class LeafReader:
    """Reads the leaves of `parts`, whose files `hold` gives access to.

    `tuning`: how it reads. Other checkpoints that are read for the same purpose use the same.
    """

    def __init__(self, parts: Parts, hold: FileAccess, tuning: Tuning) -> None:
        self.parts = parts
        self.tuning = tuning
        self.hold = hold

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
        """The reads that fill the destinations of boxes of leaves, file by file."""
        metas = {name: self.parts.meta(name) for name in dict.fromkeys(want.leaf for want in wanted)}
        wanted = [structs.replace(want, leaf=metas[want.leaf].name) for want in wanted if want.box.volume]
        metas = {meta.name: meta for meta in metas.values()}
        boxes = [(want.leaf, want.box) for want in wanted]
        return plan_fetch(self.parts.holding(boxes), wanted, metas, self.parts.path, verify=verify)

    def carry_out(
        self,
        reads: Sequence[FileReads],
        *,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Carries out what `reads` has planned."""
        fetch(reads, self.shards, verify=verify, progress=progress)

    def _fetch_whole(
        self, wanted: Sequence[BoxRequest], *, verify: bool, progress: Callable[[int], None] | None
    ) -> bool:
        """Reads whole leaves of a one-process checkpoint. Returns False if the request is anything else."""
        stored = self.parts.leaves_of(0)
        leaves: dict[str, Leaf] = {}
        for want in wanted:
            leaf = stored.get(want.leaf)
            if leaf is None or want.box.shape != leaf.shape or want.leaf in leaves:
                return False
            leaves[want.leaf] = leaf
        reader, whole = self.shards(0), len(leaves) == len(stored)
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
        """New arrays for leaves, and the requests that fill them.

        By default each array has the framework it was saved from. The other one need not be installed.
        """
        if framework is not None:
            check_framework(framework)
        metas = {name: self.parts.meta(name) for name in names}
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

    def read_fresh(
        self,
        names: Sequence[str],
        framework: Framework | None = None,
        device: Any = None,
        *,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Leaves as new arrays, by the names given. `device`: where tensors go."""
        if device is not None:
            return self._read_to_device(names, framework, device, verify=verify)
        if self.parts.stored_whole:
            return self._read_whole(names, framework, verify=verify, progress=progress)
        stored = {name: self.parts.meta(name).name for name in names}
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
        """`read_fresh` where one process stored every leaf in one piece: little work per leaf."""
        if framework is not None:
            check_framework(framework)
        stored = self.parts.leaves_of(0)
        aliases = self.parts.aliases_for(0)
        arrays: dict[str, Any] = {}
        leaves: list[Leaf] = []
        addresses: list[int] = []
        fresh = FreshArrays()
        for name in names:
            leaf = stored.get(aliases.get(name, name) if aliases else name)
            if leaf is None:
                raise LeafNotFound(self.parts.no_leaf(name))
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
        self.shards(0).read_whole_leaves(
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
            for name, array in self.read_fresh(batch, framework, verify=verify).items():
                meta = self.parts.meta(name)
                if meta.name not in moved:  # names of one leaf stay one tensor
                    is_torch = (framework or meta.framework) == "torch"
                    moved[meta.name] = array.to(device) if is_torch else array
                arrays[name] = moved[meta.name]
        return {name: arrays[name] for name in names}

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        nbytes = 0
        for name in names:
            size = self.parts.meta(name).nbytes
            if batch and nbytes + size > _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += size
        if batch:
            yield batch

    def alike(self, one: str, other: str) -> bool:
        """Whether two leaves have the same bytes: by their checksums, if they are stored in like pieces."""
        metas = self.parts.meta(one), self.parts.meta(other)
        if (metas[0].dtype, metas[0].shape) != (metas[1].dtype, metas[1].shape):
            return False
        pieces = [self.parts.checksums(meta) for meta in metas]
        if pieces[0].keys() == pieces[1].keys() and any(pieces[0].values()):
            return pieces[0] == pieces[1]
        arrays = self.read_fresh([one, other], "numpy")
        return bool(arrays[one].tobytes() == arrays[other].tobytes())

    def close(self) -> None:
        """Releases the files."""
        self.hold.close()

    @property
    def window_nbytes(self) -> int:
        """What one read has in memory at most, beside its destinations."""
        return self.tuning.window_nbytes * self.tuning.depth

    def shards(self, rank: int) -> ShardReader:
        """The shards of a rank."""
        return ShardReader(self.parts[rank], self.hold, self.tuning)
