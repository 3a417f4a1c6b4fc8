"""A store without a disk: bytes out of sources, a tree through JSON, bytes into destinations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from everystep.engine.buffers import Consumed, Memory, Produced, Strided
from everystep.state import FlatState, LeafMeta, Restore, empty, flatten, unflatten
from everystep.state.mismatch import offering


@dataclass(frozen=True)
class Saved:
    tree: Any
    leaves: dict[str, LeafMeta]
    aliases: dict[str, str]
    data: dict[str, bytes]


def strided_view(where: Strided) -> np.ndarray:
    """A numpy view of memory described by byte strides. Negative ones make the lowest address the base."""
    low = sum(step * (size - 1) for step, size in zip(where.strides, where.shape, strict=True) if step < 0)
    high = sum(step * (size - 1) for step, size in zip(where.strides, where.shape, strict=True) if step > 0)
    span = (ctypes.c_char * (high - low + where.itemsize)).from_address(where.address + low)
    return np.ndarray(where.shape, f"V{where.itemsize}", span, -low, where.strides)


def read(source: object) -> bytes:
    if isinstance(source, Memory):
        return ctypes.string_at(source.address, source.nbytes) if source.nbytes else b""
    if isinstance(source, Strided):
        return strided_view(source).tobytes()
    assert isinstance(source, Produced)
    data = bytearray(source.nbytes)
    for start in range(0, source.nbytes, 7):
        source.fill(memoryview(data)[start : start + 7], start)
    return bytes(data)


def write(where: object, data: bytes) -> None:
    assert where.nbytes == len(data)  # type: ignore[attr-defined]
    if isinstance(where, Memory):
        ctypes.memmove(where.address, data, len(data))
    elif isinstance(where, Strided):
        strided_view(where)[...] = np.frombuffer(data, f"V{where.itemsize}").reshape(where.shape)
    else:
        assert isinstance(where, Consumed)
        for start in range(0, len(data), 7):
            where.drain(memoryview(data)[start : start + 7], start)


def through_json(tree: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(tree))


def save(state: object) -> Saved:
    flat: FlatState = flatten(state)
    names = [leaf.name for leaf in flat.leaves] + [name for name, _ in flat.aliases]
    assert len(set(names)) == len(names)
    return Saved(
        through_json(flat.tree),
        {leaf.name: LeafMeta(leaf.name, leaf.dtype, leaf.shape, leaf.framework) for leaf in flat.leaves},
        dict(flat.aliases),
        {leaf.name: read(leaf.source) for leaf in flat.leaves},
    )


def fresh(saved: Saved, names: Iterable[str]) -> dict[str, Any]:
    arrays = {}
    for name in names:
        meta = saved.leaves[name]
        array, memory = empty(meta.dtype, meta.shape, meta.framework)
        write(memory, saved.data[name])
        arrays[name] = array
    return arrays


def load(saved: Saved) -> Any:
    arrays = fresh(saved, saved.leaves)
    return unflatten(saved.tree, {**arrays, **{name: arrays[of] for name, of in saved.aliases.items()}})


def round_trip(state: object) -> Any:
    return load(save(state))


def restore(
    into: object, saved: Saved, *, strict: bool = True, rename: Callable[[str], str] | None = None
) -> Any:
    plan = Restore(into, saved.tree, saved.leaves, saved.aliases, strict=strict, rename=rename)
    if strict and plan.mismatch:
        with offering("strict", "rename"):
            raise plan.mismatch.error()
    assert not set(plan.destinations) & set(plan.fresh)
    for name, where in plan.destinations.items():
        write(where, saved.data[name])
    return plan.finish(fresh(saved, plan.fresh))
