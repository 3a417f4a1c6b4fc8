"""The three calls: `save`, `load`, `open`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine import Backend, Tuning
from holdfast.errors import CheckpointExists
from holdfast.state import Framework, flatten
from holdfast.store.checkpoint import Checkpoint, resolve
from holdfast.store.commit import MANIFEST, CheckpointInfo, Commit
from holdfast.store.failures import saving
from holdfast.store.partial import PARTIAL
from holdfast.store.run import RETIRED

_STAGING_NBYTES = 64 << 20
"""All that the engine can use: eight windows under way."""
_SHARD = re.compile(r"r[0-9]{5}\.v[0-9]+\.safetensors")


@dataclass(frozen=True, slots=True)
class Options:
    """How to write. The defaults are right unless `holdfast doctor` says otherwise.

    `backend` forces one of ``uring``, ``threads``, ``buffered``; `memory_nbytes` bounds the memory of a save:
    what the engine stages through, and beyond that the copies a `Checkpointer` makes of what training may
    change meanwhile. Files up to `small_nbytes` go through the page cache, where latency counts more than
    throughput.
    """

    backend: Backend | None = None
    memory_nbytes: int = 256 << 20
    small_nbytes: int = 1 << 20

    @property
    def snapshot_nbytes(self) -> int:
        """What is left for copies."""
        return max(0, self.memory_nbytes - _STAGING_NBYTES)

    def tuning(self) -> Tuning:
        window = 8 << 20
        depth = max(2, min(_STAGING_NBYTES, self.memory_nbytes) // window)
        if self.memory_nbytes < 2 * window:
            window = max(64 << 10, self.memory_nbytes // 2 // 4096 * 4096)
        return Tuning(self.backend, window, depth, self.small_nbytes)


_DEFAULT = Options().tuning()


def save(
    path: str | os.PathLike[str],
    state: object,
    *,
    step: int = 0,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    options: Options | None = None,
) -> CheckpointInfo:
    """Write one checkpoint directory at `path`; when this returns it survives a power cut.

    `state` is any nesting of dicts, lists and tuples with torch tensors, numpy arrays, plain values, and
    objects that have ``state_dict``/``load_state_dict`` (modules, optimizers, schedulers). ``overwrite=True``
    replaces the checkpoint that is there, at once and whole, but never anything else.

    >>> import holdfast, numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> info = holdfast.save(f"{folder}/first", {"w": numpy.arange(3), "epoch": 7})
    >>> holdfast.load(f"{folder}/first")
    {'w': array([0, 1, 2]), 'epoch': 7}
    """
    target = os.path.abspath(os.fspath(path))
    if target.endswith((PARTIAL, RETIRED)):
        raise ValueError(f"{target}: names that end so mark what is no checkpoint; choose another")
    if overwrite:
        _refuse_stranger(target)
    tuning = _DEFAULT if options is None else options.tuning()
    return Commit(target, step, dict(metrics or {}), tuning, overwrite=overwrite).run(flatten(state))


def load(
    path: str | os.PathLike[str],
    into: object = None,
    *,
    select: str | Iterable[str] | None = None,
    framework: Framework | None = None,
    verify: bool = True,
    strict: bool = True,
) -> Any:
    """Read a checkpoint (of a run: the newest) back, bit for bit.

    Without `into` the tree comes back in fresh memory: torch tensors for what was saved from torch, numpy
    arrays otherwise, or all of one kind with ``framework="torch" | "numpy"``. `select`, a glob or several,
    takes only the leaves that match; with `into`, all else in the target stays as it is.

    With `into` the state is restored in place, straight from the device into the memory of its tensors;
    modules, optimizers and other objects get their ``load_state_dict``. Leaves that are missing, extra or of
    another shape are a `StateMismatch` before anything is touched; ``strict=False`` restores what fits and
    warns about the rest. Should the checkpoint turn out damaged while it is read, `CorruptCheckpoint` is
    raised and part of `into` is overwritten.
    """
    with Checkpoint(resolve(path)) as checkpoint:
        return checkpoint.load(into, select=select, framework=framework, verify=verify, strict=strict)


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint (of a run: the newest) without reading its arrays."""
    return Checkpoint(resolve(path))


def _refuse_stranger(target: str) -> None:
    """A run, somebody's home, a file: what is not a checkpoint is not ours to replace."""
    if not os.path.lexists(target):
        return
    with saving(target):
        plain = os.path.isdir(target) and not os.path.islink(target)
        names = os.listdir(target) if plain else []
    # One that has lost its manifest is known by its shards.
    if not plain or (MANIFEST not in names and not all(map(_SHARD.fullmatch, names))):
        raise CheckpointExists(
            f"{target} is not a checkpoint, and overwrite=True replaces nothing else: choose another path"
        )
