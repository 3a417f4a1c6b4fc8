"""Everystep under Chainer: `snapshot`, an extension for every iteration, and a serializer for any object.

    trainer.extend(everystep.integrations.chainer.snapshot("runs/x"))  # a checkpoint per iteration; resumes

`Writer` and `Reader` are Chainer's ``Serializer`` and ``Deserializer``: what has ``serialize`` goes through
them, into a tree of named leaves (``updater.model:main.l1.W``). `save` and `load` use them by themselves, as
``save_npz`` and ``load_npz`` do. Beyond what Chainer serializes, `snapshot` restores random numbers and
hyperparameters.

| module | what it owns |
|---|---|
| `serializer` | what Chainer's objects serialize, as a tree of named leaves |
| `extension` | saves and resume of a trainer |

Private names of Chainer that this relies on: ``_iterators`` of updaters, ``_random`` of order samplers,
``_snapshot_elapsed_time`` of trainers, ``_loss_scale`` and ``_loss_scaling_isnan_ever`` of optimizers,
``chainer.backends._cpu._to_cpu``.
"""

from __future__ import annotations

import os
from typing import Any

from everystep.integrations.shared.frameworks import require

require("chainer", "7.8", "7.9", extra="chainer")

from everystep import store
from everystep.errors import StateMismatch
from everystep.integrations.chainer.extension import Announced, Snapshot, snapshot
from everystep.integrations.chainer.serializer import Reader, Serialized, Writer
from everystep.store import CheckpointInfo, Options

__all__ = ["Announced", "Reader", "Serialized", "Snapshot", "Writer", "load", "save", "snapshot"]


def save(
    path: str | os.PathLike[str], obj: Any, *, overwrite: bool = False, options: Options | None = None
) -> CheckpointInfo:
    """Saves an object of Chainer; returns when it is durable.

    Args:
        path: The checkpoint to write.
        obj: A link, an optimizer, an updater or a trainer.
        overwrite: Whether to replace a checkpoint that is at `path`.
        options: How to write.
    """
    return store.save(path, Serialized(obj), overwrite=overwrite, options=options, process_group="none")


def load(path: str | os.PathLike[str], obj: Any, *, at: str = "") -> None:
    """Puts a checkpoint back into an object of Chainer. What does not fit raises a `StateMismatch`.

    Args:
        path: A checkpoint, or a run: then its newest.
        obj: A link, an optimizer, an updater or a trainer.
        at: The place of the object in the checkpoint, such as ``"trainer.updater.model:main"`` for the model
            of a run.
    """
    tree = store.load(path, process_group="none")
    for key in at.split(".") if at else ():
        if not isinstance(tree, dict) or key not in tree:
            raise StateMismatch(f"{os.fspath(path)} has nothing at {at!r}", missing=[at])
        tree = tree[key]
    Serialized(obj).load_state_dict(tree)
