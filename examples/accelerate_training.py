"""accelerate with a durable checkpoint after every step. Needs: pip install 'everystep[accelerate]'

    python examples/accelerate_training.py runs/accelerate     # or, with two ranks:
    torchrun --nproc-per-node 2 examples/accelerate_training.py runs/accelerate

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import everystep
from everystep.integrations.accelerate import state_of
from everystep.integrations.data import Loader


def main(run: str, epochs: int) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    # Not through `prepare`, which would give every rank all batches: it knows its rank itself.
    rank, world = accelerator.process_index, accelerator.num_processes
    loader = Loader(data, batch_size=16, shuffle=True, seed=2, rank=rank, world=world)
    accelerator.register_for_checkpointing(loader)
    set_seed(4, device_specific=True)

    with everystep.Checkpointer(run, state_of(accelerator, model)) as ckpt:  # the one line
        step = ckpt.restore()
        while step < epochs * len(loader):
            for batch in loader:
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                ckpt.save(step)
    accelerator.print(f"step {step}: weights sum to {sum(p.sum().item() for p in model.parameters())}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, default=2)
    main(**vars(parser.parse_args()))
