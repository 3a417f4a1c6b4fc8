"""Torch's small value types, as torch-free objects: element types, shapes and devices in a torch file.

Each says with `node` which node of a state tree it stands for, the one that `state.value_encoder` writes for
the real thing. So a file that mentions ``torch.float16`` is described without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from everystep.state.node import Node


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """``torch.float16``: `name` is ``float16``."""

    name: str

    @property
    def node(self) -> Node:
        return {"$torch.dtype": self.name}


class TorchSize(tuple[int, ...]):
    """``torch.Size([2, 3])``. A tuple, as the real one."""

    __slots__ = ()

    @property
    def node(self) -> Node:
        return {"$torch.size": list(self)}


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """``torch.device("cuda:1")``: `text` is ``cuda:1``."""

    text: str

    @property
    def node(self) -> Node:
        return {"$torch.device": self.text}


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether an object of a pickle is a shape, which may come from a damaged file."""
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)


TORCH_VALUES = (TorchDtype, TorchSize, TorchDevice)
