"""A torch training with a planted mistake: dropout draws from a generator that is not in the state.

    python dropout.py RUN [--steps 40] [--by-hand] [--remember]

Undisturbed it is deterministic, since it is seeded. Resumed, it begins to draw from the seed again, and the
weights go another way. `--remember` puts it right. `--by-hand` does without an optimizer.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import everystep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/dropout")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--remember", action="store_true")
    options = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.BatchNorm1d(64), nn.Linear(64, 1))
    state: dict[str, Any] = {"model": model}
    if not options.by_hand:
        optimizer = torch.optim.Adam(model.parameters())
        state["optimizer"] = optimizer
    if options.remember:
        state["rng"] = everystep.rng()
    with everystep.Checkpointer(options.run, state) as ckpt:
        for step in range(ckpt.restore(), options.steps):
            # The batch follows from the step alone: the data are not the mistake here.
            inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            model.zero_grad()
            loss.backward()
            if options.by_hand:
                with ckpt.update(), torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1e-3 * parameter.grad
            else:
                optimizer.step()
            ckpt.save(step + 1, metrics={"loss": loss.item()})


if __name__ == "__main__":
    main()
