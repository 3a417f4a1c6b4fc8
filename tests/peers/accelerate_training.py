"""Trainings with accelerate, in its own environment. Called by `test_accelerate.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
train RUN [STEP]        once, under torchrun; with STEP, the last rank is killed before the next step
own FOLDER              single saves, what else is in the state, and what does not fit
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR

import holdfast
from holdfast.accelerate import state_of


class Average:
    """An object that is registered with the accelerator. Rank 0's counts."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def prepared(width: int = 16) -> Any:
    """With all that an inexact resume would change: dropout, BatchNorm, accumulation, shuffling."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, StepLR(optimizer, 3, 0.9))
    rank, world = accelerator.process_index, accelerator.num_processes
    data = torch.randn(20 * world, 8, generator=torch.Generator().manual_seed(1))
    loader = holdfast.data.Loader(data, batch_size=4, shuffle=True, seed=5, rank=rank, world=world)
    average = Average()
    accelerator.register_for_checkpointing(loader, average)
    torch.manual_seed(1 + rank)
    return accelerator, model, optimizer, scheduler, loader, average


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def train(run: str, kill: int = 0) -> dict[str, Any]:
    accelerator, model, optimizer, scheduler, loader, average = prepared()
    with holdfast.Checkpointer(run, state_of(accelerator, model), keep=holdfast.Keep(last=100)) as ckpt:
        batches = ckpt.restore()
        while batches < 15:
            for batch in loader:
                if kill and batches == kill:
                    ckpt.wait()
                    if accelerator.is_main_process == (accelerator.num_processes == 1):
                        os.kill(os.getpid(), signal.SIGKILL)
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
    report = {
        "rank": accelerator.process_index,
        "batches": batches,
        "weights": digest(accelerator.unwrap_model(model)),
        "rate": scheduler.get_last_lr(),
        "average": average.value,
        "random": torch.rand(3).tolist(),
    }
    accelerator.end_training()
    return report


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


def exact(folder: str, batches: list[int]) -> None:
    in_child(f"{folder}/whole")
    for count in batches:
        in_child(f"{folder}/{count}", count)
        in_child(f"{folder}/{count}")


def own(folder: str) -> None:
    accelerator, model, optimizer, _, loader, average = prepared()
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
    accelerator.step, average.value = 3, 0.25
    holdfast.save(f"{folder}/one", state_of(accelerator, model, note={"epoch": 1}))
    wanted = digest(model), torch.rand(2).tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.step, average.value, note, loader.epoch = 0, 0.0, {"epoch": 0}, 7
    holdfast.load(f"{folder}/one", into=state_of(accelerator, model, note=note))
    assert (digest(model), torch.rand(2).tolist()) == wanted
    assert (accelerator.step, average.value, note, loader.epoch) == (3, 0.25, {"epoch": 1}, 1)
    with holdfast.open(f"{folder}/one") as opened:
        assert "models.0.0.weight" in opened
        assert "optimizers.0.0.weight.exp_avg" in opened
    refused("these names itself: rng", lambda: state_of(accelerator, model, rng=1))
    refused("was given 0 models, and the accelerator has prepared 1", lambda: state_of(accelerator))
    accelerator.free_memory()
    other, wide, *_ = prepared(width=17)
    refused("models.0.0.weight", lambda: holdfast.load(f"{folder}/one", into=state_of(other, wide, note={})))
    print("own: ok")


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
        own(place)
