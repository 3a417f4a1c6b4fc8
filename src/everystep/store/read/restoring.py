"""Restoring a checkpoint into a target: what goes where, and warnings about what was not restored.

A restore by one process is here as a whole. A restore by several ranks (`everystep.store.ranks.shared_load`)
uses the same comparison and the same warnings: each rank warns about its own state, and rank 0 about what
concerns all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everystep.caller import stack_level
from everystep.state import Framework, Mismatch, Restore
from everystep.store.read.leaf_reader import LeafReader
from everystep.store.read.requests import box_requests, boxes_of_targets
from everystep.store.read.selection import select_state

_SHOWN = 8


def refuse_fresh(framework: Framework | None, device: Any) -> None:
    """For a load into a target: `TypeError` for arguments about new arrays."""
    given = "framework=" if framework is not None else "device=" if device is not None else None
    if given is not None:
        raise TypeError(f"{given} goes with fresh arrays; with into= the target decides")


def compare_target(
    reader: LeafReader,
    into: object,
    select: str | Iterable[str] | None = None,
    *,
    rank: int = 0,
    shared: bool = False,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> Restore:
    """How the state `into` of a rank is to be filled. Whether all of it fits is for the caller to judge.

    Read its `box_requests` and `boxes_of_targets`, read new arrays for its `fresh`, and give these to its
    `finish`. `shared`: other ranks have the rest of what is split among them.
    """
    parts = reader.parts
    return Restore(
        into,
        parts.tree,
        parts.metas_for(rank),
        parts.aliases_for(rank),
        None if select is None else select_state(parts, select, rank=rank),
        local=parts.local(rank),
        shared=shared,
        alike=reader.alike,
        rename=rename,
        strict=strict,
    )


def restore_into(
    reader: LeafReader,
    into: object,
    select: str | Iterable[str] | None,
    *,
    verify: bool,
    strict: bool,
    rename: Callable[[str], str] | None,
) -> object:
    """Fills the state `into` of one process. With `strict`, `StateMismatch` unless all of it fits."""
    parts = reader.parts
    restore = compare_target(reader, into, select, strict=strict, rename=rename)
    if restore.mismatch and strict:
        raise restore.mismatch.error(parts.path)
    if restore.lacks and not restore.fills:
        raise restore.mismatch.nothing(parts.path)
    arrays, wanted = reader.fresh(restore.fresh)
    wanted += [*box_requests(restore, parts.metas_for(0), 0), *boxes_of_targets(restore)]
    reader.fetch(wanted, verify=verify)
    restored = restore.finish(arrays)
    beyond = parts.local(0) if parts.root.world > 1 and select is None else {}
    unrestored = Unrestored.of(restore, restore.mismatch, beyond)
    unrestored.warn(parts.path, rank=0, world=1, saved_world=parts.root.world)
    return restored


@dataclass(frozen=True, slots=True)
class Unrestored:
    """What one rank's restore left unchanged in the target, or did not take from the checkpoint.

    `mismatch`: what only the target or only the checkpoint has. `kept`: per-rank state of the target that
    the checkpoint does not have for this rank. `left_out`: per-rank state of the checkpoint that the target
    has no place for. `beyond`: per-rank state that ranks saved which this world does not have.
    """

    mismatch: Mismatch
    kept: Sequence[str]
    left_out: Sequence[str]
    beyond: Sequence[str] = ()

    @classmethod
    def of(cls, restore: Restore, mismatch: Mismatch, beyond: Collection[str] = ()) -> Unrestored:
        """`beyond`: the per-rank state of the checkpoint, if more ranks saved it than there are now."""
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
        """Warns, with the line of the user's code that called the restore."""
        for text in self.texts(rank, world, saved_world):
            warnings.warn(f"{path}: {text}", RuntimeWarning, stacklevel=stack_level())


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
