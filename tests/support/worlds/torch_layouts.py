"""A model, and the ways that torch knows to lay it out over processes.

The model is small, odd and has what makes trouble: sizes that no number of ranks divides, a parameter of one
element (most ranks have nothing of it), a tied embedding, buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, VOCABULARY, BLOCKS = 13, 30, 31, 3


# --- the model ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale.to(x.dtype)
        return found


class Model(nn.Module):
    """Blocks are in a dict: a stage of a pipeline can do without some, and the others keep their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("tokens", torch.zeros(3, dtype=torch.int64))
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x)) * self.temperature
        return found


# --- layouts ------------------------------------------------------------------------------------------------


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return _meshes(dist.get_world_size(), shape, names)


@functools.cache
def _meshes(world: int, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _plain(model: Model) -> nn.Module:
    return model


def _ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def _fully(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _fsdp2(model: Model) -> nn.Module:
    return _fully(model, _mesh((dist.get_world_size(),), ("shard",)))


def _fsdp2_columns(model: Model) -> nn.Module:
    """Some matrices are cut by columns."""

    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] == HIDDEN else None

    return _fully(model, _mesh((dist.get_world_size(),), ("shard",)), shard_placement_fn=columns)


def _hsdp(model: Model) -> nn.Module:
    return _fully(model, _mesh((2, dist.get_world_size() // 2), ("replicate", "shard")))


def _tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(),
        "head": ColwiseParallel(),
        "norm": SequenceParallel(),  # replicated DTensors; the norms in the blocks stay plain tensors
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    model.tie()
    return model


def _tp(model: Model) -> nn.Module:
    return _tensor_parallel(model, _mesh((dist.get_world_size(),), ("tensor",)))


def _tp_copies(model: Model) -> nn.Module:
    """Each copy of the model knows only the mesh of its own ranks."""
    mesh = _mesh((2, 2), ("copies", "tensor"))
    return _tensor_parallel(model, mesh["tensor"])


def _fsdp2_tp(model: Model) -> nn.Module:
    mesh = _mesh((2, 2), ("shard", "tensor"))
    return _fully(_tensor_parallel(model, mesh["tensor"]), mesh["shard"])


def _three(model: Model) -> nn.Module:
    mesh = _mesh((2, 1, 2), ("replicate", "shard", "tensor"))
    return _fully(_tensor_parallel(model, mesh["tensor"]), mesh["replicate", "shard"])


def _pipeline(*stages: tuple[str, ...]) -> Callable[[Model], nn.Module]:
    """Each rank keeps one stage. The last goes back to rank 0, which so has both ends of the tied weight."""

    def cut(model: Model) -> nn.Module:
        mine = stages[dist.get_rank()]
        for name in [name for name in model.blocks if name not in mine]:
            del model.blocks[name]
        if "norm" not in mine:
            del model.norm
        if dist.get_rank() > 0:
            del model.embedding, model.head, model.temperature, model.tokens
        return model

    return cut


def _fsdp1(model: Model) -> nn.Module:
    return FSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=_mesh((dist.get_world_size(),), ("shard",)),
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to lay a training out over `world` processes."""

    name: str
    world: int
    spread: Callable[[Model], nn.Module] = field(repr=False)
    zero: bool = False
    """The optimizer's state is divided among the ranks, the model's is not."""
    usual: bool = True
    """Whether it is in the table of every test run; the others are in that of `-m slow`."""


LAYOUTS = (
    Layout("one process", 1, _plain),
    Layout("DDP 2", 2, _ddp),
    Layout("FSDP2 2", 2, _fsdp2_columns),
    Layout("TP 2", 2, _tp),
    Layout("pipeline 2", 2, _pipeline(("0",), ("1", "2", "norm"))),
    Layout("ZeRO 2", 2, _ddp, zero=True),
    Layout("FSDP1 2", 2, _fsdp1),
    Layout("DDP 3", 3, _ddp, usual=False),
    Layout("FSDP2 3", 3, _fsdp2, usual=False),
    Layout("pipeline 3", 3, _pipeline(("0", "1"), ("2",), ("norm",)), usual=False),
    Layout("DDP 4", 4, _ddp, usual=False),
    Layout("FSDP2 4", 4, _fsdp2, usual=False),
    Layout("HSDP 2x2", 4, _hsdp, usual=False),
    Layout("FSDP2xTP 2x2", 4, _fsdp2_tp),
    Layout("DDPxTP 2x2", 4, _tp_copies, usual=False),
    Layout("HSDPxTP 2x1x2", 4, _three, usual=False),
)
