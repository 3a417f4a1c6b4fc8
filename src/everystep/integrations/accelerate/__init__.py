"""Everystep with accelerate: `state_of(accelerator, model)`, for `everystep.Checkpointer`, `save` and `load`.

A `Checkpointer` has what ``accelerator.save_state`` lacks: steps, saves beside the training, and the newest
complete checkpoint. It only needs the state. `save_state` and `load_state` are for scripts that
keep accelerate's calls: the same state, in the folders that accelerate would write.

Attributes of ``Accelerator`` that this relies on, most of them private: ``_models``, ``_optimizers``,
``_schedulers``, ``_dataloaders``, ``_custom_objects``, ``_save_model_state_pre_hook``, ``scaler``, ``step``,
``distributed_type``, ``project_configuration``; and of its loaders ``iteration``, ``end_of_dataloader``,
``base_dataloader`` and ``synchronized_generator``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from everystep.integrations.shared.frameworks import require
from everystep.paths import local_path

require("accelerate", "1.15", "1.16", extra="accelerate")

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list

from everystep.caller import stack_level
from everystep.errors import CheckpointNotFound, StateMismatch
from everystep.integrations.shared.folders import by_rank_zero, newest_intact, numbered, remove
from everystep.integrations.shared.states import Attributes, with_entries
from everystep.state.marks import per_rank, rank_zero
from everystep.state.rng import Rng, rng
from everystep.store import load, save

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def state_of(accelerator: Accelerator, *models: Any, **more: Any) -> dict[str, Any]:
    """All that ``accelerator.save_state`` saves, as a state for `everystep.Checkpointer`.

    Call it after ``accelerator.prepare`` and ``register_for_checkpointing``. The state has the live objects:
    models, optimizers, schedulers, registered objects (rank 0's, as in ``save_state``), scaler, the counter
    of gradient accumulation, the position of stateful loaders, and the random numbers of every rank.

    Args:
        accelerator: The ``Accelerator`` of the training.
        models: All its models, as ``prepare`` returned them. The accelerator itself has them without their
            wrappers, but the wrapper of DDP shows that rank 0's buffers (BatchNorm) count.
        more: Other entries of the state, by name.
    """
    if accelerator.distributed_type in _OTHERS:
        raise NotImplementedError(
            f"everystep.integrations.accelerate does not support {accelerator.distributed_type.value}: it "
            "saves files of its own"
        )
    if len(models) != len(accelerator._models):
        raise ValueError(
            f"state_of was given {len(models)} models, and the accelerator has prepared "
            f"{len(accelerator._models)}: give all of them, as prepare() returned them"
        )
    taken = {
        "models": list(models),
        # Those inside accelerate's wrappers: their steps are the ones that change weights.
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
    """``accelerator.save_state(output_dir)``, as one durable checkpoint of `state_of`.

    With ``automatic_checkpoint_naming`` it is ``project_dir/checkpoints/checkpoint_N``, and ``total_limit``
    holds. It removes older ones when the new one is durable, where accelerate removes them before.

    Args:
        accelerator: As in `state_of`.
        models: As in `state_of`.
        output_dir: Where to save without automatic naming. It replaces a checkpoint that is already there, at
            once and whole.
        more: As in `state_of`.

    Returns:
        The path of the checkpoint.
    """
    if accelerator._save_model_state_pre_hook:
        raise NotImplementedError(
            "everystep.integrations.accelerate.save_state saves the state as it is and does not call the "
            "hooks of register_save_state_pre_hook. Remove them, or call accelerator.save_state"
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
    """``accelerator.load_state(input_dir)`` for checkpoints of `save_state`.

    With ``automatic_checkpoint_naming``, names go on after the last one that is there, whereas with
    accelerate you set ``iteration`` yourself.

    Args:
        accelerator: As in `state_of`.
        models: As in `state_of`.
        input_dir: The checkpoint. None, with automatic naming: the newest that is intact.
        more: As in `state_of`.
    """
    folder = _folder(accelerator)
    if input_dir is None:
        if folder is None:
            raise ValueError("load_state needs input_dir, since automatic_checkpoint_naming is off")
        there = numbered(folder, "checkpoint_")
        rank = accelerator.process_index
        input_dir = by_rank_zero(lambda: newest_intact(there, folder), rank, broadcast_object_list)
        if input_dir is None:
            raise CheckpointNotFound(
                f"{folder} has no checkpoint of everystep.integrations.accelerate.save_state"
            )
    load(input_dir, into=state_of(accelerator, *models, **more))
    if folder is not None:
        numbers = [number for number, _ in numbered(folder, "checkpoint_")]
        accelerator.project_configuration.iteration = max(numbers, default=-1) + 1


def _folder(accelerator: Accelerator) -> str | None:
    """Where checkpoints with automatic names are."""
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    return os.path.join(local_path(accelerator.project_dir), "checkpoints") if automatic else None


class _Loaders:
    """Positions of loaders that know theirs (``use_stateful_dataloader``), and the epochs of the others."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        for loader in self._others():
            if not hasattr(loader, _EPOCH):
                setattr(loader, _EPOCH, _Epoch(loader))
        # An attribute of this accelerator, before the method of its class.
        accelerator.skip_first_batches = self._skip_first_batches

    def _stateful(self) -> list[Any]:
        loaders = self._accelerator._dataloaders
        return [loader for loader in loaders if getattr(loader, "use_stateful_dataloader", False)]

    def _others(self) -> list[Any]:
        loaders = self._accelerator._dataloaders
        return [
            loader
            for loader in loaders
            if hasattr(loader, "end_of_dataloader") and not getattr(loader, "use_stateful_dataloader", False)
        ]

    def _skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        skipped = Accelerator.skip_first_batches(self._accelerator, dataloader, num_batches)
        epoch = getattr(dataloader, _EPOCH, None)
        if epoch is not None and epoch.restored is not None:
            epoch.take_up(skipped)
        return skipped

    def state_dict(self) -> dict[str, Any]:
        return {
            "positions": [loader.state_dict() for loader in self._stateful()],
            "epochs": [getattr(loader, _EPOCH).state_dict() for loader in self._others()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaders, positions = self._stateful(), state["positions"]
        others, epochs = self._others(), state.get("epochs")
        if len(loaders) != len(positions) or (epochs is not None and len(others) != len(epochs)):
            raise StateMismatch(
                f"the checkpoint has positions of {len(positions)} stateful loaders and epochs of "
                f"{len(epochs or ())} others, and {len(loaders)} and {len(others)} are prepared. Prepare the "
                "same loaders"
            )
        for loader, position in zip(loaders, positions, strict=True):
            loader.load_state_dict(position)
        for loader, epoch in zip(others, epochs or (), strict=False):
            getattr(loader, _EPOCH).load_state_dict(epoch)


_EPOCH = "_everystep_epoch"
"""The attribute of a prepared loader that has its `_Epoch`: `state_of` may be called many times."""


class _Epoch:
    """The epoch of a prepared loader that does not know its position.

    When an epoch begins, random numbers are drawn: for the order of a sampler, and for worker processes. So
    the state has the random numbers from before. When `Accelerator.skip_first_batches` takes up that epoch
    after a restore, it begins with them again; and once the first batch is there, the training goes on with
    the random numbers of the checkpoint.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = self._at_work = loader
        self._number = -1
        self._begun: Mapping[str, Any] | None = None
        """Random numbers before the epoch that is at work drew its own."""
        self.restored: Mapping[str, Any] | None = None
        """The same, of an epoch that was restored and waits to be taken up."""
        self._watch(loader, self._begin)

    def _watch(self, loader: Any, begin: Callable[[Any, Callable[[], Any]], Any]) -> None:
        """Has `begin` called when the loader begins an epoch, with the call that does so."""
        its_own = loader.base_dataloader.__iter__
        # Loaders of accelerate call this as a method, so an attribute of the object comes first.
        loader.base_dataloader.__iter__ = lambda: begin(loader, its_own)

    def _begin(self, loader: Any, batches: Callable[[], Any]) -> Any:
        if self.restored is not None:
            _warn_of_another_order()
            self.restored = None
        self._begun, self._at_work, self._number = self._random().state_dict(), loader, loader.iteration
        return batches()

    def take_up(self, skipped: Any) -> None:
        """The restored epoch goes on with this loader, which skips what was seen."""
        self._watch(skipped, self._go_on)

    def _go_on(self, skipped: Any, batches: Callable[[], Any]) -> Iterator[Any]:
        self._begun, self.restored = self.restored, None
        self._at_work, self._number = skipped, skipped.iteration
        random = self._random()
        present = random.state_dict()
        if self._begun is not None:
            random.load_state_dict(self._begun)
        iterator = batches()
        first = list(islice(iterator, 1 + skipped.skip_batches))
        random.load_state_dict(present)
        yield from first
        yield from iterator
        # accelerate counts the epochs of the loader that skips, which is not used again.
        self._loader.iteration = max(self._loader.iteration, self._number + 1)

    def _samplers(self) -> list[Any]:
        places = [self._loader, getattr(self._loader, "batch_sampler", None)]
        places.append(getattr(places[-1], "batch_sampler", None))
        return [sampler for place in places if (sampler := getattr(place, "sampler", None)) is not None]

    def _random(self) -> Rng:
        """The random numbers of the process, and of generators that only this loader has."""
        loader = self._loader
        # Samplers with a seed of their own make their generator as late as in their first epoch.
        places = [sampler for sampler in self._samplers() if not hasattr(sampler, "initial_seed")]
        found = [getattr(place, "generator", None) for place in (*places, loader, loader.base_dataloader)]
        found.append(getattr(loader, "synchronized_generator", None))
        return rng(*{id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def state_dict(self) -> dict[str, Any]:
        if self.restored is not None:
            _warn_of_another_order()
            self._begun, self.restored = self.restored, None
        loader = self._at_work
        number, ended = loader.iteration, loader.end_of_dataloader
        if self._begun is None and not ended and _is_at_work(loader):
            _warn_of_an_epoch_before()
        seeds = [sampler.initial_seed for sampler in self._samplers() if hasattr(sampler, "initial_seed")]
        return {
            # At its last batch, accelerate has not counted the epoch yet.
            "number": number + 1 if ended and number == self._number else number,
            "begun": None if ended else self._begun,
            "now": self._random().state_dict(),
            "seeds": seeds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._random().load_state_dict(state["now"])
        self.restored = state["begun"]
        self._begun, self._at_work, self._number = None, self._loader, -1
        self._loader.iteration = state["number"]
        seeded = [sampler for sampler in self._samplers() if hasattr(sampler, "initial_seed")]
        for sampler, seed in zip(seeded, state["seeds"], strict=False):
            sampler.initial_seed = seed


def _is_at_work(loader: Any) -> bool:
    """Whether an epoch of this loader has begun and not ended."""
    return any(one is loader for one in loader.gradient_state.dataloader_references)


def _warn_of_an_epoch_before() -> None:
    warnings.warn(
        "this epoch began before Everystep knew of the loader, so a training that resumes inside of it does "
        "not equal an uninterrupted one. Nothing is lost. Call "
        "everystep.integrations.accelerate.state_of(accelerator, model) once, after prepare() and "
        "before the first epoch",
        RuntimeWarning,
        stacklevel=stack_level(),
    )


def _warn_of_another_order() -> None:
    warnings.warn(
        "the checkpoint was made inside of an epoch, and the training does not go on there, so it does not "
        "equal an uninterrupted one. Nothing saved is lost. After the restore, loop over "
        "accelerator.skip_first_batches(loader, batches); the function of accelerate with this name does not "
        "know of the restore",
        RuntimeWarning,
        stacklevel=stack_level(),
    )
