"""Trainings on several real ranks, and a checkpoint of them in memory: what all ranks flattened, joined."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from everystep.plan.fragments import mesh_placement
from everystep.plan.placement import LeafLayout, holding
from everystep.state import LeafMeta, flatten
from everystep.state.merging import merge_trees
from support.states.memory_store import Saved, read, through_json
from support.worlds.peerless_meshes import restore_parts, slices

_BITS = {"F32": np.uint32, "I64": np.int64}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 5)
        self.head = nn.Linear(5, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(x)).relu()))  # type: ignore[no-any-return]


LAYOUTS = ("plain", "ddp", "zero", "fsdp2", "tp", "fsdp1", "fsdp1 flat", "fsdp1 on a mesh")


def training(layout: str, seed: int) -> dict[str, Any]:
    """A model and an optimizer without state, laid out over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(seed)
    model: Any = Net()
    world = dist.get_world_size()
    if layout in ("ddp", "zero"):
        model = DistributedDataParallel(model)
    elif layout == "fsdp2":
        fully_shard(model.down, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif layout.startswith("fsdp1"):
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=layout != "fsdp1 flat",
            device_id=torch.device("cpu"),
            device_mesh=init_device_mesh("cpu", (world,)) if layout == "fsdp1 on a mesh" else None,
        )
    if layout == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def step(state: dict[str, Any], layout: str) -> None:
    """One step, the same on all ranks: what is said to be replicated must be."""
    if layout == "tp":  # only its state matters here, not how the layers fit together
        for parameter in state["model"].parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    else:
        torch.manual_seed(11)
        state["model"](torch.randn(4, 6)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def checkpoint(state: object) -> Saved:
    """The state of all ranks, whole, as if read from one checkpoint. Every rank has it."""
    flat = flatten(state, dist.get_rank())
    mine = [
        (leaf.name, leaf.dtype, leaf.shape, leaf.whole_shape, leaf.sharding, read(leaf.source))
        for leaf in flat.leaves
    ]
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, (through_json(flat.tree), mine, flat.aliases))
    metas: dict[str, LeafMeta] = {}
    wholes: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for rank, (_, leaves, aliases) in enumerate(views):
        assert aliases == views[0][2]
        for name, dtype, shape, whole_shape, sharding, data in leaves:
            meta = LeafMeta(name, dtype, whole_shape, "torch")
            assert metas.setdefault(name, meta) == meta
            whole = wholes.setdefault(name, np.zeros(whole_shape, _BITS[dtype]))
            seen = known.setdefault(name, np.zeros(whole_shape, bool))
            local = np.frombuffer(data, whole.dtype).reshape(shape)
            for at, here in _pieces(sharding, whole_shape, rank):
                assert np.array_equal(whole[at][seen[at]], local[here][seen[at]]), f"{name}: replicas differ"
                whole[at], seen[at] = local[here], True
    for name, seen in known.items():
        assert seen.all(), f"{name} is not complete"
    tree = merge_trees([view[0] for view in views])
    return Saved(tree, metas, dict(views[0][2]), {name: whole.tobytes() for name, whole in wholes.items()})


def _pieces(sharding: Any, shape: tuple[int, ...], rank: int) -> list[tuple[Any, Any]]:
    if sharding is None:
        return [(..., ...)]
    if sharding.mesh_shape is None:
        return [(slices(sharding.box), ...)]
    placement = mesh_placement(sharding)
    coordinate = placement.mesh.coordinate(rank)
    assert coordinate is not None
    found = holding(LeafLayout("x", "F32", shape, (placement,)), placement, coordinate)
    return [(slices(piece.box), slices(piece.local)) for piece in found.pieces()]


def resume(state: object, saved: Saved) -> Any:
    wholes = {
        name: np.frombuffer(saved.data[name], _BITS[meta.dtype]).reshape(meta.shape)
        for name, meta in saved.leaves.items()
    }
    return restore_parts(state, saved, wholes, dist.get_rank(), shared=True)


def from_layout_to_layouts(source: str, targets: tuple[str, ...]) -> list[str]:
    """What went wrong when each of the layouts resumed from a training of `source`, on this rank."""
    warnings.simplefilter("ignore")
    first = training(source, seed=1)
    step(first, source)
    saved = checkpoint(first)
    wrong: list[str] = []
    for target in targets:
        for fresh in (True, False) if source == "plain" else (True,):
            state = training(target, seed=2)
            if not fresh:
                step(state, target)
            state["optimizer"].param_groups[0]["lr"] = 7.0
            made = resume(state, saved)
            again = checkpoint(state)
            what = f"{source} -> {target} ({'fresh' if fresh else 'used'})"
            if again.leaves != saved.leaves:
                wrong.append(f"{what}: other leaves {set(again.leaves) ^ set(saved.leaves)}")
            wrong += [f"{what}: {name}" for name, data in saved.data.items() if again.data.get(name) != data]
            if state["optimizer"].param_groups[0]["lr"] != 0.1:
                wrong.append(f"{what}: the learning rate is {state['optimizer'].param_groups[0]['lr']}")
            if bool(made.elsewhere) != (target == "zero"):
                wrong.append(f"{what}: elsewhere {made.elsewhere}")
            step(state, target)  # it can go on
    return wrong


def ties_under_fsdp1(use_orig_params: bool) -> list[dict[str, str]]:
    """Second names of weights and their first ones, of a module by itself and wrapped, on this rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")
    inner = nn.Sequential(nn.Linear(6, 6))
    model: Any = nn.ModuleDict({"up": nn.Linear(6, 6), "inner": checkpoint_wrapper(inner)})
    inner[0].weight = model["up"].weight
    plain = dict(flatten({"model": model}).aliases)
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    outer = nn.ModuleDict({"inside": wrapped})
    return [
        plain,
        dict(flatten({"model": wrapped}, dist.get_rank()).aliases),
        {
            name.replace(".inside", ""): first.replace(".inside", "")
            for name, first in flatten({"model": outer}, dist.get_rank()).aliases
        },
    ]
