"""The training that the training suite measures: a GPT-2 in plain eager torch, on made-up tokens.

Owns the model, the optimizer, and how large a batch must be for a step to take as long as wanted. Checkpoints
are left to `peers.training`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everystep_study.states import Gpt2, fit_gpt2

if TYPE_CHECKING:
    import torch

Batch = tuple["torch.Tensor", "torch.Tensor"]
"""Token numbers, and those that follow them."""

HEAD_WIDTH = 64
CONTEXT = 1024
SEQUENCE = 128
LARGEST_BATCH = 256
# From malloc.h, and what glibc starts with.
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD = -1, 128 << 10
_M_MMAP_MAX, _MMAP_MAX = -4, 65536

_ADAM_NBYTES = 12
"""Of one parameter: the weight and Adam's two moments, all fp32."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much one step computes."""

    batch: int
    sequence: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.sequence < 1:
            raise ValueError(
                f"a step computes at least one token, not a batch of {self.batch} x {self.sequence}"
            )
        if self.sequence > CONTEXT:
            raise ValueError(f"GPT-2 sees {CONTEXT} tokens at most, not a sequence of {self.sequence}")

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def shape_of(nbytes: int, layers: int | None = None, width: int | None = None) -> Gpt2:
    """The GPT-2 whose weights and Adam moments come to `nbytes`; the vocabulary takes what the rest leaves.

    Without `layers` and `width` it is the one that `everystep bench` saves. With one of them the other
    follows GPT-2's rule, 64 of width per layer.
    """
    if layers is None and width is None:
        return fit_gpt2(nbytes)
    layers = layers if layers is not None else max(1, (width or 0) // HEAD_WIDTH)
    width = width if width is not None else HEAD_WIDTH * layers
    if layers < 1:
        raise ValueError(f"a model has at least one layer, not {layers}")
    if width < HEAD_WIDTH or width % HEAD_WIDTH:
        raise ValueError(f"the width is a multiple of the head's, {HEAD_WIDTH}, not {width}")
    rest = Gpt2(width, layers, 0).parameters
    vocabulary = (nbytes // _ADAM_NBYTES - rest) // width
    if vocabulary < 2:
        needed = _ADAM_NBYTES * (rest + 2 * width) / (1 << 20)
        raise ValueError(
            f"{layers} layers of width {width} with Adam take {needed:.0f} MiB: give more --size"
        )
    return Gpt2(width, layers, vocabulary)


class Trainer:
    """One model and its optimizer, for all that take turns with it."""

    def __init__(self, shape: Gpt2, seed: int = 0) -> None:
        import torch

        torch.manual_seed(seed)
        self.shape = shape
        self.model = build(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.steps = 0
        """Steps completed, whoever took them."""
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def state(self) -> dict[str, object]:
        """What is checkpointed, as a user would name it."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, the live ones."""
        return dict(flatten({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def grow(self, nbytes: int) -> None:
        """Add that much to the state and nothing to the computing, as layers that fine-tuning freezes."""
        import torch

        frozen = torch.nn.Parameter(torch.randn(nbytes // 4, generator=self._generator))
        self.model[f"frozen_{len(self.model)}"] = torch.nn.ParameterList([frozen])
        # It never gets a gradient, so the optimizer passes it over; it is the optimizer's all the same.
        self.optimizer.add_param_group({"params": [frozen]})

    def draw(self, load: Load) -> Batch:
        """Any tokens do: what they mean has no part in how long a step takes."""
        import torch

        tokens = torch.randint(
            self.shape.vocabulary, (load.batch, load.sequence + 1), generator=self._generator
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def forward_backward(self, batch: Batch) -> None:
        loss_of(self.model, *batch).backward()  # type: ignore[no-untyped-call]

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
    of the machine itself comes and goes (`ReservedMemory`). It holds for all systems alike.
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


def build(shape: Gpt2) -> torch.nn.ModuleDict:
    """GPT-2's parameters by GPT-2's names; the output shares the weight of the input embedding, as there."""
    from torch import nn

    width = shape.width

    def embedding(count: int) -> nn.Embedding:
        made = nn.Embedding(count, width)
        nn.init.normal_(made.weight, std=0.02)
        return made

    blocks = nn.ModuleList(
        nn.ModuleDict(
            {
                "ln_1": nn.LayerNorm(width),
                "c_attn": nn.Linear(width, 3 * width),
                "attn_proj": nn.Linear(width, width),
                "ln_2": nn.LayerNorm(width),
                "c_fc": nn.Linear(width, 4 * width),
                "mlp_proj": nn.Linear(4 * width, width),
            }
        )
        for _ in range(shape.layers)
    )
    model = nn.ModuleDict(
        {
            "wte": embedding(shape.vocabulary),
            "wpe": embedding(CONTEXT),
            "h": blocks,
            "ln_f": nn.LayerNorm(width),
        }
    )
    return model


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch
    from torch.nn import functional

    count, length = inputs.shape
    hidden = model["wte"](inputs) + model["wpe"](torch.arange(length))
    width = hidden.shape[-1]
    for block in model["h"]:
        mixed = block["c_attn"](block["ln_1"](hidden))
        query, key, value = (
            part.view(count, length, -1, HEAD_WIDTH).transpose(1, 2) for part in mixed.split(width, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + block["attn_proj"](seen.transpose(1, 2).reshape(count, length, width))
        wide = functional.gelu(block["c_fc"](block["ln_2"](hidden)), approximate="tanh")
        hidden = hidden + block["mlp_proj"](wide)
    logits = functional.linear(model["ln_f"](hidden), model["wte"].weight)
    loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss


def flatten(tree: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts, by their path; what is no tensor is left out."""
    import torch

    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
