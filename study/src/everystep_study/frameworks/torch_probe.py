"""PyTorch in the suite ``determinism``: a small training with all kinds of state, and usual checkpoints."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from everystep_study.frameworks.api import Arrays, DefaultCheckpoint, Probe

SAMPLES, BATCH = 40, 8


class Position:
    """Shuffled indices, and how many were taken; like any stateful loader it has `state_dict`."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.int64)
        self._shuffle()

    def take(self) -> torch.Tensor:
        if self._taken == SAMPLES:
            self._shuffle()
        self._taken += BATCH
        return self._order[self._taken - BATCH : self._taken]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "taken": self._taken, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        order: torch.Tensor = state["order"]
        self._order, self._taken = order.clone(), int(state["taken"])
        self._generator.set_state(state["generator"])

    def _shuffle(self) -> None:
        self._order, self._taken = torch.randperm(SAMPLES, generator=self._generator), 0


class TorchProbe(Probe):
    ingredients: ClassVar[Mapping[str, str]] = {
        "torch_rng": "torch's random numbers (dropout)",
        "numpy_rng": "numpy's random numbers (noise on images)",
        "python_rng": "Python's random numbers (mirrored images)",
        "optimizer": "optimizer (momentum, learning rate)",
        "scheduler": "scheduler",
        "data": "position in the shuffled data",
        "buffers": "buffers of BatchNorm",
    }

    def __init__(self, seed: int) -> None:
        data = torch.Generator().manual_seed(1234)  # the data are the same for all
        self._images = torch.randn(SAMPLES, 3, 8, 8, generator=data)
        self._labels = torch.randint(10, (SAMPLES,), generator=data)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(288, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.data = Position(seed)

    def step(self) -> float:
        """The loss of the step, and that of a validation, which sees the buffers of BatchNorm."""
        taken = self.data.take()
        images = self._images[taken]
        if random.random() < 0.5:
            images = images.flip(-1)
        images = images + torch.from_numpy(0.1 * np.random.standard_normal(images.shape)).float()
        self.model.train()
        loss = functional.cross_entropy(self.model(images), self._labels[taken])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.model.eval()
        with torch.no_grad():
            seen = functional.cross_entropy(self.model(self._images[:BATCH]), self._labels[:BATCH])
        return loss.item() + seen.item()

    def weights(self) -> Arrays:
        return {name: tensor.numpy().copy() for name, tensor in self.model.state_dict().items()}

    def capture(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "weights": dict(self.model.named_parameters()),
                "buffers": dict(self.model.named_buffers()),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "data": self.data.state_dict(),
                "torch_rng": torch.get_rng_state(),
                "numpy_rng": np.random.get_state(),
                "python_rng": random.getstate(),
            }
        )

    def restore(self, captured: Mapping[str, Any]) -> None:
        live = self.model.state_dict()
        for kind in ("weights", "buffers"):
            for name, tensor in captured.get(kind, {}).items():
                live[name].copy_(tensor.detach())
        for name in ("optimizer", "scheduler", "data"):
            if name in captured:
                getattr(self, name).load_state_dict(captured[name])
        if "torch_rng" in captured:
            torch.set_rng_state(captured["torch_rng"])
        if "numpy_rng" in captured:
            np.random.set_state(captured["numpy_rng"])
        if "python_rng" in captured:
            random.setstate(captured["python_rng"])


class GeneralCheckpoint(DefaultCheckpoint):
    """PyTorch's tutorial "Saving and loading a general checkpoint": model, optimizer, epoch, loss."""

    key, title = "general", "torch.save, as in the tutorial"

    def save(self, probe: TorchProbe, directory: Path) -> None:
        state = {"model": probe.model.state_dict(), "optimizer": probe.optimizer.state_dict(), "epoch": 1}
        torch.save(state, directory / "checkpoint.pt")

    def load(self, probe: TorchProbe, directory: Path) -> None:
        found = torch.load(directory / "checkpoint.pt")
        probe.model.load_state_dict(found["model"])
        probe.optimizer.load_state_dict(found["optimizer"])


class DcpCheckpoint(DefaultCheckpoint):
    """The tutorial of `torch.distributed.checkpoint`: `get_state_dict` of model and optimizer."""

    key, title = "dcp", "DCP, as in the tutorial"

    def save(self, probe: TorchProbe, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(probe), checkpoint_id=directory / "dcp", no_dist=True)

    def load(self, probe: TorchProbe, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state(probe)
        load(state, checkpoint_id=directory / "dcp", no_dist=True)
        set_state_dict(
            probe.model,
            probe.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self, probe: TorchProbe) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(probe.model, probe.optimizer)
        return {"model": model, "optimizer": optimizer}


class EverystepCheckpoint(DefaultCheckpoint):
    """A `Checkpointer` with the state that docs/training.md shows."""

    key, title, ours = "everystep", "Everystep, as in its documentation", True

    def save(self, probe: TorchProbe, directory: Path) -> None:
        with self._checkpointer(probe, directory) as checkpointer:
            checkpointer.save(1)

    def load(self, probe: TorchProbe, directory: Path) -> None:
        with self._checkpointer(probe, directory) as checkpointer:
            checkpointer.restore()

    def _checkpointer(self, probe: TorchProbe, directory: Path) -> Any:
        import everystep

        state = {
            "model": probe.model,
            "optimizer": probe.optimizer,
            "scheduler": probe.scheduler,
            "data": probe.data,
            "rng": everystep.rng(),
        }
        return everystep.Checkpointer(directory / "run", state, preemption=False)
