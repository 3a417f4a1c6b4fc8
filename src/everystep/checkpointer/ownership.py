"""Which leaves may be read where they lie while training goes on, and who must wait before changing them.

A leaf may stay in place when something announces every change of it: an optimizer whose steps are hooked
owns its parameters and its state; the user changes parameters that no optimizer owns inside
`Checkpointer.update`; and with `stable` the user promises it. Frozen parameters of a module that is being
trained may stay, too, once saves have found them unchanged (`guard`). All else (statistics that forward
updates, averages, the user's own arrays) is copied at save time.

Memory is recognized by its address, since a module's ``state_dict`` returns new tensor objects each time.
"""

from __future__ import annotations

import math
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from everystep.engine import Memory, Strided
from everystep.state import LeafSource
from everystep.state.boxed import Immutable
from everystep.state.marks import RankMark
from everystep.state.sharded import local_arrays
from everystep.state.torch_objects import is_module, is_zero, modules_in

T = TypeVar("T")


class OwnerKind(IntEnum):
    """Who announces changes of a leaf. Of several, the last in this order decides."""

    FROZEN = 0
    UNCHANGED = 1
    UPDATE = 2
    OPTIMIZER = 3


class Owner(NamedTuple):
    """An owner of leaves. `number` distinguishes optimizers."""

    kind: OwnerKind
    number: int = 0


FROZEN = Owner(OwnerKind.FROZEN)
"""Of parameters that no gradient changes. Forward may: `guard` says which are copied."""
UNCHANGED = Owner(OwnerKind.UNCHANGED)
"""Of what is promised not to change before the next hooked step."""
UPDATE = Owner(OwnerKind.UPDATE)
"""Of what changes only inside `Checkpointer.update`."""

OwnerOf = Callable[[LeafSource], Owner | None]
"""The owner of a leaf that may be read in place now; None for one that must be copied."""

_HOST = "cpu"


class Owners:
    """Who owns which memory at the time of one save."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, int, Owner]]] = {}
        self._starts: dict[str, list[int]] = {}
        # The furthest end of all that begin before: what may reach into a leaf begins where this does.
        self._reaches: dict[str, list[int]] = {}

    def add(self, arrays: Iterable[Any], owner: Owner) -> None:
        for array in local_arrays(arrays):  # of those that are spread over ranks, what is here
            device, start, stop = _extent(array)
            if stop > start:
                self._found.setdefault(device, []).append((start, stop, owner))

    def seal(self) -> None:
        for device, found in self._found.items():
            kept = self._found[device] = _without_parts(found)
            self._starts[device] = [start for start, _, _ in kept]
            self._reaches[device] = list(accumulate([stop for _, stop, _ in kept], max))

    def of(self, leaf: LeafSource) -> Owner | None:
        """The owner of all of a leaf's memory; None when it has none, or when several optimizers own it.

        Each of these would wait for its own leaves only. But every owner waits for what changes only inside
        of `update`, or not before a hooked step: there, the optimizer comes first.
        """
        source = leaf.source
        if type(source.owner) in (bytes, Immutable):
            return UNCHANGED  # it cannot change
        if type(source) is Memory:
            device, start, stop = _HOST, source.address, source.address + source.nbytes
        elif type(source) is Strided:
            device, start, stop = _HOST, *span(source.address, source.itemsize, source.shape, source.strides)
        elif getattr(source.owner, "is_cpu", True):
            return None  # made of host memory by Python code, which only the version counter watches
        else:
            device, start, stop = _extent(source.owner)
        if device not in self._found:
            return None
        first, last = bisect_right(self._reaches[device], start), bisect_left(self._starts[device], stop)
        owner: Owner | None = None
        whole = False
        for low, high, its in self._found[device][first:last]:
            if high <= start:
                continue
            covers = low <= start and stop <= high
            if its == owner:
                whole |= covers
            elif its.kind == OwnerKind.OPTIMIZER and owner is not None and owner.kind == its.kind:
                return None
            elif owner is None or its > owner:
                owner, whole = its, covers
        return owner if whole else None


def _without_parts(found: list[tuple[int, int, Owner]]) -> list[tuple[int, int, Owner]]:
    """Sorted, without ranges inside another of the same owner, such as views of one large buffer."""
    reach: dict[Owner, int] = {}
    kept = []
    for start, back, owner in sorted([(start, -stop, owner) for start, stop, owner in found]):
        if -back > reach.get(owner, 0):
            reach[owner] = -back
            kept.append((start, -back, owner))
    return kept


def owners(state: object, optimizers: Mapping[Owner, Any], *, updates: bool) -> Owners:
    """Who owns what now. `updates`: the user announces changes of parameters that no optimizer owns."""
    found = Owners()
    owned: set[int] = set()
    for owner, optimizer in optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owned.update(map(id, parameters))
        # One that divides its state among ranks steps through another, and changes all parameters afterwards.
        holder = optimizer.optim if is_zero(optimizer) else optimizer
        found.add([*parameters, *_tensors(list(holder.state.values()))], owner)
    for _, module in modules_in(state):
        parameters = list(module.parameters())
        trained = updates or not owned.isdisjoint(map(id, parameters))
        others = [parameter for parameter in parameters if id(parameter) not in owned]
        if trained:
            found.add([parameter for parameter in others if not parameter.requires_grad], FROZEN)
        if updates:
            found.add([parameter for parameter in others if parameter.requires_grad], UPDATE)
    if updates:
        found.add([tensor for tensor in _tensors(state) if tensor.requires_grad], UPDATE)
    found.add(_stable_arrays(), UNCHANGED)
    found.seal()
    return found


# --- the user's word ----------------------------------------------------------------------------------------

_stable: dict[int, weakref.ref[Any]] = {}


def stable(x: T) -> T:
    """Promises that the arrays of `x` change only between a step of a hooked optimizer and the next save.

    They are then read in place instead of being copied: for averages of weights that are updated right after
    the optimizer's step, or large tables that never change.

    Args:
        x: An array, a tensor, a module, or a container of them.

    Returns:
        `x` itself.

    >>> import everystep, numpy
    >>> table = everystep.stable(numpy.zeros(1000))
    """
    for array in _arrays(x):
        key = id(array)
        _stable[key] = weakref.ref(array, lambda _, key=key: _stable.pop(key, None))  # type: ignore[misc]
    return x


def _arrays(x: object) -> Iterator[Any]:
    torch = sys.modules.get("torch")
    if isinstance(x, np.ndarray) or (torch is not None and isinstance(x, torch.Tensor)):
        yield x
    elif isinstance(x, dict):
        for item in x.values():
            yield from _arrays(item)
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _arrays(item)
    elif isinstance(x, RankMark):
        yield from _arrays(x.value)
    elif is_module(x):
        yield from x.parameters()  # type: ignore[attr-defined]
        yield from x.buffers()  # type: ignore[attr-defined]
    else:
        raise TypeError(f"stable() takes arrays, tensors, modules, and containers of them, not {type(x)}")


def _stable_arrays() -> list[Any]:
    if not _stable:
        return []
    return [array for reference in list(_stable.values()) if (array := reference()) is not None]


# --- memory -------------------------------------------------------------------------------------------------


def _tensors(value: object) -> list[Any]:
    """The tensors in nested containers."""
    torch = sys.modules.get("torch")
    found: list[Any] = []
    waiting: list[Any] = [] if torch is None else [value]
    for item in waiting:  # which grows
        if isinstance(item, torch.Tensor):  # type: ignore[union-attr]
            found.append(item)
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, RankMark):
            waiting.append(item.value)
    return found


def _extent(array: Any) -> tuple[str, int, int]:
    """Device, first address, and the one past the last of an array's memory. Empty if it has none."""
    array = getattr(array, "_local_tensor", array)  # of a DTensor, what is here
    if hasattr(array, "data_ptr"):
        if array.is_meta or array.layout is not sys.modules["torch"].strided:
            return _HOST, 0, 0
        device = _HOST if array.is_cpu else str(array.device)
        if array.is_contiguous():
            start = array.data_ptr()
            return device, start, start + array.nbytes
        itemsize = array.element_size()
        steps = tuple(step * itemsize for step in array.stride())
        return device, *span(array.data_ptr(), itemsize, tuple(array.shape), steps)
    return _HOST, *span(array.ctypes.data, array.itemsize, array.shape, array.strides)


def span(address: int, itemsize: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, int]:
    if not math.prod(shape):
        return address, address
    reach = [(size - 1) * step for size, step in zip(shape, steps, strict=True)]
    return address + sum(r for r in reach if r < 0), address + sum(r for r in reach if r > 0) + itemsize
