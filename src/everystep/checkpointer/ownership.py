"""Which leaves may be read where they lie while training goes on, and who must wait before changing them.

A leaf may stay in place when something announces every change of it: an optimizer whose steps are hooked
owns its parameters and its state; the user changes parameters that no optimizer owns inside of
`Checkpointer.update`; and `stable` is the user's word. Frozen parameters of a module that is being trained
may stay, too, once they were seen not to change (`observed_changes`). All else (statistics that forward
updates, averages, the user's own arrays) is copied at save time.

What is owned is told by address, since a module's ``state_dict`` hands out new tensor objects each time.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from everystep.engine import Memory, Strided, forks
from everystep.state import LeafSource
from everystep.state.boxed import Immutable
from everystep.state.marks import Mark
from everystep.state.sharded import local_tensor
from everystep.state.torch_objects import is_module, is_optimizer, is_zero, modules_in, optimizers_in

T = TypeVar("T")


class OwnerKind(IntEnum):
    """Who announces changes of a leaf. Of several, the last in this order decides."""

    FROZEN = 0
    NOBODY = 1
    UPDATE = 2
    OPTIMIZER = 3


class Owner(NamedTuple):
    """An owner of leaves. `number` tells optimizers apart."""

    kind: OwnerKind
    number: int = 0


FROZEN = Owner(OwnerKind.FROZEN)
"""Of parameters that no gradient changes. Forward may: `observed_changes` says which are copied."""
NOBODY = Owner(OwnerKind.NOBODY)
"""Of what is promised not to change before the next hooked step."""
UPDATE = Owner(OwnerKind.UPDATE)
"""Of what changes only inside of `Checkpointer.update`."""

_HOST = "cpu"


class Hooks:
    """The optimizers that announce their steps. `before_step(owner)` runs before each changes anything."""

    def __init__(self, before_step: Callable[[Owner], None]) -> None:
        # Weak: an optimizer that outlives its Checkpointer must not keep it, and its run's lock.
        self._before_step = weakref.WeakMethod(before_step)
        # Weak, too: one that was replaced goes when the training lets go of it.
        self._optimizers: weakref.WeakValueDictionary[Owner, Any] = weakref.WeakValueDictionary()
        self._handles: dict[Owner, Any] = {}
        self._numbers = itertools.count()

    @property
    def optimizers(self) -> dict[Owner, Any]:
        """The optimizers that are hooked, by owner."""
        return dict(self._optimizers)

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Hooks these optimizers, and no others: one that is not in the state any more owns nothing of it.

        One that cannot be hooked is left out, and its tensors are copied.
        """
        wanted = {id(optimizer): optimizer for optimizer in map(_innermost, optimizers)}
        known = {owner: id(optimizer) for owner, optimizer in self.optimizers.items()}
        for owner in [owner for owner in self._handles if known.get(owner) not in wanted]:
            self._handles.pop(owner).remove()
            self._optimizers.pop(owner, None)
        hooked = set(known.values())
        for identity, optimizer in wanted.items():
            register = getattr(optimizer, "register_step_pre_hook", None)
            if identity in hooked or register is None or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                continue
            owner = Owner(OwnerKind.OPTIMIZER, next(self._numbers))
            self._handles[owner] = register(self._hook(owner))
            self._optimizers[owner] = optimizer

    def _hook(self, owner: Owner) -> Hook:
        before_step = self._before_step
        here = forks()

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            call = before_step()
            if call is not None and forks() == here:  # a forked child has its own copy of everything
                call(owner)

        return _hidden_from_compiler(hook)

    def detach(self) -> None:
        self.attach(())


Hook = Callable[[Any, Any, Any], None]


def _hidden_from_compiler(hook: Hook) -> Hook:
    """Without this, ``torch.compile`` of a step compiles all that a wait goes through, threads and locks.

    Costs no import: making an optimizer of torch has brought all of the compiler that this needs. Those of
    others come without it.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    hidden: Hook = sys.modules["torch"].compiler.disable(hook)
    return hidden


def _innermost(optimizer: Any) -> Any:
    """The optimizer that really steps, inside of wrappers that keep it as ``.optimizer``."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not is_optimizer(inner):
            break
        optimizer = inner
    return optimizer


class Owners:
    """Who owns which memory at the time of one save."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, int, Owner]]] = {}
        self._starts: dict[str, list[int]] = {}
        # The furthest end of all that begin before: what may reach into a leaf begins where this does.
        self._reaches: dict[str, list[int]] = {}

    def add(self, tensor: Any, owner: Owner) -> None:
        tensor = local_tensor(tensor)  # of one that is spread over ranks, what is here
        if tensor is None:
            return
        device, start, stop = _extent(tensor)
        if stop > start:
            self._found.setdefault(device, []).append((start, stop, owner))

    def seal(self) -> None:
        for device, found in self._found.items():
            kept = self._found[device] = list(_without_parts(found))
            self._starts[device] = [start for start, _, _ in kept]
            self._reaches[device] = list(accumulate((stop for _, stop, _ in kept), max))

    def of(self, leaf: LeafSource) -> Owner | None:
        """The owner of all of a leaf's memory; None when nobody is, or more than one optimizer.

        Each of several would have to wait for it, and does for its own only. But what changes
        only inside of `update`, or not before a hooked step, is waited for by everybody: there, the optimizer
        comes first.
        """
        source = leaf.source
        if type(source.owner) in (bytes, Immutable):
            return NOBODY  # it cannot change
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
        here = [found for found in self._found[device][first:last] if found[1] > start]
        owner = max((owner for _, _, owner in here), default=NOBODY)
        if any(other.kind is OwnerKind.OPTIMIZER and other != owner for _, _, other in here):
            return None
        whole = any(low <= start and stop <= high for low, high, its in here if its == owner)
        return owner if whole else None


def _without_parts(found: list[tuple[int, int, Owner]]) -> Iterator[tuple[int, int, Owner]]:
    """Sorted, without what is part of another of the same owner: views of one large buffer, say."""
    reach: dict[Owner, int] = {}
    for start, stop, owner in sorted(found, key=lambda item: (item[0], -item[1], item[2])):
        if stop > reach.get(owner, 0):
            reach[owner] = stop
            yield start, stop, owner


def owners(state: object, hooks: Hooks, *, updates: bool) -> Owners:
    """Who owns what now. `updates`: the user announces changes of parameters that no optimizer owns."""
    found = Owners()
    owned: set[int] = set()
    for owner, optimizer in hooks.optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.add(parameter, owner)
                owned.add(id(parameter))
        # One that divides its state among ranks steps through another, and changes all parameters afterwards.
        holder = optimizer.optim if is_zero(optimizer) else optimizer
        for tensor in _tensors(list(holder.state.values())):
            found.add(tensor, owner)
    for _, module in modules_in(state):
        parameters = list(module.parameters())
        trained = updates or any(id(parameter) in owned for parameter in parameters)
        for parameter in parameters:
            if id(parameter) in owned:
                continue
            if not parameter.requires_grad and trained:
                found.add(parameter, FROZEN)
            elif parameter.requires_grad and updates:
                found.add(parameter, UPDATE)
    if updates:
        for tensor in _tensors(state):
            if tensor.requires_grad:
                found.add(tensor, UPDATE)
    for array in _stable_arrays():
        found.add(array, NOBODY)
    found.seal()
    return found


def find_optimizers(state: object, given: Iterable[Any] | None) -> list[Any]:
    return list(optimizers_in(state)) if given is None else list(given)


# --- the user's word ----------------------------------------------------------------------------------------

_stable: dict[int, weakref.ref[Any]] = {}


def stable(x: T) -> T:
    """Promises that the arrays of `x` change only between a step of a hooked optimizer and the next save.

    They are then read in place instead of being copied: for averages of weights that are updated right after
    the optimizer's step, or large tables that never change. Returns `x`.

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
    elif isinstance(x, Mark):
        yield from _arrays(x.value)
    elif is_module(x):
        yield from x.parameters()  # type: ignore[attr-defined]
        yield from x.buffers()  # type: ignore[attr-defined]
    else:
        raise TypeError(f"stable() takes arrays, tensors, modules, and containers of them, not {type(x)}")


def _stable_arrays() -> Iterator[Any]:
    for reference in list(_stable.values()):
        array = reference()
        if array is not None:
            yield array


# --- memory -------------------------------------------------------------------------------------------------


def _tensors(value: object) -> Iterator[Any]:
    """The tensors in nested containers."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mark):
        yield from _tensors(value.value)


def _extent(array: Any) -> tuple[str, int, int]:
    """Device, first and last address of an array's memory. Empty for what has none."""
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
