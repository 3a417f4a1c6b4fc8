"""Trains with real DeepSpeed, and loads universal checkpoints with it: run by torchrun in its environment.

    torchrun --nproc_per_node=N deepspeed_universal.py JOBS

JOBS is JSON: a list of jobs. ``{"do": "train", "out": DIRECTORY, ...}`` trains three steps and saves.
``{"do": "load", "path": DIRECTORY, "out": DIRECTORY, ...}`` loads with ``load_universal``, and saves ZeRO
checkpoints: ``loaded``, and ``continued`` after two more steps. ``load_cut`` loads a tensor-parallel model,
and saves it. All take ``stage`` and ``dtype``. This file imports nothing of everystep.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed_training import DEFAULTS, Cut, Grid, settings
from torch import nn


class Model(nn.Module):
    """Two groups, a tied head, a frozen parameter, a buffer, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 11)
        self.norm = nn.LayerNorm(11)
        self.frozen = nn.Linear(11, 3)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(11, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(self.embed(tokens)).relu())
        hidden = hidden + self.frozen(hidden).sum() * 0.01
        return nn.functional.cross_entropy(
            self.head(self.down(hidden)).float().flatten(0, 1), tokens.flatten()
        )


def engine_of(job: dict[str, Any], *, universal: bool) -> Any:
    torch.manual_seed(3 if universal else 0)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": job["stage"]},
    }
    if job["dtype"] != "fp32":
        config[job["dtype"]] = {"enabled": True}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, dist_init_required=False
    )
    return engine


def steps(engine: Any, count: int, seed: int) -> list[float]:
    feed = torch.Generator().manual_seed(seed + dist.get_rank())
    losses = []
    for _ in range(count):
        loss = engine(torch.randint(0, 7, (2, 3), generator=feed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(job: dict[str, Any]) -> None:
    engine = engine_of(job, universal=False)
    steps(engine, 3, 7)
    engine.save_checkpoint(job["out"], client_state={"note": "hello", "nested": {"a": 1.5}})


def load(job: dict[str, Any]) -> None:
    """What was loaded is saved again as it is, and after two more steps."""
    engine = engine_of(job, universal=True)
    path, client = engine.load_checkpoint(job["path"])
    assert path is not None
    kept = {key: client.get(key) for key in ("note", "nested")}
    engine.save_checkpoint(os.path.join(job["out"], "loaded"), client_state=kept)
    losses = steps(engine, 2, 50)
    engine.save_checkpoint(os.path.join(job["out"], "continued"), client_state={"losses": losses})


def load_cut(job: dict[str, Any]) -> None:
    """As `load`, of the model that `deepspeed_training` cuts over tensor-parallel ranks; `tp` of them."""
    grid = Grid(job["tp"])
    model = Cut(job["tp"], grid.get_model_parallel_rank())
    for parameter in model.parameters():
        parameter.data.zero_()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    config = settings({**DEFAULTS, "stage": job["stage"], "dtype": job["dtype"]})
    config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, mpu=grid, dist_init_required=False
    )
    path, _ = engine.load_checkpoint(job["path"])
    assert path is not None
    engine.save_checkpoint(job["out"])


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for job in json.loads(sys.argv[1]):
        {"train": train, "load": load, "load_cut": load_cut}[job["do"]](job)
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of DeepSpeed's own may hang at exit


if __name__ == "__main__":
    main()
