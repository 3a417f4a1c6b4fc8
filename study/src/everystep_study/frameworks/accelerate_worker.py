"""accelerate in the suite ``cost``: `save_state`, and a `Checkpointer` of our `state_of`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch

from everystep_study.frameworks.api import Framework
from everystep_study.frameworks.torch_training import TorchTraining
from everystep_study.mechanisms.mechanism import EverystepOverlap, EverystepSync, Mechanism


class AccelerateTraining(TorchTraining):
    def __init__(self, model: str, quick: bool, seed: int) -> None:
        self.accelerator: Any = None
        super().__init__(model, quick, seed)
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        if self.accelerator is None:
            super().backward(loss)
        else:
            self.accelerator.backward(loss)

    def everystep_state(self, weights_only: bool) -> object:
        from everystep.integrations.accelerate import state_of

        return state_of(self.accelerator, self.model)


class SaveState(Mechanism):
    """`Accelerator.save_state`: model, optimizer, random numbers, each in a file of its own."""

    key, title = "save-state", "accelerate, save_state"
    weights_only_possible = False
    subject: AccelerateTraining

    def write(self, target: Path) -> None:
        self.subject.accelerator.save_state(str(target))

    def load(self) -> None:
        self.subject.accelerator.load_state(str(self.path))


FRAMEWORK = Framework(
    packages={"accelerate": "accelerate", "torch": "torch"},
    training=AccelerateTraining,
    mechanisms=(SaveState, EverystepSync, EverystepOverlap),
)
