"""`EverystepCallback`: a durable checkpoint after every step, and exact resume.

It has a `Checkpointer` of its own, with the live objects of the training instead of a dump: it saves while
the next step runs, on all ranks, and restores what Lightning leaves out (random numbers of every rank).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning import __version__
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from everystep.checkpointer import Checkpointer, check_options
from everystep.checkpointer.announced_changes import LateStep
from everystep.integrations.data import Loader
from everystep.integrations.lightning.type_keys import stored_key
from everystep.paths import local_path
from everystep.state.marks import per_rank, rank_zero
from everystep.state.mismatch import offering
from everystep.state.rng import rng


class EverystepCallback(Callback):
    """``Trainer(callbacks=[EverystepCallback("runs/x")])``: a durable checkpoint per step, and exact resume.

    ``fit`` goes on from the newest intact checkpoint of the run, if it has one.

    A checkpoint has the model, optimizers, schedulers, precision plugin, loops, the position of stateful
    loaders, the states of callbacks and of the datamodule, what ``LightningModule.on_save_checkpoint`` adds,
    and the random numbers of every rank. The last step of an epoch is saved after its validation.

    Args:
        run: The directory of the run.
        options: Those of `everystep.Checkpointer` (`every`, `keep`, `mode`, `preemption`, ...).
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self._run = local_path(run)
        self._options = check_options(options, "EverystepCallback")
        self._checkpointer: Checkpointer | None = None
        self._steps: list[LateStep] = []
        self._after_others = _AfterOthers(self)
        self._rng = rng(hold=True)
        self._state: dict[str, Any] = {}
        self._saved_step = 0
        self._at_epoch_end = False
        self._resumed = False

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The `Checkpointer` at work, while ``fit`` runs."""
        return self._checkpointer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A restore comes before what other callbacks do, and the save of a batch after it."""
        own = (self, self._after_others)
        others = [callback for callback in trainer.callbacks if callback not in own]
        trainer.callbacks = [self, *others, self._after_others]  # Lightning goes through the old list now

    # --- resuming

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = [LateStep(optimizer) for optimizer in trainer.optimizers]
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
                    "EverystepCallback has checkpoints as well. Leave ckpt_path out to go on with the run, "
                    "or give EverystepCallback an empty run"
                )
            return
        with offering():
            self._saved_step = checkpointer.restore()
        if self._saved_step:
            self._apply(trainer, pl_module)

    def _apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Passes what was restored on to Lightning's loops and hooks."""
        loops, extras = self._state["loops"].value, self._state["extras"].value
        loops["fit_loop"]["state_dict"]["combined_loader"] = self._state["data"]
        trainer.fit_loop.load_state_dict(loops["fit_loop"])
        self._resumed = True
        self._at_epoch_end = loops["epoch_ended"]
        if self._at_epoch_end:
            trainer.fit_loop.epoch_loop.restarting = False  # it begins a new epoch
        replaced = extras.get("weights", [])
        hooks = {**extras["module"], **dict.fromkeys(replaced, pl_module.state_dict() if replaced else {})}
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(extras["datamodule"])
        pl_module.on_load_checkpoint(hooks)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, pl_module, hooks)
            key = stored_key(callback.state_key)
            if key in extras["callbacks"]:
                callback.load_state_dict(extras["callbacks"][key])

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

    def after_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        self.on_validation_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait()  # other callbacks may now exchange the weights for averages

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
        """What hooks add. All ranks call them, since some exchange messages; that of rank 0 is stored."""
        hooks: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": __version__,
            pl_module.CHECKPOINT_HYPER_PARAMS_KEY: dict(pl_module.hparams),
        }
        weights: dict[str, Any] = {}
        hooked = [each for each in trainer.callbacks if is_overridden("on_save_checkpoint", each, Callback)]
        if hooked:  # some of them look at the weights, or put others in their place
            hooks["state_dict"] = weights = pl_module.state_dict()
        for callback in hooked:
            callback.on_save_checkpoint(trainer, pl_module, hooks)
        pl_module.on_save_checkpoint(hooks)
        states = {stored_key(callback.state_key): callback.state_dict() for callback in trainer.callbacks}
        return {
            "callbacks": {key: state for key, state in states.items() if state},
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            # The weights themselves are not stored a second time.
            "module": {key: value for key, value in hooks.items() if value is not weights},
            "weights": [key for key, value in hooks.items() if value is weights],
        }

    # --- the end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


class _AfterOthers(Callback):
    """The last callback of all: when it is called for a batch, the others have been called."""

    def __init__(self, owner: EverystepCallback) -> None:
        self._owner = owner

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._owner.after_batch(trainer, pl_module)
