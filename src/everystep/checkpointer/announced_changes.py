"""Which changes of the state are announced before they are made: by hooked optimizers, and by `update`.

Owns whether a save may overlap with training at all. Which leaves an announcement covers is `ownership`'s.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from everystep.caller import stack_level
from everystep.checkpointer.ownership import Owner, OwnerKind, OwnerOf, owners
from everystep.engine import forks
from everystep.state.torch_objects import is_optimizer, optimizers_in

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class AnnouncedChanges:
    """What announces changes in one training.

    Args:
        before_step: It is called with the owner before a hooked optimizer changes anything.
        optimizers: Those to hook; None: all that are in the state.
    """

    def __init__(self, before_step: Callable[[Owner], None], optimizers: Sequence[Any] | None = None) -> None:
        # Weak: an optimizer that outlives its Checkpointer must not keep it, and its run's lock.
        self._before_step = weakref.WeakMethod(before_step)
        self._optimizers = None if optimizers is None else list(optimizers)
        # Weak, too: one that was replaced goes when the training lets go of it.
        self._hooked: weakref.WeakValueDictionary[Owner, Any] = weakref.WeakValueDictionary()
        self._handles: dict[Owner, Any] = {}
        self._numbers = itertools.count()
        self._has_updates = False
        self._updating = 0
        self._noticed = False

    def attach(self, state: object) -> None:
        """Hooks the optimizers of the state, and no others: one that has left it owns nothing of it.

        One that cannot be hooked is left out, and its tensors are copied.
        """
        self._hook_only(optimizers_in(state) if self._optimizers is None else self._optimizers)

    def detach(self) -> None:
        self._hook_only(())

    @property
    def hooked(self) -> dict[Owner, Any]:
        """The optimizers that are hooked, by owner."""
        return dict(self._hooked)

    def _hook_only(self, optimizers: Iterable[Any]) -> None:
        wanted = {id(optimizer): optimizer for optimizer in map(_innermost, optimizers)}
        known = {owner: id(optimizer) for owner, optimizer in self._hooked.items()}
        for owner in [owner for owner in self._handles if known.get(owner) not in wanted]:
            self._handles.pop(owner).remove()
            self._hooked.pop(owner, None)
        hooked = set(known.values())
        for identity, optimizer in wanted.items():
            register = getattr(optimizer, "register_step_pre_hook", None)
            if identity in hooked or register is None or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                continue
            owner = Owner(OwnerKind.OPTIMIZER, next(self._numbers))
            self._handles[owner] = register(self._hook(owner))
            self._hooked[owner] = optimizer

    def _hook(self, owner: Owner) -> Hook:
        before_step = self._before_step
        here = forks()

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            call = before_step()
            if call is not None and forks() == here:  # a forked child has its own copy of everything
                call(owner)

        return _hidden_from_compiler(hook)

    @property
    def announced(self) -> bool:
        """Whether anything announces its changes, so that leaves may be read in place now.

        Not inside an `update`: there they change at any moment.
        """
        return not self._updating and (self._has_updates or bool(self._hooked))

    @contextmanager
    def update(self) -> Iterator[None]:
        """The user changes the state in this block, and from now on only in such blocks."""
        self._has_updates = True
        self._updating += 1
        try:
            yield
        finally:
            self._updating -= 1

    def owner_of(self, state: object) -> OwnerOf:
        """The owner of each leaf that may be read in place now."""
        return owners(state, self.hooked, updates=self._has_updates).of

    def warn_if_none(self) -> None:
        """Warns, once, that saves cannot overlap with training."""
        if self.announced or self._updating or self._noticed:
            return
        self._noticed = True
        warnings.warn(
            "the state holds no optimizer whose steps could be waited for, so saves copy it first "
            '(mode="snapshot"). To overlap, give optimizers=[...] to the Checkpointer, or change the weights '
            "inside `with checkpointer.update():`",
            RuntimeWarning,
            stacklevel=stack_level(),
        )


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
    """The optimizer that really steps, inside wrappers that keep it as ``.optimizer``."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not is_optimizer(inner):
            break
        optimizer = inner
    return optimizer


class LateStep:
    """An optimizer as a `Checkpointer` sees it: its step begins when it changes the weights.

    A save that was awaited when ``optimizer.step`` is called would overlap with nothing. So the framework's
    module gives these as `optimizers` to its `Checkpointer`, and calls `begin` when gradients are ready.
    """

    def __init__(self, optimizer: Any) -> None:
        self._own = optimizer
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    @property
    def param_groups(self) -> Any:
        return self._own.param_groups

    @property
    def state(self) -> Any:
        return self._own.state

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        from torch.utils.hooks import RemovableHandle

        handle = RemovableHandle(self._optimizer_step_pre_hooks)
        self._optimizer_step_pre_hooks[handle.id] = hook
        return handle

    def begin(self, optimizer: Any) -> None:
        """The optimizer is about to change the weights. Those of other optimizers do not."""
        if optimizer is self._own:
            for hook in list(self._optimizer_step_pre_hooks.values()):
                hook(optimizer, (), {})
