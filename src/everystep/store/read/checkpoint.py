"""A committed checkpoint, open for reading.

Opening reads and validates the manifest only. Every later read is verified against its checksums by default.
An open checkpoint is locked: retention may remove it, but no writer overwrites its files.

However many ranks wrote it, it is one state here: leaves are whole arrays, and elements of a leaf come from
all files that hold some.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from everystep.engine import READING, Tuning
from everystep.errors import CheckpointNotFound, IncompleteCheckpoint
from everystep.format.records import EMBEDDED, Root
from everystep.state import Framework, prune, unflatten
from everystep.state.mismatch import offering
from everystep.state.node import localized
from everystep.store.names import MANIFEST, SHARD, is_step_name, step_name
from everystep.store.read.file_access import FileAccess
from everystep.store.read.foreign import open_foreign, renaming
from everystep.store.read.leaf_reader import LeafReader
from everystep.store.read.open import hold_checkpoint, hold_uncommitted, newest
from everystep.store.read.parts import LeafInfo, Parts
from everystep.store.read.restoring import refuse_fresh, restore_into
from everystep.store.read.selection import select_leaves, select_state
from everystep.store.read.subtree import leaf_or_subtree

_RENAME_INTO = "rename= goes with into=: it gives the names that parameters have in the target"


class Checkpoint:
    """One committed checkpoint, open for reading; `everystep.open` returns it.

    Use it as a context manager, or `close` it. Opening reads and validates the manifest only. Later reads are
    verified against their checksums, unless ``verify=False``. However many ranks wrote the checkpoint, leaves
    are whole arrays here. While it is open, retention may remove it from its run, but no save writes over its
    files.
    """

    # For the rest of the package: `_parts` is what the manifest says, `_reader` reads the bytes of leaves.

    def __init__(self, reader: LeafReader) -> None:
        self._parts, self._reader = reader.parts, reader

    @property
    def path(self) -> str:
        """The absolute path of the checkpoint."""
        return self._parts.path

    @property
    def step(self) -> int:
        """The step that was given to the save; 0 if a checkpoint of another system does not say its step."""
        return self._parts.root.step

    @property
    def id(self) -> str:
        """A random name of this save."""
        return self._parts.root.id

    @property
    def created(self) -> float:
        """Unix time of the save."""
        return self._parts.root.created

    @property
    def world(self) -> int:
        """How many ranks took part in the save."""
        return self._parts.root.world

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were given to the save."""
        return dict(self._parts.root.metrics)

    @property
    def leaves(self) -> dict[str, LeafInfo]:
        """Every leaf by name, tied ones and those of single ranks included."""
        return self._parts.shown_infos

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of leaves, and the leaf that each means."""
        return self._parts.aliases

    @property
    def values(self) -> dict[str, object]:
        """Everything that is not an array, by dotted name; where every rank has its own, that of rank 0."""
        return self._parts.values

    @property
    def nbytes(self) -> int:
        """The size of the arrays that one process loads; where every rank has its own, those of rank 0."""
        return sum(meta.nbytes for meta in self._parts.metas_for(0).values())

    @property
    def stored_nbytes(self) -> int:
        """The size of the shards."""
        return sum(file.nbytes for part in self._parts for file in part.files)

    def __getitem__(self, name: str) -> Any:
        """A leaf by name; index it to read only that part: ``ck["model.w"][10:20]``.

        The name of a subtree gives all of its leaves: ``ck["model"]["w"]``, and ``ck["model"].read()``.
        """
        return leaf_or_subtree(self._reader, name)

    def __contains__(self, name: object) -> bool:
        return self._parts.has_leaf(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.leaf_infos)

    def __len__(self) -> int:
        return len(self._parts.leaf_infos)

    def read(
        self,
        select: str | Iterable[str] = "*",
        *,
        framework: Framework | None = None,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Read leaves into new arrays, by name.

        Args:
            select: A glob, the name of a leaf, or the name of a subtree; or several of these.
            framework: ``"torch"`` or ``"numpy"``; by default the one that each leaf was saved from.
            verify: Compare what is read with its checksums.
            progress: Called with the number of bytes read so far.
        """
        return self._reader.read_fresh(self.select(select), framework, verify=verify, progress=progress)

    def select(self, patterns: str | Iterable[str]) -> list[str]:
        """The names of the leaves that match. Each pattern must match something.

        Leaves of rank 0 alone are also matched by their names without ``@0.``.

        Args:
            patterns: A glob, the name of a leaf, or the name of a subtree; or several of these.
        """
        return select_leaves(self._parts, patterns)

    def load(
        self,
        into: object = None,
        *,
        select: str | Iterable[str] | None = None,
        framework: Framework | None = None,
        device: Any = None,
        verify: bool = True,
        strict: bool = True,
        rename: object = None,
    ) -> Any:
        """The whole state in fresh memory, or put back in place with `into`. See `everystep.load`.

        Args:
            into: The state to restore in place; by default a new one is made.
            select: Take only these: subtrees and leaves by their names, or leaves by a glob.
            framework: Without `into`: ``"torch"`` or ``"numpy"`` for all arrays.
            device: Without `into`: where new tensors go, such as ``"cuda:0"``.
            verify: Compare what is read with its checksums.
            strict: Raise `StateMismatch` unless all of `into` and of the checkpoint fit each other.
            rename: With `into`: the names that parameters of the checkpoint have there.
        """
        with offering("into", "rename", "select", "strict"):
            new_names = renaming(rename)
            if into is not None:
                refuse_fresh(framework, device)
                return self._restore(into, select, verify=verify, strict=strict, rename=new_names)
            if new_names is not None:
                raise TypeError(_RENAME_INTO)
            parts = self._parts
            tree, names = localized(parts.tree, parts.local(0)), parts.names_for(0)
            if select is not None:
                selected = select_state(parts, select)
                tree, names = prune(tree, selected), [name for name in names if name in selected]
            arrays = self._reader.read_fresh(names, framework, device, verify=verify)
            return unflatten(tree, arrays, where=parts.manifest_path)

    def close(self) -> None:
        """Releases the files. Arrays that were read stay; leaves that were not can no longer be read."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step {self.step}, {len(self)} leaves, {self.nbytes} bytes>"

    @property
    def _stated_step(self) -> int | None:
        """The step; None if a checkpoint of another system does not say it."""
        return self.step

    @property
    def _facts(self) -> Mapping[str, str]:
        """What else is known of a checkpoint of another system, to be shown."""
        return {}

    @property
    def _misplaced(self) -> str | None:
        """What is wrong with its name: a run's checkpoint is named by its step."""
        name = os.path.basename(self.path)
        if not is_step_name(name) or name == step_name(self.step):
            return None
        return f"it is a checkpoint of step {self.step}, put in the place of another"

    def _restore(
        self,
        into: object,
        select: str | Iterable[str] | None = None,
        *,
        verify: bool = True,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
    ) -> Any:
        """`load` with `into`."""
        self._fit_to(into)
        return restore_into(self._reader, into, select, verify=verify, strict=strict, rename=rename)

    def _arrange(self, as_training: bool | None) -> None:
        """Shows a foreign checkpoint as a training state, or as its own library loads it; None: as it is."""

    def _fit_to(self, target: object) -> None:
        """Shows a foreign checkpoint as a target has its entries, unless `_arrange` has decided."""


def open_checkpoint(path: str, tuning: Tuning = READING) -> Checkpoint:
    """The checkpoint of ours at a path."""
    return _opened(path, *hold_checkpoint(path), tuning)


def open_uncommitted(path: str, tuning: Tuning = READING) -> Checkpoint:
    """What its writer has sealed and not yet committed. Only for that writer, to verify it."""
    return _opened(path, *hold_uncommitted(path), tuning)


def _opened(path: str, hold: FileAccess, root: Root, tuning: Tuning) -> Checkpoint:
    embedded = EMBEDDED in [file.header_xxh3 for file in root.part.files]
    parts = Parts(root, hold, os.path.join(path, SHARD if embedded else MANIFEST))
    return Checkpoint(LeafReader(parts, hold, tuning))


def open_any(path: str, tuning: Tuning = READING, *, as_training: bool | None = None) -> Checkpoint:
    """The checkpoint at a path: one of ours, or else one of another system, arranged if that is asked for."""
    try:
        return open_checkpoint(path, tuning)
    except (CheckpointNotFound, IncompleteCheckpoint):
        found: Checkpoint | None = open_foreign(path, tuning)
        if found is None:
            raise
    try:
        found._arrange(as_training)
    except BaseException:
        found.close()
        raise
    return found


def open_newest(
    path: str | os.PathLike[str], tuning: Tuning = READING, *, as_training: bool | None = None
) -> Checkpoint:
    """The checkpoint that a path means: itself, or the newest one of a run."""
    return newest(path, partial(open_any, tuning=tuning, as_training=as_training))
