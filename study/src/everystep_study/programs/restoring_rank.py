"""Run by torchrun: ranks fill their shards from a ZeRO checkpoint, straight or after a conversion.

    restoring_rank.py SOURCE RESULT [CONVERTED]

Rank 0 writes the seconds of the slowest rank to RESULT. With CONVERTED, rank 0 converts to there first.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def main(source: str, result: str, converted: str | None = None) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, empty

    import everystep

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(leaf: Any) -> DTensor:
        return empty(*leaf.shape, device_mesh=mesh, placements=[Shard(0)])

    model: dict[str, DTensor] = {}
    state: dict[str, dict[str, DTensor]] = {}
    with everystep.open(source) as checkpoint:
        for name in checkpoint.leaves:
            place, _, rest = name.partition(".")
            parameter, _, key = rest.rpartition(".")
            if place == "model":
                model[rest] = shard(checkpoint[name])
            elif key in ("exp_avg", "exp_avg_sq"):
                state.setdefault(parameter, {})[key] = shard(checkpoint[name])
    into = {"model": model, "optimizer": {"state": state}}
    for tensor in (*model.values(), *(one for each in state.values() for one in each.values())):
        tensor.to_local().fill_(float("nan"))  # memory that is in use, as that of a training is
    dist.barrier()
    began = time.perf_counter()
    if converted is not None:
        if dist.get_rank() == 0:
            everystep.universal.convert(source, converted)
        dist.barrier()
    everystep.load(converted or source, into=into, strict=False)
    dist.barrier()
    seconds = time.perf_counter() - began
    for leaves in (model, *state.values()):
        for name, tensor in leaves.items():
            if torch.isnan(tensor.to_local()).any():
                raise RuntimeError(f"{name} was not filled")
    if dist.get_rank() == 0:
        Path(result).write_text(repr(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4])
