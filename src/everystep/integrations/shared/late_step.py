"""For frameworks that run forward and backward inside of ``optimizer.step``, in a closure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


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
