"""Lightning in the suite ``cost``: `ModelCheckpoint`, the same by `EverystepIO`, and `EverystepCallback`."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from everystep_study.frameworks import torch_models
from everystep_study.frameworks.api import Framework, LoopMechanism, LoopOverlap, LoopSync
from everystep_study.frameworks.models import Size
from everystep_study.frameworks.torch_training import TorchTraining
from everystep_study.harness.files import sync_tree

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Own(LoopMechanism):
    key, title = "model-checkpoint", "ModelCheckpoint"


class ThroughIO(LoopMechanism):
    key, title = "everystep-io", "ModelCheckpoint, EverystepIO"
    ours = always_durable = True


class SyncedIO(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        sync_tree(Path(path))


class Clock(Callback):
    """When each step began."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun.append(time.perf_counter())


class Module(lightning.LightningModule):
    def __init__(self, size: Any, batches: int) -> None:
        super().__init__()
        self.net, self._optimizer, batch = torch_models.build(size, 0)
        self._batches = [batch] * batches

    def training_step(self, batch: Any, index: int) -> Any:
        return torch_models.loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return self._optimizer

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self._batches, batch_size=None)  # type: ignore[arg-type]


def loop(size: Size, mechanism: str, durable: bool, every: int, steps: int, directory: Path) -> float:
    from everystep.integrations.lightning import EverystepCallback, EverystepIO

    torch.manual_seed(0)
    clock = Clock()
    callbacks: list[Any] = [clock]
    plugins: list[Any] = []
    if mechanism in ("model-checkpoint", "everystep-io"):
        callbacks.append(ModelCheckpoint(directory, every_n_train_steps=every))
        if mechanism == "everystep-io":
            plugins.append(EverystepIO())
        elif durable:
            plugins.append(SyncedIO())
    elif mechanism:
        mode = mechanism.removeprefix("everystep-")
        callbacks.append(EverystepCallback(directory / "run", every=every, mode=mode))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps + 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=mechanism in ("model-checkpoint", "everystep-io"),
        callbacks=callbacks,
        plugins=plugins,
        default_root_dir=directory,
    )
    trainer.fit(Module(size, steps + 2))
    return clock.begun[1 + steps] - clock.begun[1]


FRAMEWORK = Framework(
    packages={"lightning": "lightning", "torch": "torch"},
    training=TorchTraining,
    mechanisms=(Own, ThroughIO, LoopSync, LoopOverlap),
    loop=loop,
)
