"""Questions about the objects of a target, and the small acts of changing them: the tools of `restore`.

Owns what counts as an array in a target, where it can be written, and how containers and objects take over
what was saved. Knows nothing of checkpoints, but for the kinds of nodes.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from typing import Any, Generic, TypeVar

import numpy as np

from everystep.engine.buffers import Consumed, Destination, Memory
from everystep.errors import StateMismatch, UnsupportedState
from everystep.state import arrays, boxed, jax_arrays, numpy_arrays, sharded, torch_arrays, torch_objects
from everystep.state.marks import RankMark
from everystep.state.node import MAX_DEPTH, NAMELESS, Node, blob_of, items_of, leaf_of, pairs_of, shorten
from everystep.state.refusals import type_name, unfillable
from everystep.state.value_encoder import is_value

T = TypeVar("T")
MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
SEQUENCES = (list, tuple, deque)


class Rebuilt(Generic[T]):
    """A part of a state, as `value`, that nothing can be put into: a restore makes a new `value` of it.

    A subclass also has ``state_dict``, for saves.
    """

    value: T

    def memory(self, entries: Collection[object]) -> Any:
        """A dict of arrays and values for a restore to fill. The checkpoint has `entries` there."""
        raise NotImplementedError

    def rebuild(self, memory: Any) -> None:
        """Makes the new `value` of that dict, filled."""
        raise NotImplementedError


def is_array(value: object) -> bool:
    """Whether this is an array that can be filled. One of JAX cannot."""
    torch = sys.modules.get("torch")
    return isinstance(value, (np.ndarray, boxed.BoxedArray)) or (
        torch is not None and isinstance(value, torch.Tensor)
    )


def array_type(target: Any, place: str, known: sharded.Shardings) -> tuple[str, tuple[int, ...]]:
    """Logical name and shape of an array; `UnsupportedState` for one that could not be saved either.

    Of an array that is distributed over ranks: the whole shape.
    """
    if isinstance(target, boxed.BoxedArray):
        return boxed.element_type(target, place), target.shape
    if not isinstance(target, np.ndarray):
        part = sharded.held(target, place, known)
        if part is None:
            return torch_arrays.tensor_type(target, place)
        if part.tensor is None:
            return torch_arrays.logical_name(sharded.element_type(target), place), part.sharding.shape
        return torch_arrays.tensor_type(part.tensor, place)[0], part.sharding.shape
    dtype = numpy_arrays.logical_name(target.dtype)
    if dtype is None or type(target) not in (np.ndarray, np.memmap):
        raise unfillable(place, f"a {type_name(target)} of dtype {target.dtype} cannot be filled")
    return dtype, target.shape


def describe(dtype: str, shape: tuple[int, ...]) -> str:
    """An array's type in messages: ``F32[3,4]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def array_destination(target: Any) -> Destination | None:
    if isinstance(target, np.ndarray):
        return numpy_arrays.destination(target)
    return torch_arrays.destination(target)


def replaceable(target: Any) -> bool:
    """Whether the array cannot be written in place, so that a new one replaces it."""
    if isinstance(target, np.ndarray):
        return True
    return numpy_arrays.overlaps_itself(tuple(target.shape), target.stride())


def copy_into(target: Any, array: Any) -> None:
    if isinstance(target, np.ndarray):
        source: numpy_arrays.Array = arrays.convert(array, "numpy")
        np.copyto(target, source, casting="no")
        return
    import torch

    with torch.no_grad():
        target.copy_(arrays.convert(array, "torch"))


def memory_key(where: Destination | None) -> tuple[Any, ...] | None:
    """Equal for destinations that are the same host memory seen the same way; None for no host memory."""
    if where is None or isinstance(where, Consumed) or not where.nbytes:
        return None
    if isinstance(where, Memory):
        return where.address, where.nbytes
    return where.address, where.itemsize, where.shape, where.strides


def has_span(where: Destination) -> bool:
    return type(where) is not Consumed and where.nbytes > 0


def span(where: Destination) -> tuple[int, int]:
    """First address and the one past the last, of host memory."""
    if isinstance(where, Memory):
        return where.address, where.address + where.nbytes
    assert not isinstance(where, Consumed)
    steps = [step * (size - 1) for step, size in zip(where.strides, where.shape, strict=True)]
    low = where.address + sum(step for step in steps if step < 0)
    high = where.address + sum(step for step in steps if step > 0)
    return low, high + where.itemsize


# --- values and objects of the target -----------------------------------------------------------------------


def assign(target: Any, value: Any) -> Any:
    """The target with the contents of `value`, when both are the same kind of container; else the value.

    Other holders of the container then see the change.
    """
    kind = type(target)
    if kind is not type(value) or target is value:
        return value
    if kind is Namespace:
        assign(vars(target), vars(value))
        return target
    if kind is defaultdict:
        target.default_factory = value.default_factory
    if kind in MAPPINGS:
        merged = {key: assign(target.get(key), item) for key, item in value.items()}
        target.clear()
        dict.update(target, merged) if kind is Counter else target.update(merged)
        return target
    if kind is list:
        target[:] = [assign(*pair) for pair in zip(target, value, strict=False)] + value[len(target) :]
        return target
    if kind is set:
        target.clear()
        target.update(value)
        return target
    if kind is bytearray:
        target[:] = value
        return target
    if kind is deque and target.maxlen == value.maxlen:
        target.clear()
        target.extend(value)
        return target
    return value


def load_state(target: Any, state: object, place: str) -> None:
    """Give a state to an object. If that fails, the error names the place."""
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise load_failed(target, place, error) from error


def load_failed(target: object, place: str, reason: object) -> StateMismatch:
    return StateMismatch(
        f"{place or NAMELESS}: {type_name(target)}.load_state_dict failed with the saved state: "
        f"{str(reason).rstrip(' .')}. Other parts of the target may already be restored",
        wrong=[place or NAMELESS],
    )


def has_arrays(value: Any, depth: int) -> bool:
    """Whether a target has arrays, or objects that may have them, somewhere inside."""
    if depth > MAX_DEPTH:
        raise UnsupportedState(
            f"the target is nested deeper than {MAX_DEPTH} levels, or a container holds itself"
        )
    if type(value) is Namespace:
        value = vars(value)
    if type(value) in MAPPINGS:
        return any(has_arrays(item, depth + 1) for item in value.values())
    if type(value) in SEQUENCES:
        return any(has_arrays(item, depth + 1) for item in value)
    if is_array(value) or jax_arrays.is_array(value):
        return True
    return isinstance(value, RankMark) or torch_objects.is_stateful(value)


def is_value_target(value: object) -> bool:
    """Whether a target is a value without arrays. The saved value replaces it."""
    return is_value(value) or type(value) in (set, frozenset)


def holds_strangers(value: Any, depth: int) -> bool:
    """Whether a target has objects inside that could not be saved, and therefore cannot be filled.

    Subclasses of containers are such objects, too: they cannot be saved, because they would lose their type.
    """
    if depth > MAX_DEPTH:
        return False  # `has_arrays` raises
    if type(value) is Namespace:
        value = vars(value)
    if type(value) in MAPPINGS:
        return any(holds_strangers(item, depth + 1) for item in value.values())
    if type(value) in SEQUENCES:
        return any(holds_strangers(item, depth + 1) for item in value)
    return not (is_value_target(value) or has_arrays(value, depth))


def kind_of(node: Node) -> str:
    """What a node holds, in words."""
    if leaf_of(node) is not None:
        return "an array"
    if blob_of(node) is not None:
        return "bytes"
    if pairs_of(node) is not None:
        return "a dict"
    if items_of(node) is not None:
        return "a list or tuple"
    return f"the value {shorten(node, 60)}"
