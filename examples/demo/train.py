"""The training of the demo: a small character model, with a durable checkpoint after every step.

    python examples/demo/train.py RUN --steps 30 [--kill-at 17]

It runs as a process of its own, so that it can be killed, and prints one JSON line per step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import everystep
from everystep.engine import faults

BOOK = Path(__file__).with_name("keepers-book.txt")
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 96, 4, 3


class Batches:
    """Random windows of the text. It can go on where it stopped."""

    def __init__(self, text: str, seed: int) -> None:
        self.alphabet = sorted(set(text))
        self._text = torch.tensor([self.alphabet.index(character) for character in text])
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class Model(nn.Module):
    """A decoder-only transformer; output and input embedding share one weight."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
        self.token = nn.Embedding(characters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.token(inputs) + self.place(torch.arange(CONTEXT))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def digest_of(*states: object) -> str:
    """SHA-256 over every tensor byte and every plain value in live memory, without any part of Everystep."""
    total = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, torch.Tensor):
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, inner in value.items():
                total.update(repr(key).encode())
                feed(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                feed(inner)
        else:
            total.update(repr(value).encode())

    feed(states)
    return total.hexdigest()


def train(run: Path, steps: int, kill_at: int | None) -> None:
    """Trains up to `steps`, resuming from `run`; with `kill_at`, dies inside that step's save."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    batches = Batches(BOOK.read_text("utf-8"), seed=0)
    model = Model(len(batches.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = {"model": model, "optimizer": optimizer, "data": batches, "rng": everystep.rng()}

    with everystep.Checkpointer(run, state, mode="sync") as ckpt:
        completed = ckpt.restore()
        tell(started_after=completed)
        for step in range(completed + 1, steps + 1):
            inputs, targets = batches.draw()
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == kill_at:
                # The first sync of the save ends this process with SIGKILL: data is written, none is durable.
                faults.install(faults.Fault("sync", 1, "kill"))
            ckpt.save(step, metrics={"loss": loss.item()})
            tell(step=step, loss=loss.item())
    tell(digest=digest_of(model.state_dict(), optimizer.state_dict(), batches.state_dict()))


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=train.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    train(arguments.run, arguments.steps, arguments.kill_at)
