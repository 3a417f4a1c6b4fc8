"""Training that is fully sharded (FSDP2) and tensor parallel, and resumes on a mesh of any other shape.

    torchrun --nproc-per-node 4 examples/fsdp2_tp.py runs/fsdp2            # 2 x 2: sharded x tensor parallel

Stop it and go on with another mesh, or with another number of ranks:

    torchrun --nproc-per-node 4 examples/fsdp2_tp.py runs/fsdp2 --tp 1     # 4 x 1: sharded only
    torchrun --nproc-per-node 2 examples/fsdp2_tp.py runs/fsdp2 --tp 2     # 1 x 2: tensor parallel only

Every rank writes the shards it owns, as they lie in its memory; nothing is gathered. A rank that resumes
reads the boxes it needs, whatever mesh wrote them. Needs torch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from small_transformer import Text, Transformer, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everystep

PLAN = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def main(run: str, steps: int, tp: int) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    if world % tp:
        raise SystemExit(f"--tp {tp} does not divide {world} ranks")
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("data", "tensor"))
    text = Text()
    torch.manual_seed(0)
    model = Transformer(len(text.alphabet))
    for block in model.blocks:
        if tp > 1:
            parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    # Some weights lie on both dimensions of the mesh, some on one: no single kernel updates them all.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

    with everystep.Checkpointer(run, {"model": model, "optimizer": optimizer}) as ckpt:
        completed = ckpt.restore()
        if dist.get_rank() == 0:
            print(
                f"{completed} steps were already completed; a mesh of {tuple(mesh.shape)} goes on", flush=True
            )
        for step in range(completed, steps):
            # Ranks that are tensor parallel to each other see the same data.
            loss = loss_of(model, text.batch(step, mesh.get_local_rank("data")))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(step + 1, metrics={"loss": loss.item()})
            if dist.get_rank() == 0:
                durable = ckpt.last_durable
                print(f"step {step + 1}: loss {loss.item():.3f}, durable up to step {durable}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/fsdp2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--tp", type=int, default=2, help="ranks that share each layer; must divide their number"
    )
    arguments = parser.parse_args()
    main(arguments.run, arguments.steps, arguments.tp)
