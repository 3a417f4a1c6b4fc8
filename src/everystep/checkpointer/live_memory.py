"""The state's own memory while a save reads it: which of it may change by now, and whether it changed before.

A save reads some leaves in place, while training goes on. An owner that is about to change such leaves calls
`leave`, which waits until their bytes have left memory, and then looks whether they are still the ones that
were to be saved. Leaves that could be neither copied nor left in place are urgent: `leave_urgent` waits for
them before `Checkpointer.save` returns.

When bytes do not leave in time, the save is abandoned: training goes on to change them, so nothing of that
save may be committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import zip_longest

from everystep.checkpointer.guard import Guard
from everystep.checkpointer.ownership import UNCHANGED, Owner
from everystep.checkpointer.staging import Division
from everystep.engine import WriteJob
from everystep.engine.threads import Latch
from everystep.errors import DeviceTimeout, MutatedDuringSave, SaveFailed
from everystep.plan import ShardPlan
from everystep.state import LeafSource


class LiveMemory:
    """Of one save, from its start to its end. The training's thread and the save's thread use it."""

    def __init__(self, step: int, division: Division) -> None:
        self._step = step
        self._division = division
        self._urgent = bool(division.urgent)
        self._guard = Guard(division.in_place)
        self._lock = threading.Lock()
        self._reading = Latch()
        self._jobs: list[WriteJob] = []
        self._plan_nbytes = 0
        # How far each file must have been read before an owner may change its leaves, or the save returns.
        self._ends: dict[Owner, list[int]] = {}
        self._urgent_ends: list[int] = []
        self._changed: list[str] = []
        self._abandoned: str | None = None
        self._late = False
        self.interrupted = False
        """The training was interrupted while it waited for its memory to be read, and may change it now."""
        self.in_place_nbytes = division.in_place_nbytes
        self.copied_nbytes = division.copied_nbytes

    @property
    def groups(self) -> list[list[LeafSource]]:
        """The leaves in the order in which they leave memory."""
        return self._division.groups()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have left memory, and all bytes."""
        return sum(job.progress for job in self._jobs), self._plan_nbytes

    @property
    def is_abandoned(self) -> bool:
        return self.interrupted or self._abandoned is not None

    def abandoned_error(self) -> SaveFailed:
        """The error of a save that was abandoned."""
        why = self._abandoned or "it was interrupted before the state had left memory"
        what = f"the save of step {self._step} was abandoned: {why}. Earlier checkpoints are untouched"
        if not self._late:
            return SaveFailed(what)
        return DeviceTimeout(f"{what}; look at the device (`everystep doctor`), or save less often")

    # --- on the training's thread

    def leave(self, owner: Owner | None, timeout: float) -> bool:
        """Waits until an owner (None: every owner) may change its leaves: their bytes have left memory.

        Returns whether these were the last leaves that any owner waits for. Abandons the save when the bytes
        do not leave in time.
        """
        end = time.monotonic() + timeout
        if not self._wait_for(self._end_of(owner) if self._reading.wait(timeout) else None, end):
            self._abandon(f"its bytes had not left memory after {timeout:g} s", late=True)
            return False
        with self._lock:
            self._changed += self._guard.take(owner)
            if owner is not None:
                self._changed += self._guard.take(UNCHANGED)
            return not self._guard.owners

    def leave_urgent(self, timeout: float) -> None:
        """Waits until all bytes that could not be copied have left memory; else abandons the save."""
        if not self._urgent:
            return
        end = time.monotonic() + timeout
        if not self._wait_for(self._urgent_ends if self._reading.wait(timeout) else None, end):
            self._abandon(f"its bytes had not left memory after {timeout:g} s", late=True)

    def _abandon(self, why: str, *, late: bool) -> None:
        """The save must not become a checkpoint. It ends soon. If it was committed meanwhile, it stays."""
        with self._lock:
            self._abandoned, self._late = why, late
        self.cancel()

    def cancel(self) -> None:
        """The engine reads no more."""
        for job in self._jobs:
            job.cancel()

    def _wait_for(self, ends: Sequence[int] | None, end: float) -> bool:
        """Whether these numbers of bytes of the files have left in time; None: the engine has not begun."""
        if ends is None:
            return False
        return all(
            job.wait_for_nbytes(nbytes, max(0.0, end - time.monotonic()))
            for job, nbytes in zip(self._jobs, ends, strict=False)
        )

    def _end_of(self, owner: Owner | None) -> list[int]:
        wanted = (
            self._ends.values() if owner is None else [self._ends.get(key, []) for key in (owner, UNCHANGED)]
        )
        return [max(ends) for ends in zip_longest(*wanted, fillvalue=0)]

    # --- on the save's thread

    def writing(self, files: Sequence[tuple[ShardPlan, WriteJob]]) -> None:
        """The engine reads the leaves from now on, for these files."""
        owner_of = {id(leaf): owner for owner, group in self._division.in_place.items() for leaf in group}
        urgent = {id(leaf) for leaf in self._division.urgent}
        ends: dict[Owner, list[int]] = {owner: [0] * len(files) for owner in self._division.in_place}
        urgent_ends = [0] * len(files)
        for number, (plan, _) in enumerate(files if owner_of or urgent else ()):
            for leaf, offset in zip(plan.leaves, plan.offsets, strict=True):
                owner = owner_of.get(id(leaf))
                if owner is not None:
                    ends[owner][number] = max(ends[owner][number], offset + leaf.nbytes)
                elif id(leaf) in urgent:
                    urgent_ends[number] = max(urgent_ends[number], offset + leaf.nbytes)
        with self._lock:
            self._ends, self._urgent_ends = ends, urgent_ends
            self._plan_nbytes = sum(plan.nbytes for plan, _ in files)
            self._jobs = [job for _, job in files]
            abandoned = self.is_abandoned
        if abandoned:
            for _, job in files:
                job.cancel()
        self._reading.set()

    def written(self) -> None:
        """The engine has read all leaves. Raises if one changed meanwhile, or the save is abandoned."""
        with self._lock:
            self._changed += self._guard.take()
        if self.is_abandoned:
            raise self.abandoned_error()
        if self._changed:
            raise self._mutated(self._changed)

    def end(self) -> None:
        """The save has ended: forgets the state's arrays, and ends all waits."""
        with self._lock:
            self._jobs = []
            self._division = Division()
            self._guard = Guard({})
        self._reading.set()

    def _mutated(self, leaves: list[str]) -> MutatedDuringSave:
        more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        return MutatedDuringSave(
            f"the save of step {self._step} failed: {', '.join(leaves[:3])}{more} changed meanwhile, "
            "outside a hooked optimizer's step. Earlier checkpoints are untouched. "
            "The next saves copy these leaves. To have them read in place, make such changes inside "
            "`with checkpointer.update():`, or give their optimizer as optimizers=[...]",
            leaves=leaves,
        )
