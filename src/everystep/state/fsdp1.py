"""FullyShardedDataParallel, the first one: modules whose own tensors are flat pieces of many parameters.

Owns the ways of such modules and of their optimizers: the state is taken and given back through FSDP's
sharded state dicts, in which every parameter has its own name and is distributed over ranks like any other.

FSDP makes these by collectives, so all ranks must flatten and restore together. That is acceptable, since
both happen in the thread of the training, which runs collectives of its own; nothing else in this layer
communicates. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from everystep.state.refusals import unsupported

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""How modules call what they wrap and leave out of the names in their state dicts: FSDP1, and wrappers that
compute activations again."""


def _class() -> Any:
    return getattr(
        sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel"),
        "FullyShardedDataParallel",
        None,
    )


def holds_fsdp1(module: Any) -> bool:
    """Whether a module is, or has inside, one that FSDP1 wrapped."""
    wrapper = _class()
    return wrapper is not None and any(isinstance(part, wrapper) for part in module.modules())


@contextlib.contextmanager
def _sharded(module: Any) -> Iterator[Any]:
    """FSDP's class, while its state dicts of that module are sharded ones that stay on their device."""
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    wrapper = _class()
    before = wrapper.set_state_dict_type(
        module,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )
    try:
        yield wrapper
    finally:
        wrapper.set_state_dict_type(
            module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
        )


def module_state(module: Any) -> Any:
    """The sharded state dict, with the names that the module has without FSDP. Communicates.

    FSDP makes its tensors up for the occasion, one per name. A parameter of two names is made one tensor
    again: apart, it could be restored only to where it is apart.
    """
    with _sharded(module):
        state = module.state_dict()
    named = OrderedDict(state)
    for name, known in _ties(module):
        if known in named and name in named:
            named[name] = named[known]
    metadata = OrderedDict((plain_name(name), entry) for name, entry in state._metadata.items())
    named._metadata = metadata  # type: ignore[attr-defined]
    return named


def _ties(module: Any) -> Iterator[tuple[str, str]]:
    """Second names of parameters, each with the first one."""
    first: dict[int, str] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        name = plain_name(path)
        known = first.setdefault(id(parameter), name)
        if known != name:
            yield name, known
    # With use_orig_params=False the module has flat parameters only, and these know what they were made of.
    for path, wrapped in module.named_modules():
        handle = wrapped._handle if isinstance(wrapped, _class()) else None
        for tie in () if handle is None else handle.flat_param._shared_param_infos:
            second = path, tie.module_name, tie.param_name
            prime = path, tie.prim_module_name, tie.prim_param_name
            yield plain_name(".".join(filter(None, second))), plain_name(".".join(filter(None, prime)))


def load_module(module: Any, state: Any) -> None:
    """Give a module a state of the form of `module_state`. Communicates."""
    with _sharded(module):
        module.load_state_dict(state, strict=False)


def plain_name(name: str) -> str:
    """A parameter's name as state dicts have it."""
    if "_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def module_of(optimizer: Any, modules: Iterable[Any], place: str) -> Any:
    """The module with FSDP1 inside whose parameters an optimizer has; None for any other optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(_is_piece(parameter) for parameter in parameters):
        return None
    known = {id(parameter) for parameter in parameters}
    found = [
        module
        for module in modules
        if holds_fsdp1(module) and any(id(parameter) in known for parameter in module.parameters())
    ]
    if len(found) != 1:
        raise unsupported(
            place,
            "an optimizer of FSDP1's parameters, which are pieces without names. Put the one module that "
            f"they belong to into the state as well ({len(found)} are there)",
        )
    return found[0]


def _is_piece(parameter: Any) -> bool:
    return type(parameter).__name__ == "FlatParameter" or getattr(parameter, "_fsdp_flattened", False) is True


def optimizer_state(module: Any, optimizer: Any) -> Any:
    """An optimizer's state by the names of parameters, each distributed as the parameter is. Communicates."""
    import torch

    with _sharded(module) as wrapper:
        state = wrapper.optim_state_dict(module, optimizer)
    # Parameters that are pieces of one flat tensor have one step count. It is no longer one when it is loaded
    # where they are not.
    taken: set[int] = set()
    for entries in state["state"].values():
        for key, value in entries.items():
            if type(value) is torch.Tensor and id(value) in taken:
                entries[key] = value.clone()
            taken.add(id(value))
    return state


def optimizer_state_to_load(module: Any, optimizer: Any, state: Any) -> Any:
    """A state of the form of `optimizer_state` as the optimizer itself takes it. Communicates."""
    with _sharded(module) as wrapper:
        return wrapper.optim_state_dict_to_load(module, optimizer, state)
