"""Everystep for JAX: pytrees in, pytrees out, whatever devices and processes their arrays lie on.

    from everystep.integrations.jax import Checkpointer

    with Checkpointer("runs/x") as ckpt:
        step, state = ckpt.restore(state)          # 0 and the same state in a new run
        for step in range(step, 10_000):
            state = train_step(state, batches[step])
            ckpt.save(step + 1, state)

| module | what it owns |
|---|---|
| `trees` | a pytree as named leaves, and back |
| `processes` | messages between the processes of ``jax.distributed`` |

`everystep.state.jax_arrays` owns single arrays: the boxes of one in host memory, and back.

A private name of JAX that this relies on: ``jax._src.distributed.global_state.client``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from everystep.integrations.shared.versions import require
from everystep.state.mismatch import offering

require("jax", "0.10", "0.11", extra="jax")

from everystep import checkpointer, store
from everystep.checkpointer import PendingSave
from everystep.integrations.jax.processes import process_group
from everystep.integrations.jax.trees import Live, Target, knows_jax
from everystep.store import CheckpointInfo, Options

__all__ = ["Checkpointer", "load", "save"]

T = TypeVar("T")


def save(
    path: str | os.PathLike[str],
    tree: object,
    *,
    step: int = 0,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    options: Options | None = None,
    timeout: float = 600.0,
) -> CheckpointInfo:
    """Saves a pytree; returns when it is durable. `everystep.save` says what the arguments mean.

    Under ``jax.distributed`` all processes call this, and each writes the shards that only it has, and its
    share of the others. Nothing is gathered.
    """
    return store.save(
        path,
        Live(tree),
        step=step,
        metrics=metrics,
        overwrite=overwrite,
        options=options,
        process_group=process_group(),
        timeout=timeout,
    )


def load(
    path: str | os.PathLike[str],
    like: T,
    *,
    verify: bool = True,
    strict: bool = True,
    options: Options | None = None,
    timeout: float = 600.0,
) -> T:
    """Reads a checkpoint (of a run: the newest) as a pytree like `like`.

    Its leaves may be arrays, or ``jax.ShapeDtypeStruct`` with or without a sharding. Each device gets what
    its sharding says, and only that is read, however the checkpoint was sharded. What does not fit is a
    `StateMismatch` that names the place; with ``strict=False``, those leaves are the ones of `like`.
    """
    with store.open(path, options=options) as checkpoint:
        target = Target(like, described=knows_jax(checkpoint.values))
        path = checkpoint.path  # of a run: all processes read the same one, whatever is saved meanwhile
    with offering("strict"):
        store.load(
            path,
            target.state,
            verify=verify,
            strict=strict,
            options=options,
            process_group=process_group(),
            timeout=timeout,
        )
    found: T = target.tree()
    return found


class Checkpointer:
    """Saves a pytree into a run after each step, and restores it.

    `options` are those of `everystep.Checkpointer` (`every`, `keep`, `mode`, `preemption`, ...).

    A save waits until the arrays are computed, holds their memory, and is written while the next steps run.
    Nothing has to wait for it but the next save: a ``jax.Array`` does not change. Arrays that a step would
    donate (``donate_argnums``) are kept while a save holds them: on the CPU, JAX then computes into fresh
    memory instead; on other devices, the save has copied them to the host.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        if options.get("mode") == "snapshot" or "optimizers" in options:
            raise TypeError('mode is "overlap" or "sync" here, and there are no optimizers to hook')
        options.setdefault("process_group", process_group())
        self.inner = checkpointer.Checkpointer(run, {}, **options)
        """The `everystep.Checkpointer` beneath: `steps`, `events`, `last_durable`, `preempted`, ..."""

    def save(self, step: int, tree: object, metrics: Mapping[str, float] | None = None) -> PendingSave | None:
        """Saves the tree after `step` completed steps; None when `every` skips it."""
        with self.inner.update():
            # No step counts as completed before the checkpoint of an earlier one is safe: a crash then costs
            # one step, not two. Nothing else has to be announced, since arrays do not change.
            self.inner.state = Live(tree)
        try:
            return self.inner.save(step, metrics)
        finally:
            self.inner.state = {}

    def restore(self, like: T, step: int | None = None, *, strict: bool = True) -> tuple[int, T]:
        """The newest intact checkpoint of the run (or that of `step`), as `load` reads it, and its step.

        In a new run: 0 and `like` itself.
        """
        target = Target(like)
        self.inner.state = target.state
        try:
            with offering("strict"):
                found = self.inner.restore(step, strict=strict)
        finally:
            self.inner.state = {}
        return (found, target.tree()) if found or target.filled else (found, like)

    def wait(self, timeout: float | None = None) -> None:
        """Returns when all that was saved is durable. Raises what failed in the background."""
        self.inner.wait(timeout)

    def close(self) -> None:
        """Finishes what is under way and releases the run. Raises what failed in the background."""
        self.inner.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return repr(self.inner)
