"""One save on its way: the part of the training's thread, and the part that runs beside it.

The training's thread takes the state apart, starts a `PendingSave`, and goes on. The commit runs on a thread
of its own (in ``mode="sync"``, on the caller's). Whoever is about to change what is read in place calls
`release`, which waits until those bytes have left memory and makes sure that they were still the ones to be
saved.

The thread is not a daemon: an interpreter that ends waits for the checkpoint that is under way.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from holdfast.checkpointer.guard import Guard
from holdfast.checkpointer.ownership import NOBODY
from holdfast.checkpointer.staging import Division
from holdfast.engine import WriteJob, forks
from holdfast.errors import EngineTimeout, MutatedDuringSave, SaveFailed
from holdfast.plan import ShardPlan
from holdfast.state import LeafSource
from holdfast.store import CheckpointInfo, SaveObserver


class PendingSave(SaveObserver):
    """A save that was started. It is durable once `wait` has returned."""

    def __init__(
        self,
        step: int,
        division: Division,
        commit: Callable[[PendingSave], CheckpointInfo],
        make_way: Callable[[int], None],
        take_over: Callable[[int], None],
    ) -> None:
        self.step = step
        self._pid, self._forks = os.getpid(), forks()
        self._make_way = make_way
        self._take_over = take_over
        self._division = division
        self._urgent = bool(division.urgent)
        self._guard = Guard(division.in_place)
        self._commit: Callable[[PendingSave], CheckpointInfo] | None = commit
        self._lock = threading.Lock()
        self._reading = threading.Event()
        self._ended = threading.Event()
        self._runner: int | None = None
        self._jobs: list[WriteJob] = []
        self._plan_nbytes = 0
        # How far each file must have been read before an owner may change its leaves, or the save returns.
        self._ends: dict[int, list[int]] = {}
        self._urgent_ends: list[int] = []
        self._changed: list[str] = []
        self._given_up: str | None = None
        self._hopeless = False
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._reported = False
        self._stalled = 0.0
        self._stalling_since: float | None = None

    # --- for everybody

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Returns when the checkpoint is durable, and raises what went wrong."""
        if not self.done and forks() != self._forks:
            raise RuntimeError(
                f"the save of step {self.step} runs in process {self._pid}, of which this is a forked child: "
                "only that process can wait for it"
            )
        with self.stalling():
            ended = self._ended.wait(timeout)
        if not ended:
            raise EngineTimeout(f"step {self.step} was not durable within {timeout} s; its save goes on")
        error = self.take_error()
        if error is not None:
            raise error
        if self._info is None:
            raise SaveFailed(f"the save of step {self.step} failed; its error was raised already")
        return self._info

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have left memory, and all bytes."""
        return sum(job.progress for job in self._jobs), self._plan_nbytes

    def __repr__(self) -> str:
        how = "under way" if not self.done else "durable" if self._info is not None else "failed"
        return f"<save of step {self.step}, {how}>"

    # --- for the Checkpointer

    @property
    def in_place_nbytes(self) -> int:
        return sum(leaf.nbytes for group in self._division.in_place.values() for leaf in group)

    @property
    def copied_nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._division.copied)

    @property
    def groups(self) -> list[list[LeafSource]]:
        """The leaves in the order in which they shall leave memory."""
        return self._division.groups()

    @property
    def stall_seconds(self) -> float:
        """How long training has waited for it so far."""
        since = self._stalling_since
        return self._stalled + (time.perf_counter() - since if since is not None else 0.0)

    def add_stall(self, seconds: float) -> None:
        self._stalled += seconds

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """The training's thread waits in this block."""
        began = self._stalling_since = time.perf_counter()
        try:
            yield
        finally:
            self._stalling_since = None
            self._stalled += time.perf_counter() - began

    def run(self) -> None:
        """The commit, on this thread. Whatever happens is told by `take_error`, never raised here."""
        self._runner = threading.get_ident()
        commit, self._commit = self._commit, None
        assert commit is not None, "a save runs once"
        try:
            self._info = commit(self)
        except BaseException as error:
            self._error = error if self._given_up is None else self._abandoned(self._given_up)
            self._error.__cause__ = self._error.__cause__ or (None if self._error is error else error)
        finally:
            del commit  # with these go the references to the caller's arrays
            self._jobs = []
            self._division = Division()
            self._ended.set()
            self._reading.set()

    def interrupted(self, error: BaseException) -> None:
        """On the training's thread, by Ctrl-C: a save that runs nowhere else has ended with that."""
        if self._commit is None and self._runner != threading.get_ident():
            return  # on its own thread, which goes on
        self._error, self._reported = error, True
        self._ended.set()
        self._reading.set()

    def start(self) -> None:
        """The commit, beside the training. In the interpreter's last moments, on this thread: no other is
        waited for any more."""
        if not threading.main_thread().is_alive():
            self.run()
            return
        thread = threading.Thread(target=self.run, name=f"holdfast-step-{self.step}", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the interpreter is ending
            self.run()

    def join(self, timeout: float | None) -> bool:
        """Waits for the end, well or not."""
        with self.stalling():
            return self._ended.wait(timeout)

    def take_error(self) -> BaseException | None:
        """What went wrong, to the first who asks."""
        with self._lock:
            if not self._ended.is_set() or self._reported:
                return None
            self._reported = True
            return self._error

    def release(self, owner: int | None, timeout: float) -> None:
        """Returns when an owner (None: everybody) may change its leaves: they have left memory.

        The last owner waits until the checkpoint is durable. Its change completes a step, and no step shall
        be completed before the checkpoint of an earlier one is safe: a crash then costs one step, not two.

        When the bytes have not left in time, the save is given up rather than the training held up: what it
        goes on to read may change, so nothing of it is committed.
        """
        if self.done or self._hopeless:
            return
        end = time.monotonic() + timeout
        with self.stalling():
            if not self._leave(self._end(owner) if self._reading.wait(timeout) else None, end):
                self.give_up(f"its bytes had not left memory after {timeout:g} s")
                return
            with self._lock:
                self._changed += self._guard.take(owner)
                if owner is not None:
                    self._changed += self._guard.take(NOBODY)
                last = not self._guard.owners
            if last and not self._ended.wait(max(0.0, end - time.monotonic())):
                self._hopeless = True  # it may become durable yet, but nobody waits for that any more

    def leave_urgent(self, timeout: float) -> None:
        """Waits until all that could not be copied has left memory."""
        if not self._urgent:
            return
        end = time.monotonic() + timeout
        try:
            left = self._leave(self._urgent_ends if self._reading.wait(timeout) else None, end)
        except BaseException:  # Ctrl-C: the caller goes on to change what has not been read
            self.give_up("it was interrupted before the state had left memory")
            raise
        if not left:
            self.give_up(f"its bytes had not left memory after {timeout:g} s")

    def _leave(self, ends: Sequence[int] | None, end: float) -> bool:
        """Whether so many bytes of each file have left in time; None: it was not even begun."""
        if ends is None:
            return False
        return all(
            job.wait_for_nbytes(nbytes, max(0.0, end - time.monotonic()))
            for job, nbytes in zip(self._jobs, ends, strict=False)
        )

    def give_up(self, why: str) -> None:
        """It shall not become a checkpoint. Ends soon; one that has been committed meanwhile stays."""
        with self._lock:
            self._given_up = why
            self._hopeless = True
            jobs = self._jobs
        for job in jobs:
            job.cancel()

    def _end(self, owner: int | None) -> list[int]:
        wanted = (
            self._ends.values() if owner is None else [self._ends.get(key, []) for key in (owner, NOBODY)]
        )
        return [max(ends) for ends in zip_longest(*wanted, fillvalue=0)]

    # --- SaveObserver: called by the commit

    def writing(self, files: Sequence[tuple[ShardPlan, WriteJob]]) -> None:
        owner_of = {id(leaf): owner for owner, group in self._division.in_place.items() for leaf in group}
        urgent = {id(leaf) for leaf in self._division.urgent}
        ends: dict[int, list[int]] = {owner: [0] * len(files) for owner in self._division.in_place}
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
            given_up = self._given_up
        if given_up is not None:
            for _, job in files:
                job.cancel()
        self._reading.set()

    def written(self) -> None:
        with self._lock:
            self._changed += self._guard.take()
            given_up = self._given_up
        if given_up is not None:
            raise self._abandoned(given_up)
        if self._changed:
            raise self._mutated(self._changed)

    def committing(self) -> None:
        self._make_way(self.step)

    def committed(self) -> None:
        self._take_over(self.step)

    def _mutated(self, leaves: list[str]) -> MutatedDuringSave:
        more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        return MutatedDuringSave(
            f"the save of step {self.step} failed: {', '.join(leaves[:3])}{more} changed meanwhile, "
            "outside of a hooked optimizer's step. Earlier checkpoints are untouched. "
            "These are copied from now on. To have them read in place, bracket such changes with "
            "`with checkpointer.update():`, or give their optimizer as optimizers=[...]",
            leaves=leaves,
        )

    def _abandoned(self, why: str) -> SaveFailed:
        return SaveFailed(
            f"the save of step {self.step} was given up: {why}. Earlier checkpoints are untouched; "
            "look at the device (`holdfast doctor`), or save less often"
        )
