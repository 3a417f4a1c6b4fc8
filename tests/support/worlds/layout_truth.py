"""What a training must be in each layout, bit for bit.

The truth is random *bits*, NaNs included, computed from a name alone: any process can tell what a whole array
must be. Which part of it a rank must hold, torch says: a model filled with the truth is laid out by torch's
own means, and what it has on a rank is what a restored one must have there.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from support.worlds.torch_layouts import Layout, Model

STEPS = 7
"""Steps that the training has made, as its optimizer and scheduler count."""


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


@contextlib.contextmanager
def _sharded_dicts(model: Any) -> Iterator[None]:
    """State dicts of FSDP1 are sharded ones; of any other module they are what they are."""
    if not isinstance(model, FSDP1):
        yield
        return
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *options):
        yield


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


def traits(training: Training) -> set[str]:
    """What is special about how a training lies on this rank: layouts must be what they are meant to be."""
    found: set[str] = set()
    for _, tensor in _arrays_of(training.model):
        if not isinstance(tensor, DTensor):
            found.add("whole")
            continue
        found.add("empty" if not local(tensor).numel() else "part")
        if tensor.device_mesh.size() < dist.get_world_size():
            found.add("mesh of some ranks")
        for placement in tensor.placements:
            if placement.is_replicate():
                found.add("replicated")
            else:
                axis = getattr(placement, "dim", 0)
                ranks = tensor.device_mesh.size(tensor.placements.index(placement))
                found.add(f"axis {axis}")
                found |= {"uneven"} if tensor.shape[axis] % ranks else set()
                found |= {"strided"} if getattr(placement, "split_factor", 1) > 1 else set()
    names = {name.removeprefix("model.") for name, _ in _arrays_of(training.model)}
    found |= {"some layers"} if not names >= _PARAMETERS else set()
    found |= {"some moments"} if len(training.inner.state) < len(list(training.model.parameters())) else set()
    return found


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
