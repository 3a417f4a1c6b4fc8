"""Training state kept safe: durable after every step, at the speed of the disk, restorable anywhere.

    import holdfast

    holdfast.save("first", {"model": model, "optimizer": optimizer})      # returns when it is durable
    holdfast.load("first", into={"model": model, "optimizer": optimizer})

    ckpt = holdfast.Checkpointer("runs/gpt", {"model": model, "optimizer": optimizer})
    for step in range(ckpt.restore(), 10_000):
        train_one_step()
        ckpt.save(step + 1)

Floors, each using only those below: `cli` and `study`; `checkpointer` (the training loop); `store` (commit
protocol, runs); `plan` (which bytes go where); `state` (trees and arrays); `format` (files); `engine` (the
device, in C++).

Names are imported when first used, so that ``import holdfast`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from holdfast import data as data
    from holdfast import inspect as inspect
    from holdfast.checkpointer import Checkpointer, Keep, PendingSave, stable
    from holdfast.errors import (
        CheckpointClosed,
        CheckpointExists,
        CheckpointNotFound,
        CorruptCheckpoint,
        EngineTimeout,
        EngineUnavailable,
        HoldfastError,
        IncompleteCheckpoint,
        LeafNotFound,
        MutatedDuringSave,
        OutOfResources,
        RankFailed,
        RanksDisagree,
        ReadDenied,
        ReadFailed,
        RunInUse,
        RunLocked,
        RunMoved,
        SaveFailed,
        StateMismatch,
        StorageDenied,
        StorageFull,
        StorageMissing,
        UnsupportedCheckpoint,
        UnsupportedState,
    )
    from holdfast.state.per_rank import per_rank
    from holdfast.state.rng import rng
    from holdfast.store import Checkpoint, CheckpointInfo, LeafInfo, Options, load, open, save, verify

__version__ = "0.1.0"

_HOMES = {
    "holdfast.checkpointer": ("Checkpointer", "Keep", "PendingSave", "stable"),
    "holdfast.state.per_rank": ("per_rank",),
    "holdfast.state.rng": ("rng",),
    "holdfast.store": (
        "Checkpoint",
        "CheckpointInfo",
        "LeafInfo",
        "Options",
        "load",
        "open",
        "save",
        "verify",
    ),
    "holdfast.errors": (
        "CheckpointClosed",
        "CheckpointExists",
        "CheckpointNotFound",
        "CorruptCheckpoint",
        "EngineTimeout",
        "EngineUnavailable",
        "HoldfastError",
        "IncompleteCheckpoint",
        "LeafNotFound",
        "MutatedDuringSave",
        "OutOfResources",
        "RankFailed",
        "RanksDisagree",
        "ReadDenied",
        "ReadFailed",
        "RunInUse",
        "RunLocked",
        "RunMoved",
        "SaveFailed",
        "StateMismatch",
        "StorageDenied",
        "StorageFull",
        "StorageMissing",
        "UnsupportedCheckpoint",
        "UnsupportedState",
    ),
}
_PACKAGES = ("data", "inspect")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoint",
    "CheckpointClosed",
    "CheckpointExists",
    "CheckpointInfo",
    "CheckpointNotFound",
    "Checkpointer",
    "CorruptCheckpoint",
    "EngineTimeout",
    "EngineUnavailable",
    "HoldfastError",
    "IncompleteCheckpoint",
    "Keep",
    "LeafInfo",
    "LeafNotFound",
    "MutatedDuringSave",
    "Options",
    "OutOfResources",
    "PendingSave",
    "RankFailed",
    "RanksDisagree",
    "ReadDenied",
    "ReadFailed",
    "RunInUse",
    "RunLocked",
    "RunMoved",
    "SaveFailed",
    "StateMismatch",
    "StorageDenied",
    "StorageFull",
    "StorageMissing",
    "UnsupportedCheckpoint",
    "UnsupportedState",
    "load",
    "open",
    "per_rank",
    "rng",
    "save",
    "stable",
    "verify",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _PACKAGES:
        return importlib.import_module(f"holdfast.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
