"""The three calls: `save`, `load`, `open`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine import Backend, Tuning
from holdfast.state import Framework
from holdfast.store.checkpoint import Checkpoint, resolve
from holdfast.store.commit import CheckpointInfo, Commit


@dataclass(frozen=True, slots=True)
class Options:
    """How to write. The defaults are right unless `holdfast doctor` says otherwise.

    `backend` forces one of ``uring``, ``threads``, ``buffered``; `memory_nbytes` bounds the staging memory of a save;
    files up to `small_nbytes` go through the page cache, where latency counts more than throughput.
    """

    backend: Backend | None = None
    memory_nbytes: int = 32 << 20
    small_nbytes: int = 1 << 20

    def tuning(self) -> Tuning:
        window = 4 << 20
        depth = max(2, min(64, self.memory_nbytes // window))
        if self.memory_nbytes < 2 * window:
            window = max(64 << 10, self.memory_nbytes // 2 // 4096 * 4096)
        return Tuning(self.backend, window, depth, self.small_nbytes)


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

    `state` is any nesting of dicts, lists and tuples with torch tensors, numpy arrays, plain values, and objects that
    have ``state_dict``/``load_state_dict`` (modules, optimizers, schedulers).

    >>> import holdfast, numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> info = holdfast.save(f"{folder}/first", {"w": numpy.arange(3), "epoch": 7})
    >>> holdfast.load(f"{folder}/first")
    {'w': array([0, 1, 2]), 'epoch': 7}
    """
    target = os.path.abspath(os.fspath(path))
    tuning = (options or Options()).tuning()
    return Commit(target, step, dict(metrics or {}), tuning, overwrite=overwrite).run(state)


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

    Without `into` the tree comes back in fresh memory: torch tensors for what was saved from torch, numpy arrays
    otherwise, or all of one kind with ``framework="torch" | "numpy"``. `select`, a glob or several, takes only the
    leaves that match.

    With `into` the state is restored in place, straight from the device into the memory of its tensors; modules,
    optimizers and other objects get their ``load_state_dict``. Leaves that are missing, extra or of another shape are
    a `StateMismatch` before anything is touched; ``strict=False`` restores what fits and warns about the rest. Should
    the checkpoint turn out damaged while it is read, `CorruptCheckpoint` is raised and part of `into` is overwritten.
    """
    with Checkpoint(resolve(path)) as checkpoint:
        return checkpoint.load(into, select=select, framework=framework, verify=verify, strict=strict)


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint (of a run: the newest) without reading its arrays."""
    return Checkpoint(resolve(path))
