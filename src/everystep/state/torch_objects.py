"""What torch modules and optimizers contribute to a state: parameter names, and name-keyed optimizer state.

Owns the rule that optimizer state is keyed by *parameter name*, never by index: an index means nothing once
a layer is added or a group reordered. Tensors themselves belong to `torch_arrays`; putting state back to
`restore_modules` and `restore_optimizers`. Importing this module does not import torch.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from everystep.state import fsdp1
from everystep.state.marks import RankMark
from everystep.state.node import MAX_DEPTH
from everystep.state.refusals import unsupported
from everystep.state.value_encoder import is_value

_CONTAINERS = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict)


def is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def plain_module(module: Any) -> Any:
    """The module inside of what `torch.compile` and DistributedDataParallel make of it.

    Its names should not depend on being compiled, nor on the number of processes.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    for _ in range(8):
        if parallel is not None and isinstance(module, parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in getattr(module, "_modules", ()):
            module = module._orig_mod
        else:
            break
    return module


def lent_buffers(module: Any) -> frozenset[int]:
    """Addresses of buffers whose copy on this rank does not count.

    DistributedDataParallel gives all ranks those of the first one before every forward pass; what each rank
    makes of them in that pass (statistics of its own batch) is thrown away by the next.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None or not isinstance(module, parallel.DistributedDataParallel):
        inner = getattr(module, "_modules", {}).get("_orig_mod")
        return frozenset() if inner is None else lent_buffers(inner)
    from torch.distributed import get_rank

    syncs = getattr(module, "forward_sync_buffers", getattr(module, "broadcast_buffers", False))
    if not syncs or get_rank(module.process_group) == 0:
        return frozenset()
    return frozenset(
        buffer.data_ptr()
        for name, buffer in module.module.named_buffers()
        if name not in module.parameters_to_ignore and buffer.numel()
    )


def module_state(module: Any) -> Any:
    """A module's state dict; every parameter under its own name."""
    return fsdp1.module_state(module) if fsdp1.holds_fsdp1(module) else module.state_dict()


def is_stateful(value: object) -> bool:
    """Whether the value brings its own state and can take it back (schedulers, loaders, scalers)."""
    return (
        not isinstance(value, type)
        and not is_value(value)  # configurations of OmegaConf have any attribute
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


@dataclass(frozen=True, slots=True)
class ParameterName:
    """A parameter's name in its module, and the place of that module in the state."""

    module: str
    name: str

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


ParameterNames = dict[int, ParameterName]
"""Names by the parameter's identity. Valid while the state that holds the parameters lives."""


def parameter_names(state: object) -> ParameterNames:
    """Names of all parameters of all modules in a state; the first module that holds one names it."""
    names: ParameterNames = {}
    for place, module in modules_in(state):
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), ParameterName(place, fsdp1.plain_name(name)))
    return names


def modules_in(state: object) -> list[tuple[str, Any]]:
    """The modules of a state and their places."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = _objects(state)
    return [(place, plain_module(value)) for place, value in found if isinstance(value, torch.nn.Module)]


def optimizers_in(state: object) -> list[Any]:
    """The optimizers of a state."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [value for _, value in _objects(state) if isinstance(value, torch.optim.Optimizer)]


def _objects(state: object) -> list[tuple[str, Any]]:
    """The objects and values in the containers of a state, in its order, and their places.

    It is on the path of every save, so it does without a call for each of them.
    """
    found: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any, int]] = [("", state, 0)]
    while waiting:
        place, value, depth = waiting.pop()
        kind = type(value)
        if kind in _MAPPINGS:
            inner = list(value.items())
        elif kind in _CONTAINERS:
            inner = list(enumerate(value))
        elif isinstance(value, RankMark):
            waiting.append((place, value.value, depth + 1))
            continue
        else:
            found.append((place, value))
            continue
        if depth < MAX_DEPTH:  # else a cycle, which flattening reports with its place
            prefix = f"{place}." if place else ""
            waiting += [(f"{prefix}{key}", item, depth + 1) for key, item in reversed(inner)]
    return found


@dataclass(frozen=True, slots=True)
class OptimizerNames:
    """The names of an optimizer's parameters, group by group."""

    groups: tuple[tuple[str, ...], ...]
    known: bool
    """False when no parameter has a name and all go by their position."""

    def flat(self) -> list[str]:
        return [name for group in self.groups for name in group]


def optimizer_names(optimizer: Any, names: ParameterNames) -> OptimizerNames:
    """A unique name per parameter: from the modules in the state, else the optimizer's, else its position."""
    taken = {key for key in optimizer.state if type(key) is str}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {id(p): names[id(p)] for p in parameters if id(p) in names}
    bare: set[str] = set()
    ambiguous: set[str] = set()
    for name in found.values():
        (ambiguous if name.name in bare else bare).add(name.name)
    chosen: dict[int, str] = {}
    known = False
    position = 0
    groups = []
    for group in optimizer.param_groups:
        own = group.get("param_names")
        members = []
        for index, parameter in enumerate(group["params"]):
            key = id(parameter)
            if key not in chosen:
                wanted = f"param.{position}"
                if key in found:
                    # Two modules may both have a `0.weight`: only then does the module's place join the name.
                    wanted = found[key].full if found[key].name in ambiguous else found[key].name
                    known = True
                elif own is not None and index < len(own) and type(own[index]) is str:
                    wanted = own[index]
                    known = True
                chosen[key] = _unique(wanted, taken)
            members.append(chosen[key])
            position += 1
        groups.append(tuple(members))
    return OptimizerNames(tuple(groups), known)


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """An optimizer as its state is kept: the one that holds state here, the state, its parameters' names.

    Of a ZeroRedundancyOptimizer (`outer`) that is an optimizer of this rank's parameters only; `all_names`
    are those of all ranks, and every rank lists them in its groups. Of an optimizer of FSDP1's parameters,
    the state is by names already, and distributed over ranks as the parameters of `fsdp1`, the module, are.
    """

    optimizer: Any
    state: Any
    names: OptimizerNames
    all_names: OptimizerNames
    outer: Any = None
    fsdp1: Any = None

    def loaded(self) -> None:
        """Must be called when the optimizer has taken a state."""
        if self.outer is not None:
            self.outer._sync_param_groups(self.optimizer.param_groups, self.outer.param_groups)


def optimizer_view(optimizer: Any, names: ParameterNames, state: object, place: str) -> OptimizerView:
    """A view of an optimizer in `state`. The names are those of the modules' parameters."""
    module = fsdp1.module_of(optimizer, (module for _, module in modules_in(state)), place)
    if module is not None:
        own = fsdp1.optimizer_state(module, optimizer)
        listed = OptimizerNames(tuple(tuple(group["params"]) for group in own["param_groups"]), True)
        return OptimizerView(optimizer, own, listed, listed, fsdp1=module)
    every = optimizer_names(optimizer, names)
    if not is_zero(optimizer):
        return OptimizerView(optimizer, optimizer.state_dict(), every, every)
    inner = optimizer.optim
    if not is_optimizer(inner):
        raise unsupported(
            place, "a ZeroRedundancyOptimizer with overlap_with_ddp=True keeps its state out of reach"
        )
    name_of = {
        id(parameter): name
        for group, members in zip(optimizer.param_groups, every.groups, strict=True)
        for parameter, name in zip(group["params"], members, strict=True)
    }
    here = tuple(tuple(name_of[id(p)] for p in group["params"]) for group in inner.param_groups)
    # A schedule works on the outer one, which passes hyperparameters on when it steps.
    optimizer._sync_param_groups(optimizer.param_groups, inner.param_groups)
    return OptimizerView(inner, inner.state_dict(), OptimizerNames(here, every.known), every, outer=optimizer)


def is_zero(optimizer: object) -> bool:
    """Whether it is torch's ``ZeroRedundancyOptimizer``, which divides its state among ranks."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)


def _unique(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}~{count}"
    taken.add(name)
    return name


def named_state(view: OptimizerView) -> dict[Any, Any] | None:
    """An optimizer's ``state_dict()`` with names for indices; None when it does not have torch's usual form.

    ``torch.optim.Optimizer.load_state_dict`` takes the result as it is: it matches parameters by their order
    in the groups and only asks that the keys agree.
    """
    state = view.state
    index_names = name_of_index(state, view.names)
    if index_names is None:
        return None
    by_name = {index_names.get(key, key): value for key, value in state["state"].items()}
    groups = [
        {**group, "params": list(members)}
        for group, members in zip(state["param_groups"], view.all_names.groups, strict=True)
    ]
    return {**state, "state": by_name, "param_groups": groups}


def name_of_index(state: Any, names: OptimizerNames) -> dict[Any, str] | None:
    """Which name each index of a usual ``state_dict()`` stands for; None for an unusual one."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return None
    groups = state.get("param_groups")
    if type(groups) is not list or len(groups) != len(names.groups):
        return None
    found: dict[Any, str] = {}
    for group, members in zip(groups, names.groups, strict=True):
        packed = group.get("params") if isinstance(group, dict) else None
        if type(packed) is not list or len(packed) != len(members):
            return None
        found.update(zip(packed, members, strict=True))
    return found
