"""DCP directories of FSDP2 and tensor parallelism, read straight into another layout on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everystep
from support.processes.counted_reads import counted_reads
from support.worlds.launcher import launch, values


class Net(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, 26)
        self.up = nn.Linear(26, 54)
        self.down = nn.Linear(54, 26)
        self.norm = nn.LayerNorm(26)


def spread(kind: str) -> nn.Module:
    torch.manual_seed(7)
    model = Net()
    world = dist.get_world_size()
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    shape, names = ((world // 2, 2), ("shard", "tensor")) if kind == "fsdp2_tp" else ((world,), (kind,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind != "fsdp2":
        plan = {"embedding": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh[names[-1]], plan)
    if kind != "tp":
        fully_shard(model, mesh=mesh[names[0]])
    return model


def step(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """One step with gradients that depend on the seed alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (seed + number + 0.5)
    optimizer.step()
    return optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": whole(value).clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, held in optimizer.state.items():
        for key, value in held.items():
            found[f"{names[id(parameter)]}.{key}"] = whole(value).clone()
    return found


def save(path: str, kind: str) -> None:
    model = spread(kind)
    optimizer = step(model, 1)
    if kind == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
        ):
            weights = model.state_dict()
        states: Any = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    else:
        weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{path}/dcp")
    if kind != "fsdp1":
        truth = full_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(truth, f"{path}/truth.pt")


def load(path: str, kind: str) -> tuple[int, int]:
    """The bytes that this rank read, and all that the checkpoint has."""
    model = spread(kind)
    optimizer = step(model, 9)
    with counted_reads() as sizes:
        everystep.load(f"{path}/dcp", into={"model": model, "optimizer": optimizer})
    truth = torch.load(f"{path}/truth.pt")
    found = full_state(model, optimizer)
    assert set(found) == set(truth)
    for name, value in truth.items():
        assert torch.equal(found[name], value), name
    assert optimizer.param_groups[0]["lr"] == 0.1
    return sum(sizes), sum(tensor.nbytes for tensor in truth.values())


def check(tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]) -> None:
    values(launch(saved[0], save, str(tmp_path), saved[1]))
    found = values(launch(loaded[0], load, str(tmp_path), loaded[1]))
    total = found[0][1]
    # Rows are read once, by the ranks that need them. Columns lie in pieces, which are read in their rows.
    assert total <= sum(nbytes for nbytes, _ in found) <= (1.0 if loaded[1] == "fsdp2" else 2.0) * total
    assert max(nbytes for nbytes, _ in found) < 0.75 * total


def test_fsdp2_with_tensor_parallelism_on_four_ranks_loads_on_two(tmp_path: Path) -> None:
    check(tmp_path, (4, "fsdp2_tp"), (2, "fsdp2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, "fsdp2"), (4, "fsdp2_tp")),
        ((2, "tp"), (3, "fsdp2")),
        ((3, "fsdp2"), (2, "tp")),
        ((4, "tp"), (2, "fsdp2")),
    ],
)
def test_other_layouts(tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]) -> None:
    check(tmp_path, saved, loaded)


@pytest.mark.slow
def test_sharded_tensors_of_fsdp1(tmp_path: Path) -> None:
    values(launch(2, save, str(tmp_path), "fsdp1"))
    model = Net()
    everystep.load(tmp_path / "dcp", into={"model": model}, strict=False)
    torch.manual_seed(7)
    truth = Net()
    step(truth, 1)
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
