"""DeepSpeed in the suite ``cost``: its engine's checkpoints, `torch.save`, and Everystep's."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("DS_ACCELERATOR", "cpu")
EXTENSIONS = Path(sys.prefix) / "torch-extensions"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))

import deepspeed
import torch
import torch.distributed as dist

from everystep_study.frameworks import torch_models
from everystep_study.frameworks.api import Framework
from everystep_study.frameworks.torch_training import TorchTraining
from everystep_study.harness.files import sync_tree
from everystep_study.mechanisms.mechanism import EverystepOverlap, EverystepSync, Mechanism
from everystep_study.mechanisms.torch_mechanisms import TorchSave

STALE_SECONDS = 900.0


class WithLoss(torch.nn.Module):
    """A model that is given its targets, too: an engine calls one module for all of a forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch_models.loss_of(self.model, (inputs, targets))


class DeepSpeedTraining(TorchTraining):
    """One process of data-parallel training, without ZeRO."""

    def __init__(self, model: str, quick: bool, seed: int) -> None:
        self.engine: Any = None
        super().__init__(model, quick, seed)
        os.environ.setdefault("LOCAL_RANK", "0")
        # DeepSpeed compiles its messages at the first use; a build that was killed leaves a lock behind.
        for lock in EXTENSIONS.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                lock.unlink(missing_ok=True)
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            deepspeed.init_distributed()
        config = {"train_micro_batch_size_per_gpu": 1}
        whole = WithLoss(self.model)
        self.engine, *_ = deepspeed.initialize(model=whole, optimizer=self.optimizer, config=config)

    def step(self) -> float:
        if self.engine is None:
            return super().step()
        loss = self.engine(*self._batch)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def everystep_state(self, weights_only: bool) -> object:
        from everystep.integrations.deepspeed import state_of

        return {"model": self.model} if weights_only else state_of(self.engine)


class EngineSave(Mechanism):
    """`save_checkpoint` of the engine. It also writes the file `latest`."""

    key, title = "save-checkpoint", "DeepSpeed, save_checkpoint"
    weights_only_possible = False
    subject: DeepSpeedTraining

    def write(self, target: Path) -> None:
        self.subject.engine.save_checkpoint(str(self.directory), tag=target.name)

    def sync(self) -> None:
        sync_tree(self.directory)

    def load(self) -> None:
        self.subject.engine.load_checkpoint(str(self.directory), tag=self.path.name)


class EverystepUse(EngineSave):
    """The same call after `everystep.integrations.deepspeed.use(engine)`."""

    key, title = "everystep-use", "Everystep, use(engine)"
    ours = always_durable = True
    overlap: ClassVar[bool] = False

    def open(self) -> None:
        from everystep.integrations.deepspeed import use

        engine = self.subject.engine
        self._own = engine.checkpoint_engine
        before = set(vars(engine))
        use(engine, overlap=self.overlap)
        self._added = set(vars(engine)) - before

    def close(self) -> None:
        engine = self.subject.engine
        engine.checkpoint_engine = self._own
        for name in self._added:
            delattr(engine, name)  # the engine's own methods are in its class


class EverystepUseOverlap(EverystepUse):
    key, title = "everystep-use-overlap", "Everystep, use(engine), overlap"
    overlap = background = True

    def wait(self) -> None:
        self.subject.engine.checkpoint_engine.finish()


FRAMEWORK = Framework(
    packages={"deepspeed": "deepspeed", "torch": "torch"},
    training=DeepSpeedTraining,
    mechanisms=(
        EngineSave,
        TorchSave,
        EverystepUse,
        EverystepUseOverlap,
        EverystepSync,
        EverystepOverlap,
    ),
)
