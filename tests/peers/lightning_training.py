"""Trainings with Lightning, in its own environment. Called by `test_lightning.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
train RUN [STEP]        once, under torchrun; with STEP, rank 1 is killed before the next step
io FOLDER               ModelCheckpoint and Fabric with HoldfastIO
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import holdfast
from holdfast.data import Loader
from holdfast.lightning import HoldfastCallback, HoldfastIO, load_from_checkpoint

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """Everything that an inexact resume would change: dropout, shuffling, schedulers, a hook."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
        )
        self.average = 0.0

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch).square().mean()
        self.average = 0.9 * self.average + self.all_gather(loss.detach()).mean().item()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        torch.rand(3)
        self.log("val", self.net(batch).mean() + self.average, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val"}
        return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.9), "interval": "step"}, plateau]

    def train_dataloader(self) -> Any:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        data = torch.randn(20 * world, 8, generator=torch.Generator().manual_seed(1))
        return Loader(data, batch_size=4, shuffle=True, seed=5, rank=rank, world=world)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 8), batch_size=2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.average = checkpoint["average"]


class Kill(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._step and trainer.global_step == self._step:
            trainer.callbacks[0].checkpointer.wait()
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(callbacks: list[Any], **arguments: Any) -> Any:
    return lightning.Trainer(
        **{"max_epochs": 3, "enable_checkpointing": False, **arguments},
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(run: str, kill: int = 0) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model = Module()
    torch.manual_seed(1 + rank)
    callback = HoldfastCallback(run, keep=holdfast.Keep(last=100))
    trainer = trainer_of([callback, Kill(kill)])
    trainer.fit(model)
    digest = hashlib.sha256()
    for value in (*model.state_dict().values(), torch.rand(3)):
        digest.update(value.numpy().tobytes())
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {
        "rank": rank,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "digest": digest.hexdigest(),
        "rates": rates,
        "average": model.average,
    }


def in_child(run: str, kill: int = 0) -> None:
    """A process of its own, without the seconds that importing takes."""
    pid = os.fork()
    if pid == 0:
        try:
            print("\n" + json.dumps(train(run, kill)), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)


def exact(folder: str, steps: list[int]) -> None:
    in_child(f"{folder}/whole")
    for step in steps:
        in_child(f"{folder}/{step}", step)
        in_child(f"{folder}/{step}")


def io(folder: str) -> None:
    def models(**arguments: Any) -> ModelCheckpoint:
        names = {"dirpath": f"{folder}/models", "filename": "{step}"}
        return ModelCheckpoint(**names, every_n_train_steps=2, save_last="link", **arguments)

    keeper = models(save_top_k=2, monitor="step", mode="max")
    first = trainer_of([keeper], enable_checkpointing=True, plugins=[HoldfastIO()], max_steps=8)
    model = Module()
    first.fit(model)
    saved = sorted(path.name for path in Path(folder, "models").iterdir())
    assert saved == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"], saved
    assert holdfast.verify(f"{folder}/models/step=8.ckpt").problems == ()
    best = keeper.best_model_path

    again = trainer_of([models()], enable_checkpointing=True, plugins=[HoldfastIO()], max_steps=10)
    other = Module()
    again.fit(other, ckpt_path="last")
    assert again.global_step == 10
    again.validate(Module(), ckpt_path=best)

    loaded = load_from_checkpoint(Module, best)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert loaded.hparams["width"] == 16

    # A checkpoint that Lightning wrote itself, and a place for tensors.
    plain = trainer_of([], max_steps=1)
    plain.fit(model)
    plain.save_checkpoint(f"{folder}/plain.ckpt")
    trainer_of([], plugins=[HoldfastIO()]).validate(
        Module(), ckpt_path=f"{folder}/plain.ckpt", weights_only=False
    )
    found = HoldfastIO().load_checkpoint(best, map_location="meta")
    assert all(value.is_meta for value in found["state_dict"].values())

    # Two places to resume from, and another model.
    trainer_of([HoldfastCallback(f"{folder}/run")], max_steps=2).fit(Module())
    both = trainer_of([HoldfastCallback(f"{folder}/run")], plugins=[HoldfastIO()])
    refused("Leave ckpt_path out", lambda: both.fit(Module(), ckpt_path=best))
    wide = trainer_of([HoldfastCallback(f"{folder}/run")])
    refused("net.0.weight", lambda: wide.fit(Module(width=17)))
    assert load_from_checkpoint(Module, f"{folder}/run").hparams["width"] == 16

    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[HoldfastIO()])
    net, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.save(f"{folder}/fabric", {"model": net, "optimizer": optimizer, "step": 7})
    with torch.no_grad():
        wanted = [p.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": net, "optimizer": optimizer, "step": 0}
    fabric.load(f"{folder}/fabric", state)
    assert state["step"] == 7
    assert all(map(torch.equal, model.parameters(), wanted))
    with holdfast.open(f"{folder}/fabric") as opened:
        assert opened.step == 7
    print("io: ok")


def refused(text: str, call: Any) -> None:
    said = ""
    try:
        call()
    except (ValueError, holdfast.HoldfastError) as error:
        said = str(error)
    assert text in said, said


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "exact":
        exact(place, list(map(int, rest)))
    elif command == "train":
        print("\n" + json.dumps(train(place, *map(int, rest))), flush=True)
    else:
        shutil.rmtree(place, ignore_errors=True)
        io(place)
