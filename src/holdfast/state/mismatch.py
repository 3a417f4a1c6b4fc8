"""What a checkpoint says about its leaves, and where it does not fit a target.

Owns the two records and their words; `restore` does the comparing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.errors import StateMismatch
from holdfast.state.arrays import Framework
from holdfast.state.node import shorten
from holdfast.state.targets import describe


class LeafMeta(msgspec.Struct, frozen=True):
    """What a checkpoint says about one leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    framework: Framework

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where checkpoint and target do not fit; true when there is such a place."""

    missing: tuple[str, ...]
    """The target has it, the checkpoint does not."""
    extra: tuple[str, ...]
    """The checkpoint has it, the target does not."""
    wrong: tuple[str, ...]
    """Both have it, but not alike: ``name: checkpoint F32[3,4], target F32[4,4]``."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.wrong)

    def __str__(self) -> str:
        parts = [
            f"{title} ({len(names)}):\n    " + "\n    ".join(_abridged(names))
            for title, names in (
                ("missing from the checkpoint", self.missing),
                ("not in the target", self.extra),
                ("different", self.wrong),
            )
            if names
        ]
        return "\n  ".join(["checkpoint and target do not fit", *parts])

    def error(self, where: str = "") -> StateMismatch:
        return StateMismatch(
            f"{where}{': ' if where else ''}{self}\n"
            "  Nothing has been changed. Fix the target, or pass strict=False to restore what fits.",
            missing=self.missing,
            extra=self.extra,
            wrong=self.wrong,
        )


def _abridged(names: tuple[str, ...], limit: int = 20) -> list[str]:
    shown = [shorten(name, 200) for name in names[:limit]]
    return shown if len(names) <= limit else [*shown, f"... and {len(names) - limit} more"]
