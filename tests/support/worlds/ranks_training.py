"""A training of several processes that is saved while it goes on, stopped, and resumed: what its ranks run.

It has all that a real one needs saved: dropout and augmentation (random numbers of this rank), shuffled data,
a schedule, a gradient scaler, gradients summed over several batches.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import everystep
from everystep.checkpointer.events import Failed, Saved
from everystep.engine import faults
from everystep.integrations.data import Loader
from support.worlds.layout_truth import local

TIMEOUT = 120.0
SAMPLES, BATCH, WIDTH, HIDDEN = 40, 3, 199, 301

Kind = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank has to tell about its training."""

    start: int
    """The step it resumed from."""
    losses: Mapping[int, float]
    restored: Mapping[str, str]
    """Digests of the state after it was restored: of whole arrays, of values, of this rank's own."""
    digests: Mapping[int, Mapping[str, str]]
    """The same at the end of each step."""
    saved: tuple[Saved, ...] = ()
    failed: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    """Shards that this rank has created, not written over."""
    local_nbytes: int = 0
    """Parameters and moments that are on this rank."""
    warnings: tuple[str, ...] = field(default=())


class Samples(Dataset[torch.Tensor]):
    """Noisy samples: the noise is from the generators that the loader seeds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(WIDTH) + float(np.random.standard_normal()) + random.random()
        return torch.full((WIDTH,), float(index)) / SAMPLES + noise * 0.1


class Job:
    """A training of one kind, new, with seeds of its own."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)  # all ranks begin with the same weights
        # Statistics of each rank's own batches: DDP throws away all but rank 0's.
        norm = nn.BatchNorm1d(HIDDEN) if kind == "ddp" else nn.LayerNorm(HIDDEN)
        net = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(HIDDEN, WIDTH)
        )
        self.model: Any = net
        if kind == "ddp":
            self.model = DistributedDataParallel(net)
        else:
            for layer in (net[0], net[4], net):
                fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 + seed / 1000)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=4)
        self.loader = Loader(
            Samples(), batch_size=BATCH, shuffle=True, seed=seed, rank=self.rank, world=self.world
        )
        self.seen = torch.zeros(SAMPLES + self.rank)  # of another size on every rank
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(1000 * seed + self.rank)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "rng": everystep.per_rank(everystep.rng()),
            "loader": self.loader,
            "seen": everystep.per_rank(self.seen),
        }

    def step(self, accumulate: int) -> float:
        total = 0.0
        for _ in range(accumulate):
            batch = next(iter(self.loader), None)
            if batch is None:  # the end of an epoch
                batch = next(iter(self.loader))
            self.seen[: len(batch)] += batch.sum().item()
            loss = (self.model(batch) - batch).square().mean() / accumulate
            self.scaler.scale(loss).backward()
            total += loss.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total

    def digests(self) -> dict[str, str]:
        """Of whole arrays, and what must be the same on all ranks; of what is this rank's own below "own"."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found: dict[str, str] = {}
        for name, buffer in model.named_buffers():
            # Those of rank 0, as in the next forward pass.
            counts = buffer.clone()
            dist.broadcast(counts, 0)
            found[f"model.{name}"] = _digest(counts)
        for name, parameter in model.named_parameters():
            found[f"model.{name}"] = _digest(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{key}"] = _digest(value)
        groups = [sorted({**group, "params": None}.items()) for group in self.optimizer.param_groups]
        found["plain"] = repr(
            (groups, *(sorted(part.state_dict().items()) for part in (self.scheduler, self.scaler)))
        )
        given = self.loader.dealt + self.loader.position * BATCH * self.world
        found["data"] = repr((self.loader.seed, self.loader.epoch, min(given, SAMPLES)))
        own = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        found["own"] = _hash(repr((own, self.loader.state_dict())).encode() + _digest(self.seen).encode())
        return found

    def local_nbytes(self) -> int:
        return sum(
            local(tensor).nbytes
            for parameter in self.model.parameters()
            for tensor in (parameter, *self.optimizer.state[parameter].values())
            if tensor.numel() > 1
        )


def train(
    run: str,
    kind: Kind,
    steps: int,
    *,
    seed: int,
    every: int = 1,
    keep: int = 100,
    accumulate: int = 1,
) -> Trained:
    """Train up to step `steps`, from where the run is, with a save beside every step or every few."""
    job = Job(kind, seed)
    losses: dict[int, float] = {}
    digests: dict[int, dict[str, str]] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer = everystep.Checkpointer(
            run,
            job.state(),
            every=every,
            keep=everystep.Keep(last=keep),
            mode="overlap",
            timeout=TIMEOUT,
            preemption=False,
        )
        with faults.traced() as calls, checkpointer:
            start = checkpointer.restore()
            restored = job.digests()
            for step in range(start + 1, steps + 1):
                losses[step] = job.step(accumulate)
                digests[step] = job.digests()
                checkpointer.save(step)
    created = [call.path for call in calls if call.call == "open" and call.creates and _is_shard(call.path)]
    events = list(checkpointer.events)
    return Trained(
        start,
        losses,
        restored,
        digests,
        tuple(event for event in events if isinstance(event, Saved)),
        tuple(event.message for event in events if isinstance(event, Failed)),
        tuple(created),
        job.local_nbytes() if digests else 0,
        tuple(str(warning.message) for warning in caught if warning.category is RuntimeWarning),
    )


def _is_shard(path: str) -> bool:
    return path.endswith(".safetensors")


def _digest(tensor: Any) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return array_digest(whole)


def array_digest(tensor: torch.Tensor) -> str:
    return _hash(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
