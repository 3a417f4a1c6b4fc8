"""Whether a checkpoint fits the training that is to load it, where a framework does the loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from everystep.errors import StateMismatch
from everystep.state.mismatch import Mismatch

Shapes = Mapping[str, Sequence[int]]
"""The shapes of arrays, by name."""


def require_fit(saved: Shapes, own: Shapes, where: str = "") -> None:
    """`StateMismatch` that lists what differs, unless both have the same names and shapes."""
    missing = tuple(name for name in own if name not in saved)
    extra = tuple(name for name in saved if name not in own)
    wrong = tuple(
        f"{name}: checkpoint {list(shape)}, target {list(own[name])}"
        for name, shape in saved.items()
        if name in own and tuple(shape) != tuple(own[name])
    )
    found = Mismatch(missing, extra, wrong, stored=saved.keys())
    if found:
        raise StateMismatch(
            f"{where}{': ' if where else ''}{found}", missing=missing, extra=extra, wrong=wrong
        )


def merged(groups: Iterable[Shapes]) -> dict[str, Sequence[int]]:
    """The shapes of all groups, as an optimizer has them, in one."""
    return {name: shape for group in groups for name, shape in group.items()}
