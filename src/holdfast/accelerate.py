"""Holdfast with accelerate: `state_of(accelerator, model)`, for `holdfast.Checkpointer`, `save` and `load`.

One call instead of other ``save_state`` and ``load_state``: those have no step, wait for the disk, and know
neither which checkpoint is the newest complete one nor which may go. All of that a `Checkpointer` has, and it
only needs to be told the state.

Attributes of ``Accelerator`` that this relies on, most of them private: ``_models``, ``_optimizers``,
``_schedulers``, ``_dataloaders``, ``_custom_objects``, ``scaler``, ``step``, ``distributed_type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.integrations.versions import require

require("accelerate", "1.15", "1.16", extra="accelerate")

from accelerate import Accelerator, DistributedType

from holdfast.errors import StateMismatch
from holdfast.state.marks import per_rank, rank_zero
from holdfast.state.rng import rng

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
        "counters": _Counters(accelerator),
        "loaders": per_rank(_Loaders(accelerator)),
        "rng": per_rank(rng()),
    }
    twice = sorted(taken.keys() & more.keys())
    if twice:
        raise ValueError(f"state_of has entries of these names itself: {', '.join(twice)}. Choose others")
    return {**taken, **more}


class _Counters:
    """Where gradient accumulation is."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


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
