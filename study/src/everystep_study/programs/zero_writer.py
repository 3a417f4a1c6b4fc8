"""Run by torchrun in DeepSpeed's own environment: trains a model for a step and saves it with ZeRO.

It must not import everystep: that environment does not have it.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch  # noqa: TID253  (a script of another environment)

VOCABULARY = 24576


class Block(torch.nn.Module):
    """The shapes of a transformer's block, without its attention: only the sizes matter here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj(torch.sigmoid(q * k) * v)
        y: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + y


class Model(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.h = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.h:
            x = block(x)
        return torch.nn.functional.linear(self.norm(x), self.embedding.weight[:256]).logsumexp(-1).mean()


def main(directory: str, stage: int, width: int, layers: int) -> None:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = Model(width, layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.randint(0, VOCABULARY, (1, 8))))
    engine.step()
    engine.save_checkpoint(directory, tag="global_step1")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
