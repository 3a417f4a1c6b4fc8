"""Trainings laid out over processes in all the ways torch knows, and what each part of them must be.

The model is small, odd and has what makes trouble: sizes that no number of ranks divides, a parameter of one
element (most ranks have nothing of it), a tied embedding, buffers, groups with hyperparameters of their own.

The truth is random *bits*, NaNs included, computed from a name alone: any process can tell what a whole array
must be. Which part of it a rank must hold, torch says: a model filled with the truth is laid out by torch's
own means, and what it has on a rank is what a restored one must have there.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, VOCABULARY, BLOCKS = 13, 30, 31, 3
STEPS = 7
"""Steps that the training has made, as its optimizer and scheduler count."""


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


@contextlib.contextmanager
def _sharded_dicts(model: Any) -> Iterator[None]:
    """State dicts of FSDP1 are sharded ones; of any other module they are what they are."""
    if not isinstance(model, FSDP1):
        yield
        return
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *options):
        yield


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
    Layout("FSDP2 3", 3, _fsdp2),
    Layout("pipeline 3", 3, _pipeline(("0", "1"), ("2",), ("norm",))),
    Layout("DDP 4", 4, _ddp),
    Layout("FSDP2 4", 4, _fsdp2, usual=False),
    Layout("HSDP 2x2", 4, _hsdp),
    Layout("FSDP2xTP 2x2", 4, _fsdp2_tp),
    Layout("DDPxTP 2x2", 4, _tp_copies, usual=False),
    Layout("HSDPxTP 2x1x2", 4, _three, usual=False),
)


# --- trainings ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Training:
    """A training in a layout, as far as it has been built."""

    layout: Layout
    model: Any
    optimizer: Any
    scheduler: Any
    state: dict[str, Any]
    """What is saved and restored."""

    @property
    def inner(self) -> Any:
        """The optimizer that has the state."""
        return self.optimizer.optim if self.layout.zero else self.optimizer


MOMENTS = ("exp_avg", "exp_avg_sq")


def saved_training(layout: Layout) -> Training:
    """One whose every element is the truth."""
    found = _training(layout, "", lr=0.0)
    _make_state(found)
    for key in MOMENTS:
        moments = spread_truth(layout, key)
        for parameter, moment in zip(found.model.parameters(), moments.parameters(), strict=True):
            if parameter in found.inner.state:
                local(found.inner.state[parameter][key]).copy_(local(moment))
    for state in found.inner.state.values():
        state["step"].fill_(STEPS)
    for group, values in zip(found.optimizer.param_groups, groups_truth(), strict=True):
        group.update(values)
    found.scheduler.load_state_dict(scheduler_truth())
    found.state["epoch"] = 3
    return found


def fresh_training(layout: Layout, *, stepped: bool) -> Training:
    """One that has nothing in common with the truth. `stepped`: its optimizer has state."""
    found = _training(layout, "another", lr=0.5)
    if stepped:
        _make_state(found)
    return found


def _training(layout: Layout, kind: str, lr: float) -> Training:
    model = spread_truth(layout, kind)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.25},
    ]
    if isinstance(model, FSDP1):  # a rank's part of any parameter has one dimension
        names = {name for name, p in Model().named_parameters() if p.ndim > 1}
        large = [p for name, p in model.named_parameters() if _clean(name) in names]
        groups[0]["params"] = large
        groups[1]["params"] = [p for p in model.parameters() if not any(p is one for one in large)]
    if layout.zero:
        optimizer: Any = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.125)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    return Training(layout, model, optimizer, scheduler, state)


def _make_state(training: Training) -> None:
    """An optimizer has state once it has stepped."""
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        before = [local(parameter).clone() for parameter in training.model.parameters()]
        training.inner.step()
        for parameter, was in zip(training.model.parameters(), before, strict=True):
            local(parameter).copy_(was)  # NaNs went through arithmetic
    training.optimizer.zero_grad()


# --- the truth ----------------------------------------------------------------------------------------------


def truth(kind: str, name: str, like: torch.Tensor) -> torch.Tensor:
    """Random bits for an array of this name. `kind` tells the parameter from its moments, and from others."""
    data = np.random.default_rng(zlib.crc32(f"{kind}/{name}".encode())).bytes(like.nbytes)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).reshape(like.shape)


def true_model(kind: str = "") -> Model:
    """The whole model in one process, with the truth in it."""
    model = Model()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(truth(kind, name, tensor))
    return model


def spread_truth(layout: Layout, kind: str) -> Any:
    return layout.spread(true_model(kind))


def groups_truth() -> list[dict[str, Any]]:
    """Hyperparameters of the two groups."""
    return [
        {
            "lr": 0.1 * 2.0**-group,
            "betas": (0.8, 0.95 + group / 100),
            "eps": 3e-7,
            "weight_decay": 0.01 * group,
        }
        for group in range(2)
    ]


def scheduler_truth() -> dict[str, Any]:
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
    return dict(scheduler.state_dict())


@dataclass(frozen=True, slots=True)
class Truth:
    """What a rank of a layout must have. Computed once, for all checkpoints that are restored there."""

    arrays: Mapping[str, bytes]

    @classmethod
    def of(cls, layout: Layout) -> Truth:
        found: dict[str, bytes] = {}
        for kind in ("", *MOMENTS):
            for name, tensor in _arrays_of(spread_truth(layout, kind)):
                if kind == "" or name.partition(".")[2] in _PARAMETERS:
                    found[f"{name} {kind}".strip()] = bits(tensor)
        return cls(found)

    def differences(self, training: Training) -> list[str]:
        """Names of what is not what it must be."""
        found = {name: bits(tensor) for name, tensor in _arrays_of(training.model)}
        wrong = [name for name in found if found[name] != self.arrays[name]]
        states = dict(_states_of(training))
        if set(states) != set(_owned(training)):
            wrong.append(f"the optimizer has state of {sorted(states)}")
        for name, state in states.items():
            for key in MOMENTS:
                if bits(state[key]) != self.arrays[f"model.{name} {key}"]:
                    wrong.append(f"{name} {key}")
            if state["step"].item() != STEPS or state["step"].dtype is not torch.float32:
                wrong.append(f"{name} step")
        for number, (group, values) in enumerate(
            zip(training.optimizer.param_groups, groups_truth(), strict=True)
        ):
            wrong += [f"group {number} {key}" for key in values if group[key] != values[key]]
        if training.scheduler.state_dict() != scheduler_truth():
            wrong.append("scheduler")
        if training.state["epoch"] != 3:
            wrong.append("epoch")
        return wrong


_PARAMETERS = frozenset(name for name, _ in Model().named_parameters())


def _clean(name: str) -> str:
    """Without what wrappers put before it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def _arrays_of(model: Any) -> Iterator[tuple[str, Any]]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with _sharded_dicts(inner):
        state = inner.state_dict()
    for name, tensor in state.items():
        yield f"model.{name}", tensor


def _states_of(training: Training) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The optimizer's state, by the parameters' names."""
    if isinstance(training.model, FSDP1):
        with _sharded_dicts(training.model):
            state = FSDP1.optim_state_dict(training.model, training.optimizer)["state"]
        yield from state.items()
        return
    for name, parameter in training.model.named_parameters():
        if parameter in training.inner.state:
            yield _clean(name), training.inner.state[parameter]


def _owned(training: Training) -> Iterator[str]:
    """Names of the parameters whose state this rank must have."""
    mine = {id(parameter) for group in training.inner.param_groups for parameter in group["params"]}
    for name, parameter in training.model.named_parameters():
        if id(parameter) in mine:
            yield _clean(name)


def local(tensor: Any) -> torch.Tensor:
    """What this rank has of a tensor."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    if hasattr(tensor, "local_shards"):
        shards = tensor.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


def bits(tensor: Any) -> bytes:
    array = local(tensor).contiguous()
    return bytes(array.reshape(-1).view(torch.uint8).numpy())
