"""Trainings with Lightning, in its own environment. Called by `test_lightning.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
train RUN [STEP]        once, under torchrun; with STEP, the last rank is killed before the next step
restored RUN            what a restored state is, on any number of ranks
io FOLDER               ModelCheckpoint and Fabric with EverystepIO
killed FOLDER           killed inside of a save of ModelCheckpoint
sharded FOLDER          ModelCheckpoint with a sharded strategy, under torchrun
fabric RUN [STEP]       as train, with Fabric

LAYOUT in the environment: ``fsdp2`` (ModelParallelStrategy) or ``fsdp1`` (FSDPStrategy) shard the model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallelStrategy
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from training_tools import (
    LAYOUT,
    count_collectives,
    damage,
    die,
    digest,
    exact,
    in_child,
    refused,
    whole_digest,
)

import everystep
from everystep.engine import faults
from everystep.integrations.data import Loader
from everystep.integrations.lightning import (
    EverystepCallback,
    EverystepIO,
    EverystepSharded,
    load_from_checkpoint,
    state_of,
)

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def layers(width: int = 16) -> nn.Sequential:
    # Sharded strategies leave statistics to each rank, so they would differ: a layer without statistics.
    norm = nn.LayerNorm(width) if LAYOUT else nn.BatchNorm1d(width)
    return nn.Sequential(nn.Linear(8, width), norm, nn.Dropout(0.3), nn.Linear(width, 1))


def shard(net: nn.Sequential, mesh: Any) -> nn.Sequential:
    """FSDP2, as users of ModelParallelStrategy apply it."""
    for layer in (net[0], net[3], net):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return net


class OnCPU(FSDPStrategy):
    """Lightning refuses ``FSDPStrategy`` without a GPU, and does not tell torch to use the CPU. This does."""

    def _setup_model(self, model: Any) -> Any:
        how = {"sharding_strategy": self.sharding_strategy, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(model, **how, **self.kwargs)


class Sharded(EverystepSharded, ModelParallelStrategy):
    pass


class ShardedFSDP1(EverystepSharded, OnCPU):
    pass


def strategy(fsdp2: Any = ModelParallelStrategy, fsdp1: Any = OnCPU) -> Any:
    if LAYOUT == "fsdp2" and WORLD > 1:
        return fsdp2(data_parallel_size=WORLD, tensor_parallel_size=1)
    if LAYOUT == "fsdp1" and WORLD > 1:
        return fsdp1(auto_wrap_policy={nn.Linear}, process_group_backend="gloo")
    return "auto"


class Module(lightning.LightningModule):
    """Everything that an inexact resume would change: dropout, shuffling, schedulers, a hook."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = layers(width)
        self.average = 0.0

    def configure_model(self) -> None:
        if LAYOUT == "fsdp2" and self.device_mesh is not None:
            shard(self.net, self.device_mesh)

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
        data = torch.randn(40 if LAYOUT else 20 * world, 8, generator=torch.Generator().manual_seed(1))
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
                die()


class Count(Callback):
    """Has a state that it changes after each batch, and when an epoch begins."""

    def __init__(self) -> None:
        self.batches = self.epochs = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def on_train_epoch_start(self, *_: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches, self.epochs = state["batches"], state["epochs"]


def trainer_of(callbacks: list[Any], **arguments: Any) -> Any:
    return lightning.Trainer(
        **{"max_epochs": 3, "enable_checkpointing": False, "strategy": strategy(), **arguments},
        accelerator="cpu",
        devices=WORLD,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(run: str, kill: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Module()
    torch.manual_seed(1 + RANK)
    counted = count_collectives() if LAYOUT == "fsdp2" else {}
    callback = EverystepCallback(run, keep=everystep.Keep(last=100))
    count = Count()
    # The average is part of what Lightning's hooks save, and in the end it takes the place of the weights.
    average = [] if WORLD > 1 else [EMAWeightAveraging(decay=0.8)]
    trainer = trainer_of([count, callback, *average, Kill(kill)])
    trainer.fit(model)
    assert not counted or (counted["saves"] and not counted["collectives"]), counted
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {
        "rank": RANK,
        "strategy": type(trainer.strategy).__name__,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "digest": digest([*trainer.strategy.model.parameters(), *model.buffers(), torch.rand(3)]),
        "rates": rates,
        "average": model.average,
        "count": count.state_dict(),
    }


def restored(run: str) -> dict[str, Any]:
    model = Module()
    trainer = trainer_of([EverystepCallback(run, keep=everystep.Keep(last=100))])
    trainer.fit(model)  # the training is at its end
    return {
        "rank": RANK,
        "step": trainer.global_step,
        "whole": whole_digest(model, trainer.optimizers[0]),
        "average": model.average,
    }


def fabric(run: str, kill: int = 0) -> dict[str, Any]:
    mesh = {"data_parallel_size": WORLD, "tensor_parallel_size": 1}
    chosen = FabricParallelStrategy(parallelize_fn=shard, **mesh) if LAYOUT == "fsdp2" else "auto"
    plugins = [] if LAYOUT == "fsdp2" else [EverystepIO()]
    runner = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy=chosen, plugins=plugins)
    runner.launch()
    counted = count_collectives() if LAYOUT == "fsdp2" else {}
    torch.manual_seed(0)
    net = layers()
    if LAYOUT == "fsdp2":  # the module comes first there
        model = runner.setup(net)
        optimizer = runner.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = runner.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    data = torch.randn(20 * WORLD, 8, generator=torch.Generator().manual_seed(1))
    loader = Loader(data, batch_size=4, shuffle=True, seed=5, rank=RANK, world=WORLD)
    if not LAYOUT:
        wanted, objects = digest(model.parameters()), {"model": model, "optimizer": optimizer}
        runner.save(f"{run}-own", {**objects, "epoch": 7})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert runner.load(f"{run}-own", objects) == {"epoch": 7}
        assert digest(model.parameters()) == wanted
    lightning.seed_everything(1 + RANK)  # all of them: a drill compares them, too
    state = state_of(runner, model=model, optimizer=optimizer, loader=loader)
    with everystep.Checkpointer(run, state, keep=everystep.Keep(last=100)) as ckpt:
        step = ckpt.restore()
        while step < 15:
            for batch in loader:
                if kill and step == kill:
                    ckpt.wait()
                    if RANK == WORLD - 1:
                        die()
                loss = model(batch).square().mean()
                runner.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                ckpt.save(step)
    assert not counted or (counted["saves"] and not counted["collectives"]), counted
    with everystep.open(ckpt.path) as opened:  # in a drill, another one
        assert {"model.0.weight", "optimizer.0.weight.exp_avg"} <= set(opened), list(opened)
    return {"rank": RANK, "step": step, "digest": digest([*model.parameters(), torch.rand(3)])}


def killed(folder: str) -> None:
    """Inside of the save of step 6: the older one is there, whole, and ``last`` means it."""

    class Faults(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                faults.install(*faults.parse("rename:1:kill,exchange:1:kill"))

    def saving(callbacks: list[Any], steps: int) -> tuple[Any, Module]:
        keeper = ModelCheckpoint(f"{folder}/models", "{step}", every_n_train_steps=2, save_last=True)
        trainer = trainer_of(
            [*callbacks, keeper], enable_checkpointing=True, plugins=[EverystepIO()], max_steps=steps
        )
        model = Module()
        trainer.fit(model, ckpt_path="last")
        return trainer, model

    assert in_child(lambda: saving([Faults()], 8) and None) == -9
    there = sorted(path.name for path in Path(folder, "models").iterdir())
    whole = [name for name in there if name.endswith(".ckpt")]
    assert whole == ["last.ckpt", "step=4.ckpt"], there
    assert all(everystep.verify(f"{folder}/models/{name}").problems == () for name in whole)
    with everystep.open(f"{folder}/models/last.ckpt") as opened:
        assert opened.step == 4
    trainer, _ = saving([], 8)
    assert trainer.global_step == 8

    # Damage is an error that says where, and not a training with other weights.
    damage(Path(folder, "models", "last.ckpt"))
    refused("corrupt checkpoint in", lambda: saving([], 10))
    print("killed: ok")


def sharded(folder: str) -> None:
    def saving(steps: int) -> tuple[Any, ModelCheckpoint, Module]:
        keep = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
        keeper = ModelCheckpoint(f"{folder}/models", "{step}", every_n_train_steps=2, **keep)
        chosen = strategy(Sharded, ShardedFSDP1)
        trainer = trainer_of([keeper], enable_checkpointing=True, max_steps=steps, strategy=chosen)
        return trainer, keeper, Module()

    def here(trainer: Any) -> str:
        moments = [value for entries in trainer.optimizers[0].state.values() for value in entries.values()]
        return digest([*trainer.strategy.model.parameters(), *moments])

    first, keeper, model = saving(8)
    first.fit(model)
    there = sorted(path.name for path in Path(folder, "models").iterdir())
    assert there == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"], there
    wanted, best = here(first), keeper.best_model_path
    with everystep.open(best) as opened:
        assert (opened.step, opened.world) == (8, WORLD)
        assert {"state_dict.net.0.weight", "optimizers.0.net.0.weight.exp_avg"} <= set(opened), list(opened)

    again, _, other = saving(8)
    again.fit(other, ckpt_path="last")  # nothing is left to do
    assert here(again) == wanted
    further, _, other = saving(10)
    further.fit(other, ckpt_path=best)
    assert further.global_step == 10
    checking, _, other = saving(8)
    (found,) = checking.validate(other, ckpt_path=best)
    loaded = load_from_checkpoint(Module, best).eval()
    wanted_value = loaded.net(torch.ones(1, 8)).item() + loaded.average
    assert abs(found["val"] - wanted_value) < 1e-5, (found, wanted_value)

    # One that the strategy wrote without Everystep (FSDPStrategy cannot, on the CPU); and another model.
    if LAYOUT == "fsdp2":
        native = trainer_of([], max_steps=2)
        native.fit(Module())
        native.save_checkpoint(f"{folder}/native.ckpt")
        reading, _, other = saving(4)
        reading.fit(other, ckpt_path=f"{folder}/native.ckpt", weights_only=False)
        assert reading.global_step == 4
        reading.save_checkpoint(f"{folder}/native.ckpt")  # over it
        with everystep.open(f"{folder}/native.ckpt") as opened:
            assert opened.step == 4
    wide, _, _ = saving(10)
    refused("state_dict.net.0.weight", lambda: wide.fit(Module(width=18), ckpt_path=best))

    with everystep.open(best) as opened:
        for name, value in loaded.named_parameters():
            assert torch.equal(value, opened[f"state_dict.{name}"][...]), name
    assert loaded.hparams["width"] == 16
    print("sharded: ok", flush=True)


def adopted(folder: str) -> None:
    """A training that began without Everystep, or with links, goes on with it: ``last`` is saved over."""

    def saving(name: str, steps: int, last: Any, plugins: list[Any]) -> Path:
        keeper = ModelCheckpoint(f"{folder}/{name}", "{step}", every_n_train_steps=2, save_last=last)
        trainer = trainer_of([keeper], enable_checkpointing=True, plugins=plugins, max_steps=steps)
        trainer.fit(Module(), ckpt_path="last", weights_only=False)
        assert trainer.global_step == steps
        return Path(folder, name, "last.ckpt")

    assert saving("file", 4, True, []).is_file()
    assert saving("link", 4, "link", [EverystepIO()]).is_symlink()
    for name in ("file", "link"):
        last = saving(name, 8, True, [EverystepIO()])
        assert not last.is_symlink()
        with everystep.open(last) as opened:
            assert opened.step == 8
        assert sorted(os.listdir(last.parent)) == ["last.ckpt", "step=8.ckpt"]
    assert saving("link", 10, "link", [EverystepIO()]).is_symlink()


class CountedByType(Callback):
    """Some callbacks have their class for a key, as all had in Lightning before 1.5."""

    steps = 0

    @property
    def state_key(self) -> Any:
        return type(self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def io(folder: str) -> None:
    def models(**arguments: Any) -> ModelCheckpoint:
        names = {"dirpath": f"{folder}/models", "filename": "{step}"}
        return ModelCheckpoint(**names, every_n_train_steps=2, save_last="link", **arguments)

    keeper = models(save_top_k=2, monitor="step", mode="max")
    first = trainer_of([keeper], enable_checkpointing=True, plugins=[EverystepIO()], max_steps=8)
    model = Module()
    first.fit(model)
    saved = sorted(path.name for path in Path(folder, "models").iterdir())
    assert saved == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"], saved
    assert everystep.verify(f"{folder}/models/step=8.ckpt").problems == ()
    best = keeper.best_model_path

    again = trainer_of([models()], enable_checkpointing=True, plugins=[EverystepIO()], max_steps=10)
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
    trainer_of([], plugins=[EverystepIO()]).validate(
        Module(), ckpt_path=f"{folder}/plain.ckpt", weights_only=False
    )
    found = EverystepIO().load_checkpoint(best, map_location="meta")
    assert all(value.is_meta for value in found["state_dict"].values())

    # Lightning's own words, and callbacks that are keyed by their type.
    nothing, plugin = f"{folder}/nothing.ckpt", EverystepIO()
    refused("Checkpoint file not found", lambda: again.fit(Module(), ckpt_path=nothing))
    with contextlib.suppress(TypeError):
        plugin.save_checkpoint({}, nothing, storage_options={})
        raise AssertionError("storage_options would be ignored")
    counter = CountedByType()
    keyed = trainer_of([counter], plugins=[EverystepIO()], max_steps=3)
    keyed.fit(Module())
    keyed.save_checkpoint(f"{folder}/keyed.ckpt")
    for resume, more in (
        ({"ckpt_path": f"{folder}/keyed.ckpt"}, []),
        ({}, [EverystepCallback(f"{folder}/r")]),
    ):
        counted = CountedByType()
        if more:
            trainer_of([CountedByType(), *more], max_steps=3).fit(Module())
            more = [EverystepCallback(f"{folder}/r")]
        then = trainer_of([counted, *more], plugins=[EverystepIO()], max_steps=5)
        then.fit(Module(), **resume)
        assert (counted.steps, then.global_step) == (5, 5), counted.steps
    assert set(plugin.load_checkpoint(f"{folder}/keyed.ckpt")["callbacks"]) >= {CountedByType}

    # Two places to resume from, and another model.
    trainer_of([EverystepCallback(f"{folder}/run")], max_steps=2).fit(Module())
    both = trainer_of([EverystepCallback(f"{folder}/run")], plugins=[EverystepIO()])
    refused("Leave ckpt_path out", lambda: both.fit(Module(), ckpt_path=best))
    wide = trainer_of([EverystepCallback(f"{folder}/run")])
    refused("net.0.weight", lambda: wide.fit(Module(width=17)))
    assert load_from_checkpoint(Module, f"{folder}/run").hparams["width"] == 16

    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[EverystepIO()])
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
    with everystep.open(f"{folder}/fabric") as opened:
        assert opened.step == 7
    # Strategies that shard take no CheckpointIO, in Fabric.
    parallel = FabricParallelStrategy(parallelize_fn=shard)
    try:
        lightning.Fabric(accelerator="cpu", devices=1, strategy=parallel, plugins=[EverystepIO()])
    except NotImplementedError as error:
        assert "CheckpointIO" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("docs/integrations.md says that Fabric rejects this")
    adopted(folder)
    print("io: ok")


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "exact":
        exact(train, place, list(map(int, rest)))
    elif command in ("train", "fabric", "restored"):
        call: Any = {"train": train, "fabric": fabric, "restored": restored}[command]
        print("\n" + json.dumps(call(place, *map(int, rest))), flush=True)
    elif command == "sharded":
        sharded(place)
    elif command == "killed":
        killed(place)
    else:
        shutil.rmtree(place, ignore_errors=True)
        io(place)
