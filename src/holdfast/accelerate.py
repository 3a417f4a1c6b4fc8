"""Holdfast with accelerate: `state_of(accelerator, model)`, for `holdfast.Checkpointer`, `save` and `load`.

A `Checkpointer` has what ``accelerator.save_state`` lacks: steps, saves beside the training, and the newest
complete checkpoint. It only needs to be told the state. `save_state` and `load_state` are for scripts that
keep accelerate's calls: the same state, in the folders that accelerate would write.

Attributes of ``Accelerator`` that this relies on, most of them private: ``_models``, ``_optimizers``,
``_schedulers``, ``_dataloaders``, ``_custom_objects``, ``_save_model_state_pre_hook``, ``scaler``, ``step``,
``distributed_type``, ``project_configuration``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.integrations.versions import require
from holdfast.paths import local_path

require("accelerate", "1.15", "1.16", extra="accelerate")

from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list

from holdfast.errors import CheckpointNotFound, StateMismatch
from holdfast.integrations.attributes import Attributes
from holdfast.integrations.entries import with_entries
from holdfast.integrations.folders import by_rank_zero, newest_intact, numbered, remove
from holdfast.state.marks import per_rank, rank_zero
from holdfast.state.rng import rng
from holdfast.store import load, save

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def state_of(accelerator: Accelerator, *models: Any, **more: Any) -> dict[str, Any]:
    """All that ``accelerator.save_state`` saves, as a state for `holdfast.Checkpointer`; and `more`, by name.

    `models`: as ``prepare`` returned them. The accelerator itself has them without their wrappers: by those
    of DDP it is known that rank 0's buffers (BatchNorm) count.

    Call it after ``accelerator.prepare`` and ``register_for_checkpointing``. It has the live objects: models,
    optimizers, schedulers, registered objects (rank 0's, as in ``save_state``), scaler, the counter of
    gradient accumulation, the position of stateful loaders, and the random numbers of every rank.
    """
    if accelerator.distributed_type in _OTHERS:
        raise NotImplementedError(
            f"holdfast.accelerate does not support {accelerator.distributed_type.value}: it saves files of "
            "its own"
        )
    if len(models) != len(accelerator._models):
        raise ValueError(
            f"state_of was given {len(models)} models, and the accelerator has prepared "
            f"{len(accelerator._models)}: give all of them, as prepare() returned them"
        )
    taken = {
        "models": list(models),
        # Those inside of accelerate's wrappers: their steps are the ones that change weights.
        "optimizers": [getattr(wrapped, "optimizer", wrapped) for wrapped in accelerator._optimizers],
        "schedulers": list(accelerator._schedulers),
        "registered": rank_zero(list(accelerator._custom_objects)),
        "scaler": accelerator.scaler,
        "counters": Attributes(accelerator, "step"),
        "loaders": per_rank(_Loaders(accelerator)),
        "rng": per_rank(rng()),
    }
    return with_entries(taken, more)


def save_state(
    accelerator: Accelerator, *models: Any, output_dir: str | os.PathLike[str] | None = None, **more: Any
) -> str:
    """``accelerator.save_state(output_dir)``, as one durable checkpoint of `state_of`; returns its path.

    With ``automatic_checkpoint_naming`` it is ``project_dir/checkpoints/checkpoint_N``, and ``total_limit``
    holds. Older ones are removed when the new one is durable; accelerate removes them before. Otherwise, a
    checkpoint that is already at `output_dir` is replaced, at once and whole.
    """
    if accelerator._save_model_state_pre_hook:
        raise NotImplementedError(
            "holdfast.accelerate.save_state saves the state as it is and does not call the hooks of "
            "register_save_state_pre_hook. Remove them, or call accelerator.save_state"
        )
    settings = accelerator.project_configuration
    number, folder = accelerator.save_iteration, _folder(accelerator)
    path = output_dir if folder is None else os.path.join(folder, f"checkpoint_{number}")
    if path is None:
        raise ValueError("save_state needs output_dir, since automatic_checkpoint_naming is off")
    info = save(path, state_of(accelerator, *models, **more), step=number, overwrite=folder is None)
    settings.iteration += 1
    if folder is not None and settings.total_limit is not None and accelerator.is_main_process:
        for _, older in numbered(folder, "checkpoint_")[: -max(settings.total_limit, 1)]:
            remove(older)
    return info.path


def load_state(
    accelerator: Accelerator, *models: Any, input_dir: str | os.PathLike[str] | None = None, **more: Any
) -> None:
    """``accelerator.load_state(input_dir)`` of what `save_state` saved.

    Without `input_dir`, and with ``automatic_checkpoint_naming``: the newest intact one. Names go on after
    the last one that is there, whereas with accelerate you set ``iteration`` yourself.
    """
    folder = _folder(accelerator)
    if input_dir is None:
        if folder is None:
            raise ValueError("load_state needs input_dir, since automatic_checkpoint_naming is off")
        there = numbered(folder, "checkpoint_")
        rank = accelerator.process_index
        input_dir = by_rank_zero(lambda: newest_intact(there, folder), rank, broadcast_object_list)
        if input_dir is None:
            raise CheckpointNotFound(f"{folder} has no checkpoint of holdfast.accelerate.save_state")
    load(input_dir, into=state_of(accelerator, *models, **more))
    if folder is not None:
        numbers = [number for number, _ in numbered(folder, "checkpoint_")]
        accelerator.project_configuration.iteration = max(numbers, default=-1) + 1


def _folder(accelerator: Accelerator) -> str | None:
    """Where checkpoints with automatic names are."""
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    return os.path.join(local_path(accelerator.project_dir), "checkpoints") if automatic else None


class _Loaders:
    """The positions of the loaders that know theirs (``use_stateful_dataloader``)."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def _stateful(self) -> list[Any]:
        loaders = self._accelerator._dataloaders
        return [loader for loader in loaders if getattr(loader, "use_stateful_dataloader", False)]

    def state_dict(self) -> dict[str, Any]:
        return {"positions": [loader.state_dict() for loader in self._stateful()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaders, positions = self._stateful(), state["positions"]
        if len(loaders) != len(positions):
            raise StateMismatch(
                f"the checkpoint has positions of {len(positions)} loaders, and {len(loaders)} that can take "
                "one are prepared. Prepare the same loaders"
            )
        for loader, position in zip(loaders, positions, strict=True):
            loader.load_state_dict(position)
