"""Objects of DeepSpeed: those in its files made again, and the tensors that only a step changes."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch

from everystep.universal.deepspeed.names import NAMESPACE


def make_object(name: str, state: Any) -> Any:
    """An object of one of the classes that `deepspeed_files` knows."""
    if name == NAMESPACE:
        return argparse.Namespace(**state)
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    if issubclass(found, Enum):
        return found(state)
    made = object.__new__(found)
    vars(made).update(state)
    return made


def trained_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """The tensors that only a step of the optimizer changes: weights, master weights, moments."""
    yield from engine.module.parameters()
    optimizer = engine.basic_optimizer
    for group in optimizer.param_groups if optimizer is not None else ():
        yield from group["params"]
    # ZeRO-3 has its parameters in the groups during a step only.
    for parameter, states in optimizer.state.items() if optimizer is not None else ():
        yield from (one for one in (parameter, *states.values()) if isinstance(one, torch.Tensor))


def copies_but(stay: Iterable[torch.Tensor]) -> Callable[[Any], Any]:
    """A function that copies tensors, but those that `stay` as they are."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in stay}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in memory:
            return value.detach().clone()
        return value

    return copied
