"""A training that can be stopped at any moment and started again, as if nothing had happened. Needs torch.

    python examples/train_and_resume.py runs/wave

Stop it with Ctrl-C and start it again: it goes on after the last step it saved. After kill -9 that may be the
one before, if its save was still under way. All that the next step depends on is in the state: weights,
optimizer, learning rate, the place in the data, and the random numbers that dropout draws. So the end is the
same, bit for bit, however often it was stopped. To see that:

    everystep drill -- python examples/train_and_resume.py
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import everystep
from everystep.integrations.data import Loader


def forever(loader: Loader) -> Iterator[Any]:
    """Epoch after epoch; the first may be the rest of one that was interrupted."""
    while True:
        yield from loader


def main(run: str, steps: int) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    x = torch.rand(4096, 1)
    y = torch.sin(6 * x) + 0.1 * torch.randn_like(x)
    loader = Loader(torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader,
        "rng": everystep.rng(),
    }

    with everystep.Checkpointer(run, state, keep=everystep.Keep(last=3)) as ckpt:
        completed = ckpt.restore()
        print(f"{completed} steps were already completed")
        for step, (inputs, targets) in zip(range(completed, steps), forever(loader), strict=False):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.save(step + 1, metrics={"loss": loss.item()})
            if (step + 1) % 100 == 0:
                print(f"step {step + 1}: loss {loss.item():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/wave")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    main(arguments.run, arguments.steps)
