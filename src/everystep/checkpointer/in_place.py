"""Checks that a state can be restored in place: training goes on with its own references to its objects.

Looks at the top of a state only. Further down, a dict, a list or an object holds the value that replaces one
which cannot be changed. At the top nothing does, and the restored value would be lost silently.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from everystep.errors import StateMismatch
from everystep.state.marks import PerRank
from everystep.state.node import NAMELESS
from everystep.state.targets import MAPPINGS, is_array
from everystep.state.torch_objects import is_stateful

_CONTAINERS = (*MAPPINGS, list, deque, set, bytearray, PerRank)
_ADVICE = 'Put it in a dict, such as {"w": w, "epoch": 0}, and take it from there after restore()'


def refuse_fixed(state: object, place: str = "") -> None:
    """Raises if an object at the top cannot be restored in place, such as a number or a read-only array.

    A tuple can be if its items can, since training refers to those.
    """
    if type(state) is tuple:
        for index, item in enumerate(state):
            refuse_fixed(item, f"{place}.{index}" if place else str(index))
    elif not _takes(state):
        kind = f"{'read-only ' if is_array(state) else ''}{type(state).__name__}"
        raise StateMismatch(
            f"{f'state.{place}' if place else 'the state'} cannot be restored: no dict, list or object holds "
            f"this {kind}, so you would keep the one you have. {_ADVICE}",
            wrong=[place or NAMELESS],
        )


def refuse_replaced(state: object, restored: object, checkpoint: str) -> None:
    """Raises if the restored object is not the state itself, but a new one in its place."""
    if not _same(state, restored):
        raise StateMismatch(
            f"{checkpoint} holds a {type(restored).__name__} that cannot be put back into the state, "
            f"a {type(state).__name__}: the state is not what was saved. Give the Checkpointer a state of "
            "that form",
            wrong=[NAMELESS],
        )


def _takes(state: Any) -> bool:
    if is_array(state):
        flags = getattr(state, "flags", None)  # numpy's; whether torch can write is seen when it is done
        return flags is None or bool(flags.writeable)
    return isinstance(state, _CONTAINERS) or is_stateful(state)


def _same(state: object, restored: object) -> bool:
    if type(state) is tuple and type(restored) is tuple:
        return len(state) == len(restored) and all(map(_same, state, restored))
    return state is restored
