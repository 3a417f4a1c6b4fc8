"""A training loop that can be stopped at any moment and started again. Needs torch.

    python examples/train_and_resume.py runs/line

Stop it with Ctrl-C (or kill -9) and start it again: it goes on after the last step it finished.
"""

from __future__ import annotations

import sys

import torch

import holdfast


def main(run: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}

    with holdfast.Checkpointer(run, state, mode="sync", keep=holdfast.Keep(last=3)) as checkpointer:
        completed = checkpointer.restore()
        print(f"{completed} steps were already completed")
        for step in range(completed, 2_000):
            # The batch follows from the step alone, so a resumed run sees what an undisturbed one would see.
            x = torch.rand(128, 1, generator=torch.Generator().manual_seed(step))
            loss = torch.nn.functional.mse_loss(model(x), torch.sin(6 * x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.save(step + 1, metrics={"loss": loss.item()})
            if (step + 1) % 100 == 0:
                print(f"step {step + 1}: loss {loss.item():.5f}, durable")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/line")
