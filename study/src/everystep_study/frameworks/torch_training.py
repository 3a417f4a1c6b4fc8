"""Trainings in PyTorch: those of the study, and the GPT-2 that ``everystep bench --training`` trains."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from everystep_study.frameworks import torch_models
from everystep_study.frameworks.api import Arrays, Training
from everystep_study.frameworks.models import Gpt, Size, size_of
from everystep_study.mechanisms.states import Gpt2, Load
from everystep_study.mechanisms.torch_mechanisms import flatten

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""

SEQUENCE = 128
LARGEST_BATCH = 256
# From malloc.h, and what glibc starts with.
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD = -1, 128 << 10
_M_MMAP_MAX, _MMAP_MAX = -4, 65536


class TorchTraining(Training):
    def __init__(self, model: str, quick: bool, seed: int) -> None:
        self._make(size_of(model, quick), seed)
        self.step()  # makes the optimizer's state

    def _make(self, size: Size, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.optimizer, self._batch = torch_models.build(size, seed)

    def step(self) -> float:
        loss = torch_models.loss_of(self.model, self._batch)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def weights(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}

    def optimizer_arrays(self) -> Arrays:
        found = flatten({"state": self.optimizer.state_dict()["state"]})
        return {name: tensor.numpy() for name, tensor in found}

    def set_weights(self, arrays: Arrays) -> None:
        live = self.model.state_dict()
        for name, array in arrays.items():
            live[name].copy_(torch.from_numpy(array))

    def everystep_state(self, weights_only: bool) -> object:
        return {"model": self.model} if weights_only else {"model": self.model, "optimizer": self.optimizer}

    def tree(self, weights_only: bool = False) -> dict[Any, Any]:
        model: dict[Any, Any] = {"model": self.model.state_dict()}
        return model if weights_only else {**model, "optimizer": self.optimizer.state_dict()}

    def put(self, tree: Mapping[str, Any]) -> None:
        self.model.load_state_dict(tree["model"])
        if "optimizer" in tree:
            self.optimizer.load_state_dict(tree["optimizer"])

    def put_flat(self, found: Mapping[str, torch.Tensor]) -> None:
        live = dict(flatten(self.tree()))
        for name, tensor in found.items():
            live[name].copy_(tensor)


class Trainer(TorchTraining):
    """A GPT-2 in plain eager torch on made-up tokens, for all that take turns with it."""

    def __init__(self, shape: Gpt2, seed: int = 0) -> None:
        self.shape = shape
        self.steps = 0
        """Steps completed, whichever mechanism they were measured with."""
        self._generator = torch.Generator().manual_seed(seed)
        self._make(Gpt(shape.layers, shape.width, shape.vocabulary), seed)

    def tree(self, weights_only: bool = False) -> dict[Any, Any]:
        return {**super().tree(weights_only), "step": self.steps}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, the live ones."""
        return dict(flatten(self.tree()))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def grow(self, nbytes: int) -> None:
        """Add that much to the state and nothing to the computing, as layers that fine-tuning freezes."""
        frozen = torch.nn.Parameter(torch.randn(nbytes // 4, generator=self._generator))
        assert isinstance(self.model, torch.nn.ModuleDict)
        self.model[f"frozen_{len(self.model)}"] = torch.nn.ParameterList([frozen])
        # It never gets a gradient, so the optimizer passes it over; it is the optimizer's all the same.
        self.optimizer.add_param_group({"params": [frozen]})

    def draw(self, load: Load) -> Batch:
        """Any tokens do: what they mean has no part in how long a step takes."""
        size = (load.batch, load.sequence + 1)
        tokens = torch.randint(self.shape.vocabulary, size, generator=self._generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def forward_backward(self, batch: Batch) -> None:
        self.backward(torch_models.loss_of(self.model, batch))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def seconds_of_step(self, load: Load) -> float:
        """One step without any checkpoint."""
        batch = self.draw(load)
        begin = time.perf_counter()
        self.forward_backward(batch)
        self.update()
        return time.perf_counter() - begin


def calibrate(trainer: Trainer, seconds: float, sequence: int = SEQUENCE, most: int = LARGEST_BATCH) -> Load:
    """The batch with which a step takes about `seconds` here.

    A step has a part that grows with the tokens and one that does not (the optimizer, the gradients of the
    embedding), so two sizes are timed and a line is drawn through them.
    """

    def timed(batch: int) -> float:
        return min(trainer.seconds_of_step(Load(batch, sequence)) for _ in range(2))

    trainer.seconds_of_step(Load(1, sequence))  # the first step makes the moments and the thread pools
    few, more = 1, 4
    one, other = timed(few), timed(more)
    slope = max((other - one) / (more - few), 1e-6)
    return Load(round(min(max(few + (seconds - one) / slope, 1), most)), sequence)


@contextmanager
def kept_memory() -> Iterator[None]:
    """What a step frees stays with the process for the next one, as with the allocators of long trainings.

    glibc gives large blocks back to the kernel at once, so that each step faults in its activations and
    gradients again: a sixth of its time on a small machine, and the least steady part of it where the memory
    of the machine itself comes and goes (`ReservedMemory`). It holds for all mechanisms alike.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    try:
        yield
    finally:
        mallopt(_M_MMAP_MAX, _MMAP_MAX)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
