"""A committed checkpoint as this library sees it: what it holds, and its bytes on demand.

Opening reads and validates the manifest only. Every later read is verified against its checksums by default.
An open checkpoint is locked: retention may remove it, but no writer overwrites its files.

However many ranks wrote it, it is one state here: leaves are whole arrays, and elements of a leaf come from
all files that hold some.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from everystep.engine import READING, Tuning
from everystep.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    ReadFailed,
    StateMismatch,
)
from everystep.format.records import EMBEDDED, Part, Root
from everystep.state import (
    Framework,
    LeafMeta,
    Node,
    Restore,
    leaf_names,
    prune,
    unflatten,
    values,
)
from everystep.state.name_groups import did_you_mean
from everystep.state.node import localized
from everystep.state.select import Selection, nodes_at, with_keys
from everystep.store.names import MANIFEST, SHARD, is_step_name, step_name
from everystep.store.os_errors import reading, shows_damage
from everystep.store.read.file_access import FileAccess
from everystep.store.read.foreign import open_foreign
from everystep.store.read.lazy_leaf import LazyLeaf
from everystep.store.read.leaf_reader import LeafReader, nbytes_of
from everystep.store.read.open import newest, open_checkpoint, open_uncommitted
from everystep.store.read.parts import Parts, local_rank
from everystep.store.read.requests import box_requests, boxes_of_targets
from everystep.store.read.restore_warnings import Unrestored
from everystep.store.read.shard_reader import VerifyProblem

_RENAME_INTO = "rename= goes with into=: it gives the names that parameters have in the target"


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A leaf as stored. `alias_of`: the leaf it shares its bytes with."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    framework: Framework
    alias_of: str | None = None


class StoredCheckpoint(LeafReader):
    """One committed checkpoint, with all that the layers of this library need of it.

    `everystep.store.checkpoint.Checkpoint` is the part of it that users see.
    """

    def __init__(self, path: str, tuning: Tuning = READING) -> None:
        self._begin_own(path, *open_checkpoint(path), tuning)

    @classmethod
    def uncommitted(cls, path: str, tuning: Tuning = READING) -> StoredCheckpoint:
        """What its writer has sealed and not yet committed. Only for that writer, to verify it."""
        made = cls.__new__(cls)
        made._begin_own(path, *open_uncommitted(path), tuning)
        return made

    def _begin_own(self, path: str, hold: FileAccess, root: Root, tuning: Tuning) -> None:
        embedded = any(file.header_xxh3 == EMBEDDED for file in root.part.files)
        self._begin(hold, root, os.path.join(path, SHARD if embedded else MANIFEST), tuning)

    def _begin(self, hold: FileAccess, root: Root, manifest_path: str, tuning: Tuning) -> None:
        """From records that have been checked, to files that `hold` gives access to."""
        super().__init__(hold, Parts(root, hold, manifest_path), tuning)
        self.root = root
        self.manifest_path = manifest_path
        self._entries: Collection[str] | None = None

    @property
    def step(self) -> int:
        return self.root.step

    @property
    def stated_step(self) -> int | None:
        """The step, None if a checkpoint of another system does not say it."""
        return self.step

    @property
    def id(self) -> str:
        return self.root.id

    @property
    def created(self) -> float:
        """Unix time of the save."""
        return self.root.created

    @property
    def world(self) -> int:
        """How many ranks took part in the save."""
        return self.root.world

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.root.metrics)

    @property
    def facts(self) -> Mapping[str, str]:
        """Of a foreign checkpoint: what else is known of it, to be shown. None of one of ours."""
        return {}

    @property
    def tree(self) -> Node:
        """The state with its arrays taken out, of all ranks together."""
        return self.parts.tree if self._entries is None else with_keys(self.parts.tree, self._entries)

    def arrange(self, as_training: bool | None) -> None:
        """Shows a foreign checkpoint as a training state, or as its own library loads it; None: as it is."""

    def fit_to(self, target: object) -> None:
        """Shows a foreign checkpoint as a target has its entries, unless `arrange` has decided."""

    def keep_entries(self, keys: Collection[str]) -> None:
        """Leaves out all other entries of the state, as if they had not been saved."""
        self._entries = keys

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of leaves, and the leaf that each means."""
        return self.parts.aliases

    @property
    def metas(self) -> dict[str, LeafMeta]:
        """Every stored leaf but those that belong to one rank alone."""
        return dict(self.parts.metas)

    def part(self, rank: int) -> Part:
        """What a rank wrote; `KeyError` when it wrote nothing."""
        return self.parts[rank]

    def local(self, rank: int) -> dict[str, Node]:
        """The trees of what belongs to one rank alone, by place; none when there was no such rank."""
        return dict(self.parts[rank].local) if rank in self.parts else {}

    def metas_for(self, rank: int) -> dict[str, LeafMeta]:
        """The leaves that a rank can restore: those of all, and its own."""
        own = self.parts.local_metas(rank)
        return {**self.parts.metas, **own} if own else self.parts.metas

    @functools.cached_property
    def leaves(self) -> dict[str, LeafInfo]:
        """Every leaf by name, tied ones and those of single ranks included."""
        metas, aliases = dict(self.parts.metas), dict(self.parts.aliases)
        for rank in self.parts.ranks:
            metas.update(self.parts.local_metas(rank))
            aliases.update(self.parts.local_aliases(rank))
        found = {name: _info(meta, None) for name, meta in metas.items()}
        found.update({name: _info(metas[of], of) for name, of in aliases.items()})
        return found

    @property
    def shown_leaves(self) -> dict[str, LeafInfo]:
        """The same as users are to see them: `leaves` may have types for what no array can be."""
        return self.leaves

    @functools.cached_property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name; where every rank has its own, that of rank 0."""
        return values(self.tree, local=self.local(0), where=self.manifest_path)

    @property
    def nbytes(self) -> int:
        """The size of the arrays that one process loads; where every rank has its own, those of rank 0."""
        return sum(map(nbytes_of, self.metas_for(0).values()))

    @property
    def stored_nbytes(self) -> int:
        return sum(file.nbytes for part in self.parts for file in part.files)

    def __getitem__(self, name: str) -> LazyLeaf:
        """A leaf by name; index it to read only that part: ``ck["model.w"][10:20]``."""
        return LazyLeaf(name, self._meta(name), self.fetch)

    def __contains__(self, name: object) -> bool:
        if name in self.parts.metas or name in self.parts.aliases:
            return True
        return isinstance(name, str) and local_rank(name) is not None and name in self.leaves

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def read(
        self,
        select: str | Iterable[str] = "*",
        *,
        framework: Framework | None = None,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """The leaves whose names match a glob (or any of several), as arrays in memory."""
        chosen = self.select(select)
        return self._read_fresh(chosen, framework, verify=verify, progress=progress)

    def select(self, patterns: str | Iterable[str], *, rank: int = 0) -> list[str]:
        """Names of the leaves that match: by a glob, or by the name of a subtree, such as ``model``.

        A pattern that matches no leaf is a `StateMismatch`: a typing mistake, or the name of a value.
        """
        chosen = self._select(patterns, rank)
        for pattern, (names, _) in chosen.items():
            if not names and pattern != "*" and not self._select_own(pattern, 0):
                raise self._no_match(pattern)
        return list(dict.fromkeys(name for names, _ in chosen.values() for name in names))

    def selection(self, patterns: str | Iterable[str], *, rank: int = 0) -> Selection:
        """What patterns select of a state: leaves, and subtrees with all the values in them.

        A leaf whose name has brackets or stars is matched by that name, whatever it means as a pattern. What
        belongs to single ranks is matched by ``*``, and by patterns that begin with their ``@``. That of
        `rank` is also matched by its name without ``@N.``, so that one pattern does for all ranks.
        """
        chosen = self._select(patterns, rank)
        leaves = frozenset(name for names, _ in chosen.values() for name in names)
        return Selection(leaves, frozenset(place for place, (_, is_place) in chosen.items() if is_place))

    def _select(self, patterns: str | Iterable[str], rank: int) -> dict[str, tuple[list[str], bool]]:
        """For each pattern the leaves that match, and whether it is the place of a subtree or value."""
        found: dict[str, tuple[list[str], bool]] = {}
        for pattern in _patterns(patterns):
            if pattern == "*" or pattern.startswith("@"):
                names = {name: name for name in self.leaves}
            else:  # all leaves are in all parts, which none of many ranks should have to open
                names = {name: name for name in (*self.parts.metas, *self.parts.aliases)}
                names.update(self._own_names(rank))
            matching = matching_names(names, pattern)
            nodes: list[Node] = []
            if not any(as_said == pattern for as_said in names.values()):
                nodes = nodes_at(localized(self.tree, self.local(rank)), pattern)
                inside = [name for node in nodes for name in leaf_names(node)]
                matching = list(dict.fromkeys([*matching, *inside]))
            # A rank that did not take part in the save has no state of its own to select. Rank 0 always has.
            if not (matching or nodes or pattern == "*" or self._select_own(pattern, 0)):
                raise self._no_match(pattern)
            found[pattern] = matching, bool(nodes)
        return found

    def _select_own(self, pattern: str, rank: int) -> list[str]:
        return matching_names(self._own_names(rank), pattern)

    def _no_match(self, pattern: str) -> StateMismatch:
        if pattern in self.values:
            reason = f"{pattern!r} of {self.path} is a value, not a leaf or a subtree of leaves"
        else:
            guess = did_you_mean(pattern, [*self.leaves, *self.values])
            reason = f"no leaf of {self.path} matches {pattern!r}{guess or '; `everystep show` lists them'}"
        return StateMismatch(reason, missing=[pattern])

    def _own_names(self, rank: int) -> dict[str, str]:
        """The names of what belongs to a rank alone, and the same without the rank."""
        own = {**self.parts.local_metas(rank), **self.parts.local_aliases(rank)}
        return {name: name.removeprefix(f"@{rank}.") for name in own}

    def load(
        self,
        into: object = None,
        *,
        select: str | Iterable[str] | None = None,
        framework: Framework | None = None,
        device: Any = None,
        verify: bool = True,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
    ) -> Any:
        """The whole tree in fresh memory, or put back in place with `into`. See `everystep.load`."""
        if into is None:
            if rename is not None:
                raise TypeError(_RENAME_INTO)
            tree = localized(self.tree, self.local(0))
            if select is None:
                chosen = self.parts.names_for(0)
            else:
                selected = self.selection(select)
                chosen = [name for name in self.parts.names_for(0) if name in selected]
                tree = prune(tree, selected)
            if device is None:
                arrays = self._read_fresh(chosen, framework, verify=verify)
            else:
                arrays = self._read_to_device(chosen, framework, device, verify=verify)
            return unflatten(tree, arrays, where=self.manifest_path)
        refuse_fresh(framework, device)
        self.fit_to(into)
        return self._restore(into, select, verify=verify, strict=strict, rename=rename)

    def plan_restore(
        self,
        into: object,
        select: str | Iterable[str] | None = None,
        *,
        rank: int = 0,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
    ) -> Restore:
        """How the state `into` of a rank is filled. With `strict`, `StateMismatch` unless all of it fits.

        Read `box_requests` it and `fresh` arrays for what it wants fresh, and hand these to its `finish`.
        """
        only = None if select is None else self.selection(select, rank=rank)
        aliases = {**self.aliases, **self.parts.local_aliases(rank)}
        local = self.local(rank)
        metas = self.metas_for(rank)
        restore = Restore(
            into,
            self.tree,
            metas,
            aliases,
            only,
            local=local,
            alike=self.alike,
            rename=rename,
            strict=strict,
        )
        if restore.mismatch and strict:
            raise restore.mismatch.error(self.path)
        if restore.lacks and not restore.fills:
            raise restore.mismatch.nothing(self.path)
        return restore

    def alike(self, one: str, other: str) -> bool:
        """Whether two leaves have the same bytes: by their checksums, if they are stored in like pieces."""
        metas = self._meta(one), self._meta(other)
        if (metas[0].dtype, metas[0].shape) != (metas[1].dtype, metas[1].shape):
            return False
        pieces = [self.parts.checksums(meta) for meta in metas]
        if pieces[0].keys() == pieces[1].keys():
            return pieces[0] == pieces[1]
        arrays = self._read_fresh([one, other], "numpy", verify=True)
        return bool(arrays[one].tobytes() == arrays[other].tobytes())

    def _restore(
        self,
        into: object,
        select: str | Iterable[str] | None,
        *,
        verify: bool,
        strict: bool,
        rename: Callable[[str], str] | None,
    ) -> object:
        restore = self.plan_restore(into, select, strict=strict, rename=rename)
        arrays, wanted = self.fresh(restore.fresh)
        wanted += [*box_requests(restore, self.metas_for(0), 0), *boxes_of_targets(restore)]
        self.fetch(wanted, verify=verify)
        restored = restore.finish(arrays)
        beyond = self.local(0) if self.world > 1 and select is None else {}
        unrestored = Unrestored.of(restore, restore.mismatch, beyond)
        unrestored.warn(self.path, rank=0, world=1, saved_world=self.world)
        return restored

    def names_inside(self) -> list[str]:
        """The names in its directory, even if retention has renamed that; none if it has removed it."""
        with reading(self.path):
            return os.listdir(self._hold.directory)

    def misplaced(self) -> str | None:
        """What is wrong with its name: a run's checkpoint is named by its step."""
        name = os.path.basename(self.path)
        if not is_step_name(name) or name == step_name(self.step):
            return None
        return f"it is a checkpoint of step {self.step}, put in the place of another"

    def visible_damage(self, *, far: bool = True) -> VerifyProblem | None:
        """The damage that shows without reading arrays: a part or shard that is gone, or another.

        `far`: also of shards on volumes of other hosts that cannot be reached from here. Raises `ReadFailed`
        if the files cannot be examined.
        """
        reason = self.misplaced()
        if reason is not None:
            return VerifyProblem(self.manifest_path, reason)
        for rank in self.parts.ranks:
            try:
                self.parts[rank]
            except (CorruptCheckpoint, ReadFailed) as error:
                if not shows_damage(error):
                    raise
                file = getattr(error, "path", None) or self.parts.file_of(rank)
                return VerifyProblem(file, getattr(error, "reason", str(error)))
            problem = self.reader(rank).visible_damage(far=far)
            if problem is not None:
                return problem
        return None

    def close(self) -> None:
        """Lets go of the files. What was read stays; leaves that are still to be read are out of reach."""
        self._hold.close()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step {self.step}, {len(self)} leaves, {self.nbytes} bytes>"


def matching_names(names: Mapping[str, str], pattern: str) -> list[str]:
    """The names (keys) of leaves, known as the values say, that match a pattern.

    A pattern is a glob, and whatever it means as one, also a leaf's own name. Where no leaf has that name, it
    is that of a subtree: ``model`` stands for ``model.w`` and ``model.h.0.w``.
    """
    subtree = f"{pattern}."
    below = []
    if not any(as_said == pattern for as_said in names.values()):
        below = [name for name, as_said in names.items() if as_said.startswith(subtree)]
    return below or [
        name for name, as_said in names.items() if as_said == pattern or fnmatch.fnmatchcase(as_said, pattern)
    ]


def _patterns(select: object) -> list[str]:
    patterns: list[Any] = [select]
    if isinstance(select, Iterable) and not isinstance(select, str | bytes | bytearray):
        patterns = list(select)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"leaves are selected by names or globs, not by {type(pattern).__name__}")
    return patterns


def _info(meta: LeafMeta, alias_of: str | None) -> LeafInfo:
    return LeafInfo(meta.dtype, meta.shape, nbytes_of(meta), meta.framework, alias_of)


def open_newest(path: str | os.PathLike[str], tuning: Tuning = READING) -> StoredCheckpoint:
    """The checkpoint that a path means: itself, or the newest one of a run."""
    return newest(path, functools.partial(open_any, tuning=tuning))


def open_any(path: str, tuning: Tuning = READING) -> StoredCheckpoint:
    """The checkpoint at a path: one of ours, or else one of another system."""
    try:
        return StoredCheckpoint(path, tuning)
    except (CheckpointNotFound, IncompleteCheckpoint):
        found: StoredCheckpoint | None = open_foreign(path, tuning)
        if found is None:
            raise
        return found


def refuse_fresh(framework: Framework | None, device: Any) -> None:
    """For a load into a target: `TypeError` for what is about fresh arrays."""
    given = "framework=" if framework is not None else "device=" if device is not None else None
    if given is not None:
        raise TypeError(f"{given} goes with fresh arrays; with into= the target decides")
