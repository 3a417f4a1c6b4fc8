"""Holdfast under Lightning: `HoldfastIO` where Lightning saves, `HoldfastCallback` for every step.

`HoldfastIO` is a ``CheckpointIO``: what ``ModelCheckpoint``, ``Trainer.save_checkpoint`` and ``Fabric.save``
dump goes through `holdfast.save`. `HoldfastCallback` has a `Checkpointer` of its own, with the live objects
of the training instead of a dump: it saves while the next step runs, on all ranks, and restores what
Lightning leaves out (random numbers of every rank).

Private names of Lightning that this relies on: ``Trainer.fit_loop`` with ``epoch_loop.batch_progress``,
``_combined_loader``, ``state_dict`` and ``restarting`` of loops.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast.integrations.versions import require

require("lightning", "2.6", "2.7", extra="lightning")

import torch
from lightning import __version__
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO
from torch.utils.hooks import RemovableHandle

from holdfast.checkpointer import Checkpointer
from holdfast.data import Loader
from holdfast.state.marks import per_rank, rank_zero
from holdfast.state.rng import rng
from holdfast.store import Options, load, save


class HoldfastIO(CheckpointIO):
    """``Trainer(plugins=[HoldfastIO()])``: each of Lightning's checkpoints is a Holdfast checkpoint.

    It is a directory, durable and checksummed, that appears at once and whole. Checkpoints that Lightning
    wrote without it, which are files, are still read.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = options

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("HoldfastIO takes no storage_options; give it options=holdfast.Options(...)")
        step = checkpoint.get("global_step", checkpoint.get("step", 0))
        step = step if type(step) is int and step >= 0 else 0
        save(path, checkpoint, step=step, overwrite=True, options=self._options, process_group="none")

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if os.path.isfile(path):
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return found
        loaded: dict[str, Any] = load(path, process_group="none")
        if map_location is not None:  # it has many forms; torch knows their meaning
            loaded = torch.load(_torch_file(loaded), map_location=map_location, weights_only=False)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
        elif os.path.isdir(path):
            # Under a name that nobody looks for: what is left after a kill is no checkpoint.
            removed = f"{os.fspath(path).rstrip('/')}.removed"
            shutil.rmtree(removed, ignore_errors=True)
            os.rename(path, removed)
            shutil.rmtree(removed)


def load_from_checkpoint(cls: type[Any], path: str | os.PathLike[str], **arguments: Any) -> Any:
    """``cls.load_from_checkpoint`` for a directory of `HoldfastIO`, or a run of `HoldfastCallback`."""
    found = load(path, process_group="none")
    if "state_dict" not in found:
        found = {**found["extras"]["module"], "state_dict": found["model"]}
    # The file is made here, of plain values and tensors: there is nothing in it to beware of.
    return cls.load_from_checkpoint(_torch_file(found), **{"weights_only": False, **arguments})


def _torch_file(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


class HoldfastCallback(Callback):
    """``Trainer(callbacks=[HoldfastCallback("runs/x")])``: a durable checkpoint per step, and exact resume.

    ``fit`` goes on from the newest intact checkpoint of the run, if it has one. `options` are those of
    `holdfast.Checkpointer` (`every`, `keep`, `mode`, `preemption`, ...).

    Saved are the model, optimizers, schedulers, precision plugin, loops, the position of stateful loaders,
    what callbacks, the datamodule and ``LightningModule.on_save_checkpoint`` have to say, and the random
    numbers of every rank. The last step of an epoch is saved after its validation.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self._run = run
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._steps: list[_LateStep] = []
        self._rng = rng(hold=True)
        self._state: dict[str, Any] = {}
        self._saved_step = 0
        self._at_epoch_end = False
        self._resumed = False

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The `Checkpointer` at work, while ``fit`` runs."""
        return self._checkpointer

    # --- resuming

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = [_LateStep(optimizer) for optimizer in trainer.optimizers]
        self._state = {
            "model": trainer.strategy.model,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "loops": rank_zero(None),
            "extras": rank_zero(None),
            "data": None,
            "rng": per_rank(self._rng),
        }
        checkpointer = Checkpointer(self._run, self._state, **{"optimizers": self._steps, **self._options})
        self._checkpointer = checkpointer
        if trainer.ckpt_path is not None:
            if checkpointer.steps:
                raise ValueError(
                    f"fit(ckpt_path={str(trainer.ckpt_path)!r}), but the run {checkpointer.path} of "
                    "HoldfastCallback has checkpoints as well. Leave ckpt_path out to go on with the run, or "
                    "give HoldfastCallback an empty run"
                )
            return
        self._saved_step = checkpointer.restore()
        if self._saved_step:
            self._apply(trainer, pl_module)

    def _apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives Lightning's loops and hooks what was restored."""
        loops, extras = self._state["loops"].value, self._state["extras"].value
        loops["fit_loop"]["state_dict"]["combined_loader"] = self._state["data"]
        trainer.fit_loop.load_state_dict(loops["fit_loop"])
        self._resumed = True
        self._at_epoch_end = loops["epoch_ended"]
        if self._at_epoch_end:
            trainer.fit_loop.epoch_loop.restarting = False  # it begins a new epoch
        for callback in trainer.callbacks:
            if callback.state_key in extras["callbacks"] and callback is not self:
                callback.load_state_dict(extras["callbacks"][callback.state_key])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(extras["datamodule"])
        pl_module.on_load_checkpoint(extras["module"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaders = trainer.fit_loop._combined_loader.flattened
        if self._at_epoch_end:
            for loader in loaders:
                if isinstance(loader, Loader) and loader.position >= len(loader):
                    loader.next_epoch()
        self._at_epoch_end = False
        self._rng.release()

    # --- saving

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for step in self._steps:
            step.begin(optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._resumed:
            # Lightning would not step plateau schedulers at the end of an epoch that it has resumed.
            trainer.fit_loop._restarting = self._resumed = False
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._at_epoch_end = True  # validation and schedulers of the epoch come first
        else:
            self._save(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._at_epoch_end:
            self._save(trainer, pl_module)
            self._at_epoch_end = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)

    def _save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._checkpointer is None or trainer.global_step == self._saved_step:
            return  # gradients are still being accumulated
        fit_loop = trainer.fit_loop.state_dict()
        data = fit_loop["state_dict"].pop("combined_loader", [])
        self._state["loops"].value = {"fit_loop": fit_loop, "epoch_ended": self._at_epoch_end}
        self._state["extras"].value = self._extras(trainer, pl_module)
        # The position of our loader is the same on all ranks, and good for any number of them.
        ours = all(isinstance(loader, Loader) for loader in trainer.fit_loop._combined_loader.flattened)
        self._state["data"] = data if ours else per_rank(data)
        self._saved_step = trainer.global_step
        self._checkpointer.save(self._saved_step)

    def _extras(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """What hooks have to say. All ranks ask them, since some talk to each other; rank 0's is stored."""
        module: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": __version__,
            pl_module.CHECKPOINT_HYPER_PARAMS_KEY: dict(pl_module.hparams),
        }
        pl_module.on_save_checkpoint(module)
        states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        return {
            "callbacks": {key: state for key, state in states.items() if state},
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "module": module,
        }

    # --- the end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


class _LateStep:
    """An optimizer as the `Checkpointer` sees it: its step begins when it changes the weights.

    Lightning calls ``optimizer.step`` with a closure that does forward and backward. A save that was awaited
    when this call begins would overlap with nothing.
    """

    def __init__(self, optimizer: Any) -> None:
        self._own = optimizer
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    @property
    def param_groups(self) -> Any:
        return self._own.param_groups

    @property
    def state(self) -> Any:
        return self._own.state

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        handle = RemovableHandle(self._optimizer_step_pre_hooks)
        self._optimizer_step_pre_hooks[handle.id] = hook
        return handle

    def begin(self, optimizer: Any) -> None:
        if optimizer is self._own:
            for hook in list(self._optimizer_step_pre_hooks.values()):
                hook(optimizer, (), {})
