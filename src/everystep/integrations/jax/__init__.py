"""Everystep for JAX: pytrees in, pytrees out, whatever devices and processes their arrays lie on.

    from everystep.integrations.jax import process_group, pytree

    with everystep.Checkpointer("runs/x", process_group=process_group()) as ckpt:
        first, state = ckpt.restore(into=pytree(state))          # 0 and the same state in a new run
        for step in range(first, 10_000):
            state = train_step(state, batches[step])
            ckpt.save(step + 1, pytree(state))

`save` and `load` are for one checkpoint without a run.

| module | what it owns |
|---|---|
| `trees` | `pytree`: a pytree as named leaves, and back |
| `processes` | `process_group`: messages between the processes of ``jax.distributed`` |

`everystep.state.jax_arrays` owns single arrays: the boxes of one in host memory, and back.

A private name of JAX that this relies on: ``jax._src.distributed.global_state.client``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

from everystep.integrations.shared.frameworks import require
from everystep.state.mismatch import offering

require("jax", "0.10", "0.11", extra="jax")

from everystep import store
from everystep.integrations.jax.processes import process_group
from everystep.integrations.jax.trees import Pytree, pytree
from everystep.store import CheckpointInfo, Options

__all__ = ["Pytree", "load", "process_group", "pytree", "save"]

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
    """Saves a pytree; returns when it is durable.

    Under ``jax.distributed`` all processes call this. Each writes the shards that only it has, and its share
    of the others. Nothing is gathered.

    Args:
        path: The checkpoint to write.
        tree: The pytree to save.
        step: The step to store with it.
        metrics: Numbers to store with it.
        overwrite: Whether to replace a checkpoint that is at `path`.
        options: How to write.
        timeout: Seconds after which a process no longer waits for the others.
    """
    return store.save(
        path,
        pytree(tree),
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

    Each device gets what its sharding says, and only that is read, however the checkpoint was sharded.

    Args:
        path: The checkpoint or run to read.
        like: A pytree of the same structure, which stays as it is. Its leaves may be arrays, or
            ``jax.ShapeDtypeStruct`` with or without a sharding.
        verify: Whether to check what is read against its checksums.
        strict: Whether everything must fit: what does not raises a `StateMismatch` that names the place. If
            not, leaves that do not fit are those of `like`.
        options: How to read.
        timeout: Seconds after which a process no longer waits for the others.
    """
    target = pytree(like)
    with offering("strict"):
        store.load(
            path,
            target,
            verify=verify,
            strict=strict,
            options=options,
            process_group=process_group(),
            timeout=timeout,
        )
    return target.value
