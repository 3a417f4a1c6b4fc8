"""From the objects of a foreign file to named tensors and plain values.

Owns names: a tensor or value is named by its place, keys joined with dots. Objects from files may share
parts or contain themselves, so walking them is limited in depth and number.
"""

from __future__ import annotations

import argparse
import datetime
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.errors import UnsupportedSource
from holdfast.universal.pickle_machine import Name, Record
from holdfast.universal.source import SourceLeaf
from holdfast.universal.tensor_leaves import leaf_of
from holdfast.universal.torch_file import StoredTensor
from holdfast.universal.torch_values import TorchDevice, TorchDtype

MAX_DEPTH = 100
MAX_NODES = 4_000_000


@dataclass(slots=True)
class Collected:
    """The tensors and values of a file, by dotted name. `path` is for messages."""

    path: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    nodes: int = 0

    def add(self, tree: object, place: str = "") -> None:
        """Everything in a tree, named by its place below `place`."""
        self._add(tree, place, 0)

    def add_tensor(self, name: str, tensor: StoredTensor) -> None:
        self._require_new(name)
        self.tensors[name] = tensor

    def add_value(self, name: str, value: object) -> None:
        self._require_new(name)
        self.values[name] = self.plain(value)

    def plain(self, value: object) -> object:
        """A value made of Python's own types and numpy arrays. A record gives its attributes."""
        return self._plain(value, 0)

    def leaves(self) -> tuple[tuple[SourceLeaf, ...], dict[str, str]]:
        """The tensors as leaves, and the names of those that are the same memory as an earlier one."""
        seen: dict[StoredTensor, str] = {}
        leaves: list[SourceLeaf] = []
        aliases: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            first = seen.setdefault(tensor, name) if tensor.count else name
            if first != name:
                aliases[name] = first
            else:
                leaves.append(leaf_of(name, tensor))
        return tuple(leaves), aliases

    def _require_new(self, name: str) -> None:
        if name in self.tensors or name in self.values:
            raise UnsupportedSource(f"{self.path}: two entries are both named {name!r}")

    def _count(self, depth: int) -> None:
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise UnsupportedSource(
                f"{self.path}: objects are nested deeper than {MAX_DEPTH}, or contain themselves"
            )
        if self.nodes > MAX_NODES:
            raise UnsupportedSource(f"{self.path}: more than {MAX_NODES} objects")

    def _add(self, tree: object, place: str, depth: int) -> None:
        self._count(depth)
        if isinstance(tree, StoredTensor):
            self.add_tensor(place or "tensor", tree)
        elif isinstance(tree, dict) and tree and all(isinstance(key, (str, int)) for key in tree):
            for key, value in tree.items():
                self._add(value, f"{place}.{key}" if place else str(key), depth + 1)
        elif isinstance(tree, (list, tuple)) and self._has_tensors(tree, depth):
            for index, value in enumerate(tree):
                self._add(value, f"{place}.{index}" if place else str(index), depth + 1)
        else:
            self.add_value(place or "value", tree)

    def _has_tensors(self, tree: object, depth: int) -> bool:
        self._count(depth)
        if isinstance(tree, StoredTensor):
            return True
        inside: Iterable[object] = ()
        if isinstance(tree, dict):
            inside = tree.values()
        elif isinstance(tree, (list, tuple)):
            inside = tree
        return any(self._has_tensors(one, depth + 1) for one in inside)

    def _plain(self, value: Any, depth: int) -> object:
        self._count(depth)
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return value
        if isinstance(value, deque):
            return self._plain(list(value), depth)
        if isinstance(value, argparse.Namespace):
            return self._plain(vars(value), depth)
        if isinstance(value, (np.ndarray, np.generic)):
            return value
        if isinstance(value, TorchDtype):
            return f"torch.{value.name}"
        if isinstance(value, TorchDevice):
            return value.text
        if isinstance(value, (list, tuple)):
            made = [self._plain(one, depth + 1) for one in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, dict):
            return {self._plain_key(key): self._plain(one, depth + 1) for key, one in value.items()}
        if isinstance(value, (set, frozenset)):
            return sorted((self._plain(one, depth + 1) for one in value), key=repr)
        if isinstance(value, Record):
            if value.attributes:
                return self._plain(dict(value.attributes), depth + 1)
            if value.items:
                return self._plain(value.items, depth + 1)
            return self._plain(value.args[0] if len(value.args) == 1 else value.args, depth + 1)
        if isinstance(value, Name):
            return value.text
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
            return value.isoformat()
        if isinstance(value, datetime.timedelta):
            return value.total_seconds()
        if isinstance(value, StoredTensor):
            raise UnsupportedSource(f"{self.path}: a tensor inside of a set, or below a key that is not text")
        return str(value)

    @staticmethod
    def _plain_key(key: object) -> object:
        if isinstance(key, Name):
            return key.text
        return str(key) if isinstance(key, Record) else key


def step_of(values: Mapping[str, object], names: Iterable[str]) -> int:
    """The first of the named values that is a number of steps; 0 if none is."""
    for name in names:
        value = values.get(name)
        if type(value) is int and value >= 0:
            return value
    return 0
