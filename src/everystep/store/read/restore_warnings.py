"""What a restore warns of: what it did not restore, and what stays as it was.

One wording for all restores: of one process (`everystep.store.checkpoint`), and of several ranks
(`everystep.store.ranks.shared_load`), where each rank warns of its own state and rank 0 of what concerns all.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from everystep.caller import stack_level
from everystep.state import Mismatch, Restore

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Unrestored:
    """What one rank's restore left as it was, or left out.

    `mismatch`: what the target and the checkpoint do not both have. `kept`: per-rank state of the target that
    the checkpoint does not have for this rank. `left_out`: per-rank state of the checkpoint that the target
    has no place for. `beyond`: per-rank state that ranks saved which this world does not have.
    """

    mismatch: Mismatch
    kept: Sequence[str]
    left_out: Sequence[str]
    beyond: Sequence[str] = ()

    @classmethod
    def of(cls, restore: Restore, mismatch: Mismatch, beyond: Collection[str] = ()) -> Unrestored:
        """`beyond`: the per-rank state of the checkpoint, if ranks that are not there any more have saved."""
        kept_out = set(restore.left_out)
        places = [place for place in beyond if place not in kept_out]
        return cls(mismatch, restore.kept, restore.left_out, places)

    def texts(self, rank: int, world: int, saved_world: int) -> list[str]:
        """One text for each kind; `saved_world` ranks have saved the checkpoint, `world` load it."""
        found = []
        if self.mismatch:
            found.append(f"{self.mismatch}{self.mismatch.hint()}\n  All else has been restored.")
        if self.kept:
            found.append(
                f"{_some(self.kept)} of rank {rank} stays as it is: it is marked per_rank, and the "
                f"checkpoint (saved by {_ranks(saved_world)}) has none of rank {rank}"
            )
        if self.left_out:
            found.append(
                f"the per_rank state of rank {rank} was not restored, because the target has no place for "
                f"it: {_some(self.left_out)}"
            )
        if self.beyond:
            last = saved_world - 1
            whose = f"rank {last}" if last == world else f"ranks {world} to {last}"
            found.append(
                f"the per_rank state of {whose} was not restored, because only {_ranks(world)} loaded the "
                f"checkpoint: {_some(self.beyond)}"
            )
        return found

    def warn(self, path: str, rank: int, world: int, saved_world: int) -> None:
        """Warns the line of the user's code that asked for the restore."""
        for text in self.texts(rank, world, saved_world):
            warnings.warn(f"{path}: {text}", RuntimeWarning, stacklevel=stack_level())


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
