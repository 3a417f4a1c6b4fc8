"""`Checkpointer`: durable checkpoints of a training loop, and resuming from the newest one that is whole.

Owns what the user calls, and the order in which it happens. The steps of one save are `save_task`'s, finding
what to resume from is `restore`'s, when to save and when to end is `preemption`'s and `schedule`'s, and
which checkpoints stay is `retention`'s.
"""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from types import TracebackType
from typing import Any, overload

from everystep.caller import stack_level
from everystep.checkpointer.announced_changes import AnnouncedChanges
from everystep.checkpointer.events import EventLog, Preempted
from everystep.checkpointer.keep import Keep
from everystep.checkpointer.opening import Arguments, Mode, OnError, open_context, register
from everystep.checkpointer.ownership import Owner
from everystep.checkpointer.pending_save import PendingSave
from everystep.checkpointer.preemption import PreemptionDuty, checked_exit_code
from everystep.checkpointer.restore import Beginning, Into, restore
from everystep.checkpointer.run_observer import Closed, Completed
from everystep.checkpointer.save_task import SaveTask
from everystep.checkpointer.schedule import Schedule
from everystep.engine import forks
from everystep.errors import DeviceTimeout, EngineTimeout
from everystep.paths import local_path
from everystep.state.mismatch import offering
from everystep.state.targets import Rebuilt
from everystep.store import Options, WritableRun, check_step, list_steps
from everystep.store.ranks.group import ProcessGroup
from everystep.store.read.foreign import renaming


class Checkpointer:
    """Saves the state of a training into a run directory, and restores it. One per run and training.

    Bind the state once, as below, or pass the state to each save (`save` says when). A run belongs to one
    training: if it holds checkpoints already, call `restore` before the first save, otherwise that save
    raises `RunInUse`.

    Under ``torch.distributed`` every rank makes a Checkpointer with the same run and its own state, and all
    ranks call the same methods. Each writes its share of one checkpoint. The coordinator, rank 0, decides
    when to save.

    Args:
        run: The directory of the run. It is made if it does not exist.
        state: Any nesting of dicts, lists and tuples with tensors, arrays, values, and objects that have
            ``state_dict``/``load_state_dict``. Each save stores what they are then. None: pass the state to
            each `save`, and to `restore` as `into`.
        every: When to save: a number of steps, a time such as ``"30s"``, or ``"auto"``: as often as `budget`
            allows, or as is best for `mtbf`.
        keep: Which checkpoints stay in the run.
        mode: ``"overlap"``: a save returns at once and is written while the next forward and backward run; an
            optimizer's next step waits for what it would change. Without an optimizer, "overlap" falls back
            to "snapshot" and says so. ``"snapshot"``: a save returns when every byte has left the state's
            memory. What fits `Options.memory_nbytes` is copied at once, the rest goes at the disk's pace.
            ``"sync"``: a save returns when the checkpoint is durable.
        options: How to write.
        optimizers: The optimizers whose steps wait for saves. None: all optimizers in the state.
        budget: The share of time that saves may cost with ``every="auto"``.
        mtbf: Seconds between failures, or a time such as ``"6h"``, for ``every="auto"``.
        on_error: Whether the next call raises the error of a save that failed in the background, or warns.
        timeout: Seconds after which training no longer waits for a device or for another rank.
        preemption: Whether SIGTERM and SIGUSR1 make the next call of `save` save and end the process.
        preemption_exit_code: The exit code of a process that ends so. Many schedulers take 0 for finished,
            and start a process again that ends with another code.
        start_over: Whether a new training takes over a run that holds checkpoints, without `restore`. The old
            ones are removed when its first checkpoint is durable, at every launch of such a script.
        process_group: Some ranks instead of all; ``"none"``: this rank has the run to itself.

    >>> import everystep, numpy, tempfile
    >>> state = {"w": numpy.zeros(3)}
    >>> with everystep.Checkpointer(tempfile.mkdtemp(), state, mode="snapshot") as ckpt:
    ...     for step in range(ckpt.restore(), 5):
    ...         state["w"] += 1
    ...         _ = ckpt.save(step + 1)
    ...     ckpt.wait()
    ...     ckpt.steps
    [3, 4, 5]
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        state: object = None,
        *,
        every: int | str = 1,
        keep: Keep | None = None,
        mode: Mode = "overlap",
        options: Options | None = None,
        optimizers: Sequence[Any] | None = None,
        budget: float = 0.03,
        mtbf: float | str | None = None,
        on_error: OnError = "raise",
        timeout: float = 600.0,
        preemption: bool = True,
        preemption_exit_code: int = 0,
        start_over: bool = False,
        process_group: ProcessGroup = None,
    ) -> None:
        given = Arguments(
            run, every, keep, mode, options, budget, mtbf, on_error, timeout, start_over, process_group
        )
        exit_code = checked_exit_code(preemption_exit_code)
        self.state = state
        """What `save` and `restore` work on unless they are given another state."""
        self._mode: Mode = mode
        self._on_error = on_error
        self._timeout = timeout
        self._pid, self._forks = os.getpid(), forks()
        self._task: SaveTask | None = None
        self._stalled = 0.0
        self._overlapped = False
        self._open = True
        self._awaited = False
        self._closed = False
        self._announced = AnnouncedChanges(self._before_step, optimizers)
        self._context = open_context(given, state, self._announced)
        self._group, self._run = self._context.group, self._context.run
        self._schedule, self._observers = self._context.schedule, self._context.observers
        self._duty = PreemptionDuty(self._group, self._schedule, exit_code, listens=preemption)
        if isinstance(self._run, WritableRun):
            register(self, self._run)

    # --- what there is

    @property
    def path(self) -> str:
        return self._run.path

    @property
    def mode(self) -> Mode:
        """The mode at work: ``"overlap"`` is ``"snapshot"`` while nothing announces changes of the state."""
        bound = self.state is not None
        if self._open and bound and self._mode == "overlap" and not self._announced.announced:
            return "snapshot"
        return self._mode

    @property
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return list_steps(self._run.path)

    @property
    def last_durable(self) -> int | None:
        """The newest step of this training that survives a power cut now. None: it has not restored or saved.

        Checkpoints that the run held before are in `steps`.
        """
        return self._context.retention.newest

    @property
    def schedule(self) -> Schedule:
        """When saves are made; `explain` says why."""
        return self._schedule

    @property
    def events(self) -> EventLog:
        """What has happened, newest last; it is also in ``events.jsonl`` in the run."""
        return self._context.events

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked this process to end. The next `save` does so."""
        return self._duty.received is not None

    def progress(self) -> str:
        """One line: what is under way, and what is durable."""
        durable = "nothing durable yet" if self.last_durable is None else f"step {self.last_durable} durable"
        task = self._task
        if task is None or task.ended:
            return f"idle, {durable}"
        done, total = task.pending.progress
        share = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB written" if total else "starting"
        return f"saving step {task.step}: {share}, {durable}"

    def __repr__(self) -> str:
        return f"<Checkpointer of {self.path}: {'closed' if self._closed else self.progress()}>"

    # --- saving

    def save(
        self, step: int, state: object = None, metrics: Mapping[str, float] | None = None
    ) -> PendingSave | None:
        """Saves the state after `step` completed steps.

        A program whose steps return a new state, as with JAX, passes it here. Arrays that cannot change are
        read where they are while the next steps run; all others are copied first, unless a hooked optimizer
        owns them. In ``mode="overlap"`` the call begins by waiting until the save before is durable, also if
        `every` skips this step: a crash then costs at most one step.

        If a save fails in the background, the next call raises its error, once (`SaveFailed`, `StorageFull`,
        `MutatedDuringSave`), unless its `PendingSave` has shown the error before. The call that raises has
        begun its own save nevertheless. Earlier checkpoints are untouched by a failure, and training may go
        on.

        Args:
            step: The number of completed steps, which names the checkpoint.
            state: What to save this time. None: the state that the Checkpointer was made with. If both are
                given, this one is saved; only optimizers that are in it are hooked, until the next save.
                A dict of nothing but numbers is then refused, since it may be meant as `metrics`.
            metrics: Numbers to store with the checkpoint, such as ``{"loss": 0.25}``.

        Returns:
            The save, to wait for or to ask about; None when `every` skips the step.
        """
        self._check_usable()
        step = check_step(step)
        if state is None and self.state is None:
            raise ValueError(
                f"step {step} was not saved: this Checkpointer was made without a state, so each save needs "
                "one, as in save(step, state)"
            )
        if self.state is not None and _like_metrics(state):
            raise TypeError(
                f"step {step} was not saved: the state passed to save holds nothing but numbers, while this "
                "Checkpointer was made with a state. Pass metrics by name: save(step, metrics={...})"
            )
        if state is not None and self._mode == "overlap":
            # No hook may have waited. No step is completed before the checkpoint of an earlier one is safe.
            self._release(None)
        if self.last_durable is None:  # nothing restored or saved so far
            self._context.retention.require_ours(step)
        now = time.monotonic()
        self._schedule.stepped(step, now, self._stalled, self._overlapped)
        self._stalled = 0.0
        try:
            return self._save(step, state, metrics, now)
        finally:
            self._stalled += time.monotonic() - now
            self._overlapped = self._task is not None and not self._task.ended

    def _save(
        self, step: int, passed: object, metrics: Mapping[str, float] | None, now: float
    ) -> PendingSave | None:
        self._observers.tell(Completed(step))
        earlier = self._task
        due, signal, save_round = self._duty.decide(step, now)
        if not due:
            self._report(earlier)
            return None
        try:
            self._require_ended(earlier, step)
            self._context.retention.require_ours(step)
        except BaseException as error:
            self._group.failed(save_round, error)
            raise
        task = SaveTask(self._context, step, self._mode, save_round, bound=passed is None)
        try:
            state = self.state if passed is None else passed
            task.prepare(state, metrics)
            task.stage(state)
        except BaseException as error:
            task.failed(error)
            raise
        try:
            self._task = task
            task.start(self._timeout)
        except BaseException as error:
            task.interrupted = True  # at once: another signal may come before the next line
            task.give_up(error)
            raise
        if signal is not None:
            self._end_process(task, signal)
        self._report(earlier)
        if self._mode == "sync":
            self._report(task)
        return task.pending

    def wait(self, timeout: float | None = None) -> None:
        """Returns when all that was saved is durable. Raises the error of a save that failed.

        Args:
            timeout: Seconds after which it raises an `EngineTimeout`, a subclass of `TimeoutError`; the save
                goes on. None: no limit.
        """
        self._check_usable()
        task = self._task
        if task is not None and not task.join(timeout):
            raise EngineTimeout(f"step {task.step} was not durable within {timeout} s; its save goes on")
        self._report(task)

    @contextmanager
    def update(self) -> Iterator[None]:
        """For changes of the weights that no hooked optimizer makes: ``with ckpt.update(): ...``.

        It waits, before the block, until a save under way no longer reads the weights. Inside the block they
        may change at any moment, so a save that starts there copies them. After the block, saves read them in
        place again: they must not change until the next block, or the next step of an optimizer.
        """
        self._check_usable()
        with self._announced.update():
            self._release(None)
            yield

    def check_replicas(self, state: object = None) -> None:
        """Compares, bit by bit, the arrays that several ranks have copies of; see `RanksDisagree`.

        All ranks call it, between two steps. The first save does it by itself, and each save after the layout
        of the state has changed.

        Args:
            state: What to compare. None: the state that the Checkpointer was made with.
        """
        self._check_usable()
        self._group.check_replicas(self.state if state is None else state)

    def _before_step(self, owner: Owner) -> None:
        """An optimizer is about to change what it owns."""
        if self._open:
            self._release(owner)

    def _release(self, owner: Owner | None) -> None:
        if self._task is not None:
            self._stalled += self._task.release(owner, self._timeout)

    def _require_ended(self, earlier: SaveTask | None, step: int) -> None:
        """Waits until the earlier save has ended, since there is one save at a time."""
        if earlier is None or earlier.ended:
            return
        patience = self._group.patience
        if not earlier.join(patience):
            raise DeviceTimeout(
                f"step {step} was not saved: the save of step {earlier.step} is still under way after "
                f"{patience:g} s. Earlier checkpoints are untouched; look at the device (`everystep "
                "doctor`), or save less often"
            )

    def _report(self, task: SaveTask | None) -> None:
        """Raises the error of a save that has failed, or warns of it, unless it was seen before."""
        error = task.pending.unseen_error() if task is not None else None
        if error is not None:
            self._raise_or_warn(error)

    def _raise_or_warn(self, error: BaseException) -> None:
        if self._on_error == "raise" or not isinstance(error, Exception):
            raise error
        warnings.warn(f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=stack_level())

    def _end_process(self, task: SaveTask, signal: str) -> None:
        """Ends the process once the save is durable. If it fails, the next step tries again."""
        error = task.pending.exception()
        if error is not None:
            self._raise_or_warn(error)
            return
        self._observers.tell(Preempted(task.step, time.time(), signal))
        code = self._duty.fulfilled(self._run.path, task.step, signal)
        if code is not None:
            self.close()
            raise SystemExit(code)

    # --- restoring

    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        rename: object = None,
        init_from: str | os.PathLike[str] | None = None,
        continue_steps: bool = False,
    ) -> int: ...
    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        into: Any,
        strict: bool = True,
        rename: object = None,
        init_from: str | os.PathLike[str] | None = None,
        continue_steps: bool = False,
    ) -> tuple[int, Any]: ...
    def restore(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        strict: bool = True,
        rename: object = None,
        init_from: str | os.PathLike[str] | None = None,
        continue_steps: bool = False,
    ) -> int | tuple[int, Any]:
        """Puts the newest intact checkpoint of the run back into the state.

        In a run that holds checkpoints, call it before the first save (`RunInUse`). A damaged checkpoint is
        passed over with a warning. If checkpoints exist but none is intact, that is an error: a training
        never starts from the beginning silently.

        What the state and the checkpoint do not have alike raises a `StateMismatch` before anything is
        changed. A bound state is filled in place. Where the checkpoint has a value that cannot be put in
        place and no dict, list or object of the state holds it, such as a number in a tuple, that is a
        `StateMismatch`, too, in a new run as well. With `into` such values are new ones in the result.

        Args:
            step: Restores exactly that checkpoint. If there are newer ones, training goes back on them: the
                first save removes them.
            into: The state to restore instead of a bound one; use what is returned. Dicts, lists, tensors and
                objects are filled in place. Tuples, numbers and arrays of JAX are new in the result; arrays
                of JAX have the sharding of those in `into`.
            strict: If false, on all ranks, restores what fits and warns about the rest. If no array fits on
                any rank, that is still an error.
            rename: Gives parameters of the checkpoint the names that they have in the state: see
                `everystep.load`. With `init_from` it is for that checkpoint alone; without, for those of the
                run, so leave it out again once a checkpoint with the new names is durable.
            init_from: Where a run without checkpoints begins: a checkpoint or run, of Everystep or of another
                system. It fills those entries of the state that it has something for, such as ``"model"``;
                each of them must fit, and the others stay as they are. A warning names what was filled and
                what was not. Later launches find checkpoints in the run, and do not look at `init_from`.
            continue_steps: Whether the new run counts from the step of `init_from`, if that has one, instead
                of from 0.

        Returns:
            The step at which training goes on, 0 in a new run; with `into`, that step and the restored state,
            in a new run ``(0, into)``.
        """
        self._check_usable()
        if init_from is not None:
            init_from = local_path(init_from)
        if step is not None:
            step = check_step(step)
        if self._context.retention.starts_over:
            raise ValueError(
                "restore() and start_over=True contradict each other: to resume, leave start_over out; to "
                "start from the beginning, do not call restore() before the first save"
            )
        if continue_steps and init_from is None:
            raise ValueError("continue_steps=True goes with init_from=: it continues the steps of that")
        if into is None and self.state is None:
            raise ValueError(
                "this Checkpointer was made without a state: give restore(into=...) the one to restore"
            )
        new_names, begin = renaming(rename), None
        if init_from is not None:
            begin, new_names = Beginning(init_from, new_names, continue_steps), None
        target = Into(self.state if into is None else into, strict, into is None, new_names)
        self._release(None)
        self.wait()
        with offering("rename", "strict"):
            found, restored = restore(self._context, target, step, begin)
        if into is None:
            return found
        return found, restored.value if isinstance(restored, Rebuilt) else restored

    # --- the end

    def _check_usable(self) -> None:
        if not self._open:
            raise ValueError("this Checkpointer is closed")
        if forks() != self._forks:
            raise RuntimeError(
                f"this Checkpointer belongs to process {self._pid}, of which this is a forked child: "
                "only that process may use it"
            )

    def close(self, error: BaseException | None = None) -> None:
        """Finishes the save under way and releases the run's lock. Raises the error of a save that failed.

        Args:
            error: The error that ends the training, if one does, which is the one to see: an error of the
                save under way is a warning then.
        """
        if error is None:
            self._close()
            return
        if self._group.has_others and forks() == self._forks:
            # The save under way may wait for a dead rank: a launcher that clears up is obeyed at once.
            self._duty.close()
        try:
            self._close()
        except Exception as failure:
            warnings.warn(f"{type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=stack_level())

    def _close(self) -> None:
        if self._closed or forks() != self._forks:
            return
        task, patience = self._task, self._group.patience
        mode = self.mode  # afterwards there are no hooks that show it
        # All of it, whatever is interrupted; what is left then is for another call.
        with ExitStack() as rest:
            rest.callback(self._release_run, task)
            rest.callback(self._context.events.close)
            rest.callback(self._duty.close)
            rest.callback(self._context.staging.clear)
            rest.callback(self._announced.detach)
            self._open = False
            self._mode = mode
            if not self._awaited:  # else an earlier call has waited to the end
                ended = task is None or task.join(patience)
                self._awaited = True
                if not ended:
                    assert task is not None
                    raise DeviceTimeout(
                        f"the save of step {task.step} is still under way after {patience:g} s and may "
                        "never become durable; earlier checkpoints are untouched"
                    )
                self._report(task)

    def _release_run(self, task: SaveTask | None) -> None:
        """Releases the run, unless a save that is late may still write to it: then another call does."""
        if task is None or task.ended:
            self._run.close()
            self._group.close()
            self._closed = True
            self._observers.tell(Closed())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


def check_options(options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The options that a callback keeps for the Checkpointer it will make, checked now.

    A mistake should not wait until data are loaded and a model is built.

    Args:
        options: Keyword arguments of a `Checkpointer`.
        owner: Who was given them, for the error's message.
    """
    parameters = inspect.signature(Checkpointer).parameters.values()
    usual = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    for name in options:
        if name not in usual:
            raise TypeError(
                f"{owner}: {name!r} is no option of everystep.Checkpointer, which has {', '.join(usual)}"
            )
    known = {**usual, **options}
    names = {field.name for field in fields(Arguments)} - {"run"}
    Arguments(run="", **{name: known[name] for name in names}).schedule()
    checked_exit_code(known["preemption_exit_code"])
    return dict(options)


def _like_metrics(state: object) -> bool:
    """Whether this may be metrics that were taken for a state."""
    return isinstance(state, Mapping) and all(isinstance(value, int | float) for value in state.values())
