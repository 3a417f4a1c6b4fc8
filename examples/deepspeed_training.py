"""DeepSpeed with a durable checkpoint after every step. Needs: pip install 'everystep[deepspeed]'

    python examples/deepspeed_training.py runs/deepspeed     # or, with two ranks:
    torchrun --nproc-per-node 2 examples/deepspeed_training.py runs/deepspeed

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import set_random_seed
from torch import nn

import everystep
from everystep.integrations.data import Loader
from everystep.integrations.deepspeed import state_of


def main(run: str, stage: int) -> None:
    os.environ.setdefault("LOCAL_RANK", "0")
    if "RANK" not in os.environ:  # started without torchrun or deepspeed
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed()
    set_random_seed(3)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    rank, world = engine.global_rank, engine.world_size
    data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)).to(engine.device)
    loader = Loader(data, batch_size=16, shuffle=True, seed=2, rank=rank, world=world)
    set_random_seed(4 + rank)

    with everystep.Checkpointer(run, state_of(engine, data=loader)) as ckpt:  # the one line
        step = ckpt.restore()
        while step < 2 * len(loader):
            for batch in loader:
                engine.backward((engine(batch) - batch.sum(1, keepdim=True)).square().mean())
                engine.step()
                step += 1
                ckpt.save(step)
    print(f"rank {rank}, step {step}: weights sum to {sum(p.sum().item() for p in net.parameters())}")
    engine.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/deepspeed")
    parser.add_argument("--stage", type=int, default=1)
    main(**vars(parser.parse_args()))
