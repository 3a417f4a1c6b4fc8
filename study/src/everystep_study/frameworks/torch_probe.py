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

from everystep_study.frameworks.api import (
    Arrays,
    DefaultCheckpoint,
    EverystepDefault,
    Images,
    Probe,
    capture_random,
    restore_random,
)


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
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.data = Images(seed, channels_first=True)

    def step(self) -> float:
        """The loss of the step, and that of a validation, which sees the buffers of BatchNorm."""
        self.model.train()
        loss = self._loss(self.data.take())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.model.eval()
        with torch.no_grad():
            return loss.item() + self._loss(self.data.seen).item()

    def _loss(self, batch: tuple[Any, Any]) -> torch.Tensor:
        images, labels = map(torch.from_numpy, batch)
        return functional.cross_entropy(self.model(images), labels.long())

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
                **capture_random(),
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
        restore_random(captured)


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


class DcpDefault(DefaultCheckpoint):
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
        kinds = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(probe.model, probe.optimizer, **kinds)

    def _state(self, probe: TorchProbe) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(probe.model, probe.optimizer)
        return {"model": model, "optimizer": optimizer}


class EverystepTorch(EverystepDefault):
    """A `Checkpointer` with the state that docs/training.md shows."""

    def state(self, probe: TorchProbe) -> Any:
        import everystep

        kept = {"model": probe.model, "optimizer": probe.optimizer, "scheduler": probe.scheduler}
        return {**kept, "data": probe.data, "rng": everystep.rng()}
