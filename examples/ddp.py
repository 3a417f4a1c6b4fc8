"""Data-parallel training on any number of ranks, with a checkpoint after every step. Needs torch.

    torchrun --nproc-per-node 4 examples/ddp.py runs/ddp

Stop it at any moment (Ctrl-C, kill -9 of any process) and start it again, also with another number of ranks:

    torchrun --nproc-per-node 2 examples/ddp.py runs/ddp

All ranks hold the same weights and the same optimizer state. Each writes its share of the bytes, together one
copy. Random numbers are each rank's own: they go back to the rank of the same number.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from small_transformer import Text, Transformer, loss_of
from torch.nn.parallel import DistributedDataParallel

import everystep


def main(run: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = Text()
    torch.manual_seed(0)
    model = Transformer(len(text.alphabet), dropout=0.1)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # every rank drops others

    # The wrapper: names are those of the module inside, and of buffers (BatchNorm) rank 0's are stored.
    state = {"model": parallel, "optimizer": optimizer, "rng": everystep.per_rank(everystep.rng())}
    with everystep.Checkpointer(run, state) as ckpt:
        completed = ckpt.restore()
        if rank == 0:
            print(
                f"{completed} steps were already completed; {dist.get_world_size()} ranks go on", flush=True
            )
        for step in range(completed, steps):
            loss = loss_of(parallel, text.batch(step, rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(step + 1, metrics={"loss": loss.item()})
            if rank == 0:
                durable = ckpt.last_durable
                print(f"step {step + 1}: loss {loss.item():.3f}, durable up to step {durable}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/ddp")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    main(arguments.run, arguments.steps)
