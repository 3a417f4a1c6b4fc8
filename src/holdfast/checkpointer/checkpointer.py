"""`Checkpointer`: durable checkpoints of a training loop, and resuming from the newest one that is whole.

Owns the order of things: what a call of `save` does on the training's thread, what runs beside it, who waits
for what, and when an error is told. What may be read in place is `ownership`'s, the copies are `staging`'s,
one save under way is `saving`'s, when to save is `schedule`'s, which checkpoints stay is `keep`'s.
"""

from __future__ import annotations

import gc
import operator
import os
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, get_args

from holdfast.checkpointer import drilling
from holdfast.checkpointer.events import (
    EventLog,
    Failed,
    Opened,
    PassedOver,
    Phases,
    Preempted,
    Restored,
    Saved,
)
from holdfast.checkpointer.free_space import FreeSpace
from holdfast.checkpointer.keep import Keep, Kept
from holdfast.checkpointer.observed_changes import ObservedChanges
from holdfast.checkpointer.ownership import Hooks, find_optimizers, owners
from holdfast.checkpointer.pending_save import PendingSave
from holdfast.checkpointer.preemption import Preemption
from holdfast.checkpointer.restore import Target, resume
from holdfast.checkpointer.retention import Retention, history
from holdfast.checkpointer.save_task import Work, take_apart
from holdfast.checkpointer.schedule import Cost, Schedule, make_schedule
from holdfast.checkpointer.staging import Division, Staging
from holdfast.engine import forks
from holdfast.errors import (
    CheckpointExists,
    EngineTimeout,
    HoldfastError,
    Locked,
    MutatedDuringSave,
    SaveFailed,
)
from holdfast.state import LeafSource, flatten
from holdfast.store import (
    CheckpointInfo,
    Conversation,
    FollowedRun,
    Options,
    RankGroup,
    WritableRun,
    check_step,
    checked_options,
    is_checkpoint,
    list_steps,
    plain_metrics,
)
from holdfast.store.commit.volumes import Ledger
from holdfast.store.locks import path_to_read
from holdfast.store.ranks.group import ProcessGroup

Mode = Literal["overlap", "snapshot", "sync"]
OnError = Literal["raise", "warn"]


class Checkpointer:
    """Saves `state` into a run directory and restores it from there. One per run and training.

    `state` is any nesting of dicts, lists and tuples with tensors, arrays, values, and objects that have
    ``state_dict``/``load_state_dict``; each save takes them as they are then.

    `mode`: with ``"overlap"`` a save returns at once, and is written while the next forward and backward run;
    an optimizer's next step waits for what it would change. ``"snapshot"`` returns when every byte has left
    the state's memory: what fits `Options.memory_nbytes` is copied at once, the rest goes at the disk's pace.
    It is what ``"overlap"`` does, with a notice, for a state without an optimizer. ``"sync"`` returns when
    the checkpoint is durable.

    `every`: steps, a time such as ``"30s"``, or ``"auto"``: as often as `budget`, a share of the time,
    allows, or best for failures every `mtbf` seconds. `optimizers`: those to hook, if not all in `state`.
    `on_error`: whether a save that failed in the background is raised by the next call, or warned of.
    `timeout`: seconds after which training waits no longer for a device, or for another rank. With
    `preemption`, SIGTERM and SIGUSR1 make the next call of `save` save and end the process, with
    `preemption_exit_code`: many schedulers take 0 for finished, and start again what ends with another code.

    A run belongs to one training. Where it holds checkpoints already, call `restore` before the first save,
    or that save is an error (`RunInUse`). With `start_over` a new training takes the run over, without
    `restore`: the old checkpoints go once its first one is durable, at every launch of such a script.

    Under ``torch.distributed`` every rank makes one, with the same run and its own state, and all call the
    same methods: each writes its share of one checkpoint, and when to save is the coordinator's, rank 0's,
    decision. `process_group`: some ranks instead of all; with ``"none"`` this rank has the run to itself.

    >>> import holdfast, numpy, tempfile
    >>> state = {"w": numpy.zeros(3)}
    >>> with holdfast.Checkpointer(tempfile.mkdtemp(), state, mode="snapshot") as ckpt:
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
        state: object,
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
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}")
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive seconds, not {timeout!r}")
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(f"keep must be a Keep, such as holdfast.Keep(last=3), not {keep!r}")
        exit_code = _checked_exit_code(preemption_exit_code)
        options = checked_options(options) or Options()
        self.state = state
        self._mode: Mode = mode
        self._given_optimizers = None if optimizers is None else list(optimizers)
        self._on_error = on_error
        self._timeout = timeout
        self._schedule = make_schedule(every, budget=budget, mtbf=mtbf)
        self._bracketed = False
        self._trust = ObservedChanges()
        self._noticed = False
        self._exit_code = exit_code
        self._pid, self._forks = os.getpid(), forks()
        self._in_flight: PendingSave | None = None
        self._stalled = 0.0
        self._overlapped = False
        path = os.path.abspath(os.fspath(run))
        way = drilling.way_of(options.write_settings())
        self._group = RankGroup.gather(f"Checkpointer of {path}", process_group, way, timeout)
        self._drill = drilling.join(path) if self._group.leads else None
        self._run: WritableRun | FollowedRun = FollowedRun(path)
        self._open = True
        self._closed = False
        try:
            known: list[Kept] = []
            held: list[int] = []
            with self._group.all_or_none("open"):
                if self._group.leads:
                    place = self._drill.path if self._drill else path
                    _refuse_checkpoint(place)
                    self._run = _open_run(place)
                    inside = path_to_read(self._run.directory)
                    held, known = list_steps(inside), history(inside)
                self._staging = Staging(options.snapshot_nbytes)
                self._hooks = Hooks(self._before_step)
                self._hooks.attach(self._optimizers() if mode == "overlap" else ())
            where, known, held, start_over = self._group.broadcast(
                (os.fsencode(self._run.path), known, held, start_over),
                tuple[bytes, list[Kept], list[int], bool],
            )
            if not self._group.leads:
                self._run = FollowedRun(os.fsdecode(where))
            directory = self._run.directory
            ledger = Ledger(directory) if directory is not None and self._group.has_volumes else None
            self._retention = Retention(
                self._run, keep or Keep(), known, ledger, found=held, start_over=start_over
            )
            self._events = EventLog(self._run.path if self._group.leads else None, directory)
            self._room: FreeSpace | None = None
            if isinstance(self._run, WritableRun) and not self._group.has_volumes:
                self._room = FreeSpace(self._run, keep or Keep(), self._retention, self._events)
            self._events.add(Opened(time.time(), self._pid, socket.gethostname(), mode, _plain(every)))
            self._preemption = Preemption(exit_code) if preemption else None
            _opened.add(self)
        except BaseException:
            self._run.close()
            self._group.close()
            raise

    # --- what there is

    @property
    def path(self) -> str:
        return self._run.path

    @property
    def mode(self) -> Mode:
        """The mode at work: ``"overlap"`` is ``"snapshot"`` while nothing announces changes of weights."""
        if self._open and self._mode == "overlap" and not self._hooks.optimizers and not self._bracketed:
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
        return self._retention.newest

    @property
    def schedule(self) -> Schedule:
        """When saves are made; `explain` says why."""
        return self._schedule

    @property
    def events(self) -> EventLog:
        """What happened, newest last; also in ``events.jsonl`` in the run."""
        return self._events

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked this process to end. The next `save` does so."""
        return self._preemption is not None and self._preemption.received is not None

    def progress(self) -> str:
        """One line: what is under way, and what is durable."""
        durable = "nothing durable yet" if self.last_durable is None else f"step {self.last_durable} durable"
        saving = self._in_flight
        if saving is None or saving.done:
            return f"idle, {durable}"
        done, total = saving.progress
        share = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB written" if total else "starting"
        return f"saving step {saving.step}: {share}, {durable}"

    def __repr__(self) -> str:
        return f"<Checkpointer of {self.path}: {'closed' if self._closed else self.progress()}>"

    # --- saving

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> PendingSave | None:
        """Saves the state after `step` completed steps; None when `every` skips it.

        A save that failed in the background is raised by the next call, once (`SaveFailed`, `StorageFull`,
        `MutatedDuringSave`); that call has begun its own save nevertheless. Earlier checkpoints are untouched
        by a failure, and training may go on.
        """
        self._check_usable()
        step = check_step(step)
        if self._retention.newest is None:  # nothing restored or saved so far
            self._retention.require_ours(step)
        now = time.monotonic()
        self._schedule.stepped(step, now, self._stalled, self._overlapped)
        self._stalled = 0.0
        try:
            return self._save(step, metrics, now)
        finally:
            self._stalled += time.monotonic() - now
            self._overlapped = self._in_flight is not None and not self._in_flight.done

    def _save(self, step: int, metrics: Mapping[str, float] | None, now: float) -> PendingSave | None:
        if self._drill is not None:
            self._drill.completed(step)
        earlier = self._in_flight
        due, signal, talk = self._accord(step, now)
        if not due:
            self._tell(earlier)
            return None
        try:
            self._finish_earlier(step, earlier)
            self._retention.require_ours(step)
        except BaseException as error:
            self._group.failed(talk, error)
            raise
        saving = self._start(step, metrics, talk)
        if signal is not None:
            self._obey(saving, signal)
        self._tell(earlier)
        if self._mode == "sync":
            self._tell(saving)
        return saving

    def _accord(self, step: int, now: float) -> tuple[bool, str | None, Conversation | None]:
        """Whether to save now, and whether to end then. With several ranks the coordinator decides."""
        signal = self._preemption.received if self._preemption is not None else None
        if self._group.team is None:
            return signal is not None or self._schedule.due(step, now), signal, None
        if self._group.leads:
            signal = signal or self._group.signalled()
        elif signal is not None:
            self._group.signal(signal)
        due = self._group.leads and (signal is not None or self._schedule.due(step, now))
        talk = self._group.begin("the Checkpointer's save", step, due=due, signal=signal)
        assert talk is not None
        return talk.call.due, talk.call.signal, talk

    def wait(self, timeout: float | None = None) -> None:
        """Returns when all that was saved is durable. Raises what failed in the background."""
        self._check_usable()
        saving = self._in_flight
        if saving is not None and not saving.join(timeout):
            raise EngineTimeout(f"step {saving.step} was not durable within {timeout} s; its save goes on")
        self._tell(saving)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Brackets a change of the weights that no hooked optimizer makes: waits until it does no harm."""
        self._check_usable()
        self._bracketed = True
        self._release(None)
        yield

    def _start(
        self, step: int, metrics: Mapping[str, float] | None, talk: Conversation | None
    ) -> PendingSave:
        began = time.perf_counter()
        if self._drill is not None:
            self._drill.saving(step, self.mode)
        try:
            numbers = plain_metrics(metrics) if self._group.leads else {}  # those of rank 0 are stored
            replace = self._retention.attempt(step)
            run = self._run.directory
            work = take_apart(self._group, self.state, run, step, numbers, talk, replace=replace)
            division = self._divide(work.leaves)
        except BaseException as error:
            if self._drill is not None:
                self._drill.failed(step)
            self._group.failed(talk, error)
            raise
        stage_seconds = time.perf_counter() - began

        def commit(saving: PendingSave) -> CheckpointInfo:
            return self._commit(saving, work, stage_seconds)

        saving = PendingSave(step, division, commit, self._retention.make_way, self._retention.take_over)
        try:
            self._in_flight = saving
            self._schedule.started(step, time.monotonic())
            saving.add_stall(time.perf_counter() - began)
            with saving.stalling():
                if self._mode == "sync":
                    saving.run()
                else:
                    saving.start()
                    saving.leave_urgent(self._timeout)
        except BaseException as error:
            saving.interrupted(error)
            raise
        return saving

    def _divide(self, leaves: tuple[LeafSource, ...]) -> Division:
        if self._mode == "sync":
            return Division()  # nobody else runs until all is over
        if self._mode == "overlap":
            self._hooks.attach(self._optimizers())
            self._notice()
            if self.mode == "overlap":
                owner_of = owners(self.state, self._hooks, bracketed=self._bracketed).of
                return self._staging.divide(leaves, self._trust.confirm(owner_of))
        return self._staging.divide(leaves, _nobody)

    def _notice(self) -> None:
        if self.mode != "overlap" and not self._noticed:
            self._noticed = True
            warnings.warn(
                "the state holds no optimizer whose steps could be waited for, so saves copy it first "
                '(mode="snapshot"). To overlap, give optimizers=[...] to the Checkpointer, or bracket what '
                "changes the weights with `with checkpointer.update():`",
                RuntimeWarning,
                stacklevel=6,
            )

    def _commit(self, saving: PendingSave, work: Work, stage_seconds: float) -> CheckpointInfo:
        """All that happens to a save after it has been started; on its own thread, as a rule."""
        step = saving.step
        in_place, copied = saving.in_place_nbytes, saving.copied_nbytes
        try:
            groups = None if self._mode == "sync" else saving.groups
            if self._room is not None:
                self._room.make(step, work.nbytes)
            info = self._run.save(step, lambda target: work.commit(target, groups, saving))
        except BaseException as error:
            if isinstance(error, MutatedDuringSave):
                self._trust.lose(error.leaves)
            self._events.add(
                Failed(step, time.time(), self.mode, type(error).__name__, str(error), saving.stall_seconds)
            )
            if self._room is not None:
                self._room.failed(error)
            if self._drill is not None:
                self._drill.failed(step)
            if isinstance(error, CheckpointExists):
                raise self._retention.exists(step) from error
            raise
        if self._drill is not None:
            self._drill.durable(step, info.path)
        began = time.perf_counter()
        self._retention.add(info)
        if self._room is not None:
            self._room.took(info.stored_nbytes)
        retention = time.perf_counter() - began
        phases = Phases(stage_seconds, info.phases.write, info.phases.sync, info.phases.commit + retention)
        stall = saving.stall_seconds
        self._events.add(
            Saved(
                step=step,
                time=time.time(),
                mode=self.mode,
                nbytes=info.nbytes,
                stored_nbytes=info.stored_nbytes,
                leaves=info.leaves,
                seconds=phases,
                stall_seconds=stall,
                in_place_nbytes=in_place,
                copied_nbytes=copied,
            )
        )
        self._schedule.finished(Cost(step, stall, phases.total, info.nbytes))
        return info

    # --- who waits for what

    def _before_step(self, owner: int) -> None:
        """An optimizer is about to change what it owns."""
        if self._open:
            self._release(owner)

    def _release(self, owner: int | None) -> None:
        saving = self._in_flight
        if saving is not None and not saving.done:
            before = saving.stall_seconds
            saving.release(owner, self._timeout)
            self._stalled += saving.stall_seconds - before

    def _finish_earlier(self, step: int, earlier: PendingSave | None) -> None:
        """One save at a time: the earlier one ends first, or this one is not made."""
        if earlier is None or earlier.done:
            return
        patience = self._group.patience
        if not earlier.join(patience):
            raise SaveFailed(
                f"step {step} was not saved: the save of step {earlier.step} is still under way after "
                f"{patience:g} s. Earlier checkpoints are untouched; look at the device (`holdfast "
                "doctor`), or save less often"
            )

    def _tell(self, saving: PendingSave | None) -> None:
        """Raises, or warns of, what went wrong in a save that has ended."""
        error = saving.take_error() if saving is not None else None
        if error is not None:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        if self._on_error == "raise" or not isinstance(error, Exception):
            raise error
        warnings.warn(f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=4)

    def _obey(self, saving: PendingSave, signal: str) -> None:
        try:
            saving.wait()
        except Exception as error:
            self._complain(error)
            return  # nothing was saved that the process could end with; the next step tries again
        self._events.add(Preempted(saving.step, time.time(), signal))
        # Several ranks end at the same step, whatever other Checkpointers one of them has.
        code: int | None = self._exit_code
        if self._preemption is not None:
            code = self._preemption.obeyed(at_once=self._group.team is not None)
        if self._group.leads:
            _say_preempted(self._run.path, saving.step, signal, code)
        if code is not None:
            self.close()
            raise SystemExit(code)

    def _optimizers(self) -> list[Any]:
        return find_optimizers(self.state, self._given_optimizers)

    # --- restoring

    def restore(self, step: int | None = None, *, strict: bool = True) -> int:
        """Puts the newest intact checkpoint back into the state and returns its step; 0 for a new run.

        In a run that holds checkpoints the first save needs it to have been called: see `RunInUse`.

        A damaged checkpoint is passed over with a warning. When checkpoints exist but none is whole, that is
        an error, never a silent start from nothing. With `step`, exactly that checkpoint; should newer ones
        exist, training goes back on them: the first save removes them.

        What the state and the checkpoint do not have alike is a `StateMismatch`, before anything is touched;
        ``strict=False``, on all ranks, restores what fits and warns about the rest; that no array fits on any
        rank is still an error. All goes into the objects that are in the state already; one that cannot take
        it and is held by no dict, list or object of the state, such as a number in a tuple, is a
        `StateMismatch`, too, in a new run as well.
        """
        self._check_usable()
        if step is not None:
            step = check_step(step)
        if self._retention.starts_over:
            raise ValueError(
                "restore() and start_over=True contradict each other: to resume, leave start_over out; to "
                "begin anew, do not call restore() before the first save"
            )
        self._release(None)
        self.wait()
        if self._drill is not None:
            self._drill.restoring()
        into = Target(self.state, strict)
        run, here = self._run, self._steps_here()
        found = resume(self._group, into, here, run.path_of, step, self._passed_over, run.require_current)
        if found is None:
            if self._drill is not None:
                self._drill.restored(0, None)
            self._retention.resumed(None)
            return 0
        self._events.add(Restored(found.step, time.time(), found.nbytes, found.seconds))
        if self._drill is not None:
            self._drill.restored(found.step, self._run.path_of(found.step))
        self._schedule.resumed(found.step)
        self._retention.resumed(found.step)
        self._go_back_to(found.step, found.candidates if step is not None else ())
        return found.step

    def _steps_here(self) -> list[int]:
        return self.steps if self._group.leads else []

    def _passed_over(self, step: int, error: HoldfastError) -> None:
        self._retention.forget(step)
        self._events.add(PassedOver(step, time.time(), str(error)))
        warnings.warn(f"passing over step {step}: {error}", RuntimeWarning, stacklevel=5)

    def check_replicas(self) -> None:
        """Compares, bit by bit, what several ranks hold the same of; `RanksDisagree` names what differs.

        All ranks call it, between two steps. It is done by itself when it is first planned who writes what.
        """
        self._check_usable()
        self._group.shares.check_replicas(flatten(self.state, self._group.rank))

    def _go_back_to(self, step: int, present: Sequence[int]) -> None:
        later = [other for other in present if other > step]
        self._retention.supersede(later)
        if later:
            warnings.warn(
                f"going back to step {step}: the first save removes the later checkpoints "
                f"({', '.join(map(str, later))})",
                RuntimeWarning,
                stacklevel=3,
            )

    # --- the end

    def _check_usable(self) -> None:
        if not self._open:
            raise ValueError("this Checkpointer is closed")
        if forks() != self._forks:
            raise RuntimeError(
                f"this Checkpointer belongs to process {self._pid}, of which this is a forked child: "
                "only that process may use it"
            )

    def close(self) -> None:
        """Finishes what is under way and gives up the run's lock. Raises what failed in the background."""
        if self._closed or forks() != self._forks:
            return
        saving, patience = self._in_flight, self._group.patience
        # All of it, whatever is interrupted; what is left then is for another call.
        with ExitStack() as rest:
            rest.callback(self._give_up, saving)
            rest.callback(self._events.close)
            if self._preemption is not None:
                rest.callback(self._preemption.close)
            rest.callback(self._staging.clear)
            rest.callback(self._hooks.detach)
            opened, self._open = self._open, False
            self._mode = self.mode  # of the hooks that tell it, nothing is left behind this
            if opened and saving is not None and not saving.join(patience):
                raise SaveFailed(
                    f"the save of step {saving.step} is still under way after {patience:g} s and may "
                    "never become durable; earlier checkpoints are untouched"
                )
            if opened:
                self._tell(saving)

    def _give_up(self, saving: PendingSave | None) -> None:
        """The run, unless a save that was given up may still write to it: then another call does."""
        if saving is None or saving.done:
            self._run.close()
            self._group.close()
            self._closed = True

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._preemption is not None and self._group.team is not None and forks() == self._forks:
            # The save under way may wait for a dead rank: a launcher that clears up is obeyed at once.
            self._preemption.close()
        try:
            self.close()
        except Exception as failure:  # the error that ends the block is the one to see
            warnings.warn(f"{type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=2)


_opened: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""The Checkpointers of this process: a notebook makes a second one of a run where it meant to replace the
first."""


def _open_run(path: str) -> WritableRun:
    try:
        return WritableRun(path)
    except Locked as error:
        if not _holders(path):
            raise
        gc.collect()  # one that nothing refers to any more, but for a cycle, gives its lock back
        holders = _holders(path)
        if holders:
            raise Locked(
                f"run {path} is open for writing in this process already, by {holders[0]!r}. Close that one "
                "first. In a notebook whose cell ran before: call close() on the old Checkpointer, as in "
                "`ckpt.close()`, before you make a new one; or use `with holdfast.Checkpointer(...) as ckpt:`"
                ", which closes it by itself"
            ) from error
    return WritableRun(path)


def _holders(path: str) -> list[Checkpointer]:
    real, here = os.path.realpath(path), forks()
    ours = [known for known in _opened if known._forks == here and not known._closed]
    return [known for known in ours if os.path.realpath(known.path) == real]


def _refuse_checkpoint(path: str) -> None:
    """Steps inside of a checkpoint would be found by nobody: readers of that path mean the checkpoint."""
    if is_checkpoint(path):
        raise CheckpointExists(
            f"{path} is a checkpoint, not a run of them: give the Checkpointer a directory of its own. "
            "(holdfast.load restores from a single checkpoint)"
        )


def _checked_exit_code(code: object) -> int:
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255:
        raise ValueError(f"preemption_exit_code must be an int from 0 to 255, not {code!r}")
    return code


def _say_preempted(run: str, step: int, signal: str, code: int | None) -> None:
    """To people: a process that ends by itself, without an error, is a riddle."""
    fate = (
        "it goes on until the process' other Checkpointers have saved"
        if code is None
        else f"the process ends with exit code {code}. Start the same command again to go on from there"
    )
    print(f"holdfast: {signal} received: step {step} is saved in {run}; {fate}.", file=sys.stderr, flush=True)


def _plain(every: int | str) -> int | str:
    """Steps may be given as any library's whole number; events hold Python's own."""
    return every if isinstance(every, str) else operator.index(every)


def _nobody(leaf: LeafSource) -> None:
    return None
