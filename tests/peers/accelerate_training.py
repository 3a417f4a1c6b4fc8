"""Trainings with accelerate, in its own environment. Called by `test_accelerate.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
train RUN [STEP]        once, under torchrun; with STEP, the last rank is killed before the next step
loader FOLDER STEP...   the same as `exact`, with a prepared loader of the kind $KIND
loader-train RUN [STEP] the same as `train`, with such a loader
loader-told FOLDER      what is warned of when an epoch is not taken up
restored RUN            what a restored state is, on any number of ranks
own FOLDER              single saves, what else is in the state, and what does not fit
folders FOLDER          `save_state` and `load_state`, with accelerate's own names
together FOLDER         the same by all ranks, under torchrun

LAYOUT=fsdp2 in the environment shards the model.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, PartialState, skip_first_batches
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration
from torch import nn
from torch.optim.lr_scheduler import StepLR
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
    told,
    whole_digest,
)

import everystep
from everystep.engine import faults
from everystep.integrations.accelerate import load_state, save_state, state_of
from everystep.integrations.data import Loader


class Average:
    """An object that is registered with the accelerator. Rank 0's counts."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def sharding() -> dict[str, Any]:
    """accelerate's own arguments for FSDP2.

    For processes on the CPU accelerate ignores them without a word: `AcceleratorState` turns FSDP on for
    eight kinds of GPUs and for no other device. So these processes say that they are of such a kind. Device,
    process group and tensors stay those of the CPU, and all that follows is accelerate's code.
    """
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)}


def prepared(width: int = 16, **arguments: Any) -> Any:
    """With all that an inexact resume would change: dropout, BatchNorm, accumulation, shuffling."""
    more = sharding() if LAYOUT == "fsdp2" else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **more, **arguments)
    torch.manual_seed(0)
    # FSDP2 leaves statistics to each rank, so they would differ; a layer without statistics then.
    norm = nn.LayerNorm(width) if LAYOUT else nn.BatchNorm1d(width)
    net = nn.Sequential(nn.Linear(8, width), norm, nn.Dropout(0.3), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, StepLR(optimizer, 3, 0.9))
    rank, world = accelerator.process_index, accelerator.num_processes
    data = torch.randn(40 if LAYOUT else 20 * world, 8, generator=torch.Generator().manual_seed(1))
    loader = Loader(data, batch_size=4, shuffle=True, seed=5, rank=rank, world=world)
    average = Average()
    accelerator.register_for_checkpointing(loader, average)
    torch.manual_seed(1 + rank)
    return accelerator, model, optimizer, scheduler, loader, average


def train(run: str, kill: int = 0) -> dict[str, Any]:
    accelerator, model, optimizer, scheduler, loader, average = prepared()
    counted = count_collectives() if LAYOUT else {}
    with everystep.Checkpointer(run, state_of(accelerator, model), keep=everystep.Keep(last=100)) as ckpt:
        batches = ckpt.restore()
        while batches < 15:
            for batch in loader:
                if kill and batches == kill:
                    ckpt.wait()
                    if accelerator.is_main_process == (accelerator.num_processes == 1):
                        die()
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                average.value = 0.9 * average.value + accelerator.gather(loss.detach()[None]).mean().item()
                batches += 1
                if accelerator.sync_gradients or batches == 15:
                    ckpt.save(batches)
    assert not counted or (counted["saves"] and not counted["collectives"]), counted
    report = {
        "rank": accelerator.process_index,
        "layout": str(accelerator.distributed_type),
        "batches": batches,
        "weights": digest(accelerator.unwrap_model(model).state_dict().values()),
        "whole": whole_digest(accelerator.unwrap_model(model), optimizer.optimizer),
        "rate": scheduler.get_last_lr(),
        "average": average.value,
        "random": torch.rand(3).tolist(),
    }
    accelerator.end_training()
    return report


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)))


def train_loader(
    run: str, kill: int = 0, *, skip: str = "method", seed: int = 3, until: int = 25
) -> dict[str, Any]:
    """With prepared loaders, dropout, and an evaluation before each further epoch that draws numbers, too."""
    kind = os.environ["KIND"]
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=kind == "seedable")
    )
    torch.manual_seed(seed if kill or not os.path.exists(run) else 77)  # a resumed training has other numbers
    world = accelerator.num_processes
    data: Any = (
        Stream()
        if kind == "iterable"
        else torch.randn(40 * world, 8, generator=torch.Generator().manual_seed(1))
    )
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    workers = 2 if kind == "workers" else 0
    shuffle = None if kind == "iterable" else True
    loader = DataLoader(data, batch_size=4, shuffle=shuffle, generator=generator, num_workers=workers)
    held_out = DataLoader(torch.ones(8, 8), batch_size=4, shuffle=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, loader, held_out = accelerator.prepare(net, optimizer, loader, held_out)
    seen: dict[int, list[float]] = {}
    with everystep.Checkpointer(
        run, state_of(accelerator, model, seen=everystep.per_rank(seen)), keep=everystep.Keep(last=2)
    ) as ckpt:
        batches = ckpt.restore()
        done = batches % 10
        while batches < until:
            for batch in held_out if batches and not done else ():
                model(batch)  # draws for dropout
            now = loader
            if done and skip == "method":
                now = accelerator.skip_first_batches(loader, done)
            elif done and skip == "function":
                now = skip_first_batches(loader, done)
            done = 0
            for batch in now:
                if kill and batches == kill:
                    ckpt.wait()
                    if accelerator.is_main_process == (world == 1):
                        die()
                if batches == until:
                    break
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
                seen[batches] = batch[:, 0].tolist()
                ckpt.save(batches)
    return {
        "rank": accelerator.process_index,
        "weights": digest(accelerator.unwrap_model(model).state_dict().values()),
        "seen": seen,
        "random": torch.rand(3).tolist(),
    }


def loader_told(folder: str) -> None:
    os.environ["KIND"] = "plain"
    for skip in ("function", "none"):
        run = f"{folder}/{skip}"
        assert in_child(lambda run=run: train_loader(run, 14)) != 0  # type: ignore[misc]

        def resumed(run: str = run, skip: str = skip) -> None:
            told("inside of an epoch", lambda: train_loader(run, skip=skip))
            print(f"told: {skip}", flush=True)

        in_child(resumed)

    def late() -> None:
        accelerator = Accelerator(cpu=True)
        loader, model = accelerator.prepare(DataLoader(torch.ones(16, 8), batch_size=4), nn.Linear(8, 1))

        def save() -> None:
            save_state(accelerator, model, output_dir=f"{folder}/late")

        for place, _ in enumerate(loader):
            if place == 1:
                told("this epoch began before Everystep knew", save)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save()
            for _ in loader:
                save()
        print("told: late", flush=True)

    assert in_child(late) == 0


def restored(run: str) -> dict[str, Any]:
    accelerator, model, optimizer, _, loader, average = prepared()
    with everystep.Checkpointer(run, state_of(accelerator, model)) as ckpt:
        batches = ckpt.restore()
    report = {
        "rank": accelerator.process_index,
        "batches": batches,
        "whole": whole_digest(accelerator.unwrap_model(model), optimizer.optimizer),
        "average": average.value,
        "epoch": loader.epoch,
    }
    accelerator.end_training()
    return report


def own(folder: str) -> None:
    accelerator, model, optimizer, _, loader, average = prepared()
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
    accelerator.step, average.value = 3, 0.25
    everystep.save(f"{folder}/one", state_of(accelerator, model, note={"epoch": 1}))
    wanted = digest(model.parameters()), torch.rand(2).tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.step, average.value, note, loader.epoch = 0, 0.0, {"epoch": 0}, 7
    everystep.load(f"{folder}/one", into=state_of(accelerator, model, note=note))
    assert (digest(model.parameters()), torch.rand(2).tolist()) == wanted
    assert (accelerator.step, average.value, note, loader.epoch) == (3, 0.25, {"epoch": 1}, 1)
    with everystep.open(f"{folder}/one") as opened:
        assert "models.0.0.weight" in opened
        assert "optimizers.0.0.weight.exp_avg" in opened
    try:
        state_of(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED), model)
    except NotImplementedError as error:
        assert "DEEPSPEED" in str(error)  # noqa: PT017
    else:
        raise AssertionError("DeepSpeed saves files of its own, and nothing says so")
    refused("these names itself: rng", lambda: state_of(accelerator, model, rng=1))
    refused("was given 0 models, and the accelerator has prepared 1", lambda: state_of(accelerator))
    accelerator.register_for_checkpointing(Average())  # one more than was saved
    refused(
        "registered.2", lambda: everystep.load(f"{folder}/one", into=state_of(accelerator, model, note={}))
    )
    accelerator.free_memory()
    other, wide, *_ = prepared(width=17)
    refused("models.0.0.weight", lambda: everystep.load(f"{folder}/one", into=state_of(other, wide, note={})))
    print("own: ok")


def folders(folder: str) -> None:
    names = ProjectConfiguration(f"{folder}/project", automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, optimizer, _, loader, average = prepared(project_config=names)
    there = Path(folder, "project", "checkpoints")
    refused("has no checkpoint", lambda: load_state(accelerator, model))
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        average.value += 1
        save_state(accelerator, model, note={"batches": average.value})
    assert sorted(path.name for path in there.iterdir()) == ["checkpoint_3", "checkpoint_4"]
    wanted = digest(model.parameters()), torch.rand(2).tolist()

    def again(**note: Any) -> tuple[Any, ...]:
        accelerator.free_memory()
        names = ProjectConfiguration(f"{folder}/project", automatic_checkpoint_naming=True, total_limit=2)
        new, model, *_, average = prepared(project_config=names)
        load_state(new, model, note=note)
        return new, model, average, note

    new, restored, other, note = again(batches=0.0)
    assert (digest(restored.parameters()), torch.rand(2).tolist()) == wanted
    assert (other.value, note, new.save_iteration) == (5.0, {"batches": 5.0}, 5)

    # Killed inside of a save: the older one is found, and all of `total_limit` are there.
    def killed() -> None:
        with faults.injected("rename:1:kill"):
            save_state(new, restored, note=note)

    assert in_child(killed) == -9
    assert sorted(path.name for path in there.iterdir() if not path.name.endswith(".partial")) == [
        "checkpoint_3",
        "checkpoint_4",
    ]
    new, restored, other, note = again(batches=0.0)
    assert (other.value, new.save_iteration) == (5.0, 5)

    # Damaged: passed over, and its name is not used again.
    damage(there / "checkpoint_4")
    told(f"passing over {there / 'checkpoint_4'}: ", lambda: again(batches=0.0))
    new, restored, other, note = again(batches=0.0)
    assert (other.value, new.save_iteration) == (4.0, 5)
    assert save_state(new, restored, note=note) == str(there / "checkpoint_5")
    damage(there / "checkpoint_5")
    refused("no checkpoint is intact", lambda: again(batches=0.0))

    # Without automatic names, a folder; and hooks, which would change what is saved.
    accelerator.free_memory()
    plain, model, *_ = prepared()
    refused("needs output_dir", lambda: save_state(plain, model))
    refused("needs input_dir", lambda: load_state(plain, model))
    for _ in range(2):
        save_state(plain, model, output_dir=f"{folder}/one")
    load_state(plain, model, input_dir=f"{folder}/one")
    plain.register_save_state_pre_hook(lambda models, weights, output: None)
    try:
        save_state(plain, model, output_dir=f"{folder}/one")
    except NotImplementedError as error:
        assert "register_save_state_pre_hook" in str(error)  # noqa: PT017
    else:
        raise AssertionError("hooks were left out silently")
    print("folders: ok")


def together(folder: str) -> None:
    names = ProjectConfiguration(f"{folder}/project", automatic_checkpoint_naming=True, total_limit=1)
    accelerator, model, optimizer, _, loader, average = prepared(project_config=names)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        average.value += 1 + accelerator.process_index
        save_state(accelerator, model)
    wanted = digest(model.parameters()), torch.rand(2).tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    average.value = 0.0
    load_state(accelerator, model)
    assert (digest(model.parameters()), torch.rand(2).tolist()) == wanted
    assert average.value == 5.0  # rank 0's
    assert accelerator.save_iteration == 5
    accelerator.wait_for_everyone()
    assert [path.name for path in Path(folder, "project", "checkpoints").iterdir()] == ["checkpoint_4"]
    print("together: ok\n", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "exact":
        exact(train, place, list(map(int, rest)))
    elif command == "train":
        print("\n" + json.dumps(train(place, *map(int, rest))), flush=True)
    elif command == "restored":
        print("\n" + json.dumps(restored(place)), flush=True)
    elif command == "loader":
        exact(train_loader, place, list(map(int, rest)))
    elif command == "loader-train":
        print("\n" + json.dumps(train_loader(place, *map(int, rest))), flush=True)
    elif command == "loader-told":
        loader_told(place)
    elif command == "folders":
        folders(place)
    elif command == "together":
        together(place)
    else:
        own(place)
