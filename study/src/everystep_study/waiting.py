"""How long a rank waits for others inside of a save: the time in messages and collectives, whoever sends
them.

Only for the processes of benchmarks (`rank`): it replaces functions of torch. Everystep's messages go through
the process group's store, so waiting for them is waiting for a key there.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

_COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
)
_STORE = ("get", "multi_get", "wait")


class WaitingClock:
    """Sums up the seconds in which at least one thread was inside of such a call; they may be nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0

    def install(self) -> None:
        import torch.distributed as dist

        for name in _COLLECTIVES:
            setattr(dist, name, self._timed(getattr(dist, name)))
        kinds: tuple[type, ...] = (dist.Store, dist.TCPStore, dist.PrefixStore)  # type: ignore[attr-defined]
        for kind in kinds:
            for name in _STORE:
                if name in vars(kind):
                    setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._inside += 1
                if self._inside == 1:
                    self._since = time.monotonic()
            try:
                return call(*arguments, **options)
            finally:
                with self._lock:
                    self._inside -= 1
                    if not self._inside:
                        self.seconds += time.monotonic() - self._since

        return timed
