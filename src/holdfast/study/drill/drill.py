"""`holdfast drill`: a user's own training, killed again and again, and held against an undisturbed one.

1. The command runs once undisturbed: what each step's checkpoint must be.
2. It runs again in a fresh directory, is killed with SIGKILL at drawn moments (`aim`) and started
   again, until it ends by itself. Where it ends before enough kills were made, once more from nothing.
3. Every checkpoint both have seen is compared, the last one byte by byte (`judge`).
4. Where they differ, the command runs undisturbed a second time: perhaps it never does the same thing twice.

Owns the order of events and what counts as a problem. The script writes a diary (`diary`) because its
Checkpointer does so under a drill; `child` starts and kills it; `report` is what comes out.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.checkpointer.drilling import RUNS
from holdfast.engine import Tuning
from holdfast.store import Checkpoint, list_steps, step_name
from holdfast.study.drill.aim import Aim, Lengths, arrange, draw
from holdfast.study.drill.causes import UNDISTURBED, causes
from holdfast.study.drill.child import DrillFailed, Stage, Start
from holdfast.study.drill.diary import Account, Diary, Sight
from holdfast.study.drill.judge import Agreement, Final, agree, compare_last, index
from holdfast.study.drill.report import DrillReport, Killed, Problem

_SAVE_CALLS = 6
"""Calls of the engine in a small save: a directory, a file, syncs, the rename."""
_RESTORE_CALLS = 2
_FRUITLESS_ROUNDS = 5
"""Trainings in a row that end before a kill could reach them. A busy machine may look away for a while."""
_ONCE = ("restore", "path")


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """`timeout` is for each start. `directory`: keeps everything there; None: a temporary one, removed."""

    command: tuple[str, ...]
    times: int = 10
    seed: int = 0
    timeout: float = 3600.0
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class News:
    """How far the drill is."""

    doing: str
    kills: int
    step: int
    steps: int | None


Tell = Callable[[News], None]


def hold(options: DrillOptions, tell: Tell = lambda news: None) -> DrillReport:
    """The whole drill. `DrillFailed` when there is nothing to judge: the script fails, or saves nothing."""
    began = time.monotonic()
    with ExitStack() as stack:
        directory = options.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="holdfast-drill-", dir=Path.cwd())
            directory = Path(stack.enter_context(temporary))
        elif directory.exists() and any(directory.iterdir()):
            raise DrillFailed(f"{directory} is not empty: a drill must begin with nothing")
        return _Drill(options, directory, tell).report(began)


@dataclass(slots=True)
class _Pending:
    """A kill, and those runs of the killed start that no later start has come to yet, as they were."""

    killed: Killed
    accounts: dict[str, Account]


@dataclass(slots=True)
class _Drill:
    options: DrillOptions
    directory: Path
    tell: Tell
    steps: int | None = None
    runs: frozenset[str] = frozenset()
    kills: list[Killed] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    seen: list[tuple[int, Sight]] = field(default_factory=list)
    finals: list[Final] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, began: float) -> DrillReport:
        reference = self._reference("reference", "undisturbed")
        saved = [account for account in reference.diary.accounts.values() if account.durable is not None]
        account = max(saved, key=lambda account: len(account.begun))
        self.steps = account.completed
        self.runs = frozenset(reference.diary.accounts)
        self.notes += [
            f"when the script has ended, run {gone.run} holds no checkpoint: its last one is compared by "
            "checksums alone"
            for gone in saved
            if not self._steps_in("reference", gone.run)
        ]
        lengths = self._lengths(reference, account)
        rounds = fruitless = 0
        while len(self.kills) < self.options.times:
            rounds += 1
            before = len(self.kills)
            if not self._round(rounds, reference, lengths):
                break
            fruitless = fruitless + 1 if len(self.kills) == before else 0
            if fruitless == _FRUITLESS_ROUNDS:
                self._too_fast()
                break
        agreement = agree(index(reference.diary.sights), self.seen)
        self._judge(agreement)
        undisturbed, likely = self._explain(reference, agreement)
        return DrillReport(
            command=self.options.command,
            seed=self.options.seed,
            times=self.options.times,
            steps=account.completed or 0,
            rounds=rounds,
            kills=tuple(self.kills),
            agreement=agreement,
            finals=tuple(self.finals),
            undisturbed=undisturbed,
            causes=likely,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            reference_seconds=reference.seconds,
            reference_start_seconds=(account.restored_at or account.opened_at) - reference.began_at,
            seconds=time.monotonic() - began,
        )

    # --- the undisturbed run ------------------------------------------------------------------------

    def _reference(self, name: str, doing: str) -> Start:
        start = self._stage(name).start(1, watch=self._watch(doing))
        if start.timed_out:
            raise DrillFailed(
                f"undisturbed, the command did not end within {self.options.timeout:g} s; "
                "give it fewer steps, or the drill a longer --timeout"
            )
        if not start.finished:
            raise DrillFailed(
                f"the command failed by itself, before anything was killed: exit code {start.exit_code}\n"
                f"{start.errors}"
            )
        if not start.diary.accounts:
            raise DrillFailed(
                "the command created no holdfast.Checkpointer, so there is nothing to resume from "
                "(was another installation of Holdfast, or an older one, used?)"
            )
        if all(account.durable is None for account in start.diary.accounts.values()):
            raise DrillFailed(
                "the command saved no checkpoint: it never came to a save, or `every` skips all"
            )
        return start

    def _lengths(self, reference: Start, account: Account) -> Lengths:
        windows = 0
        for step in self._steps_in("reference", account.run)[-1:]:
            path = self.directory / "reference" / RUNS / account.run / step_name(step)
            with Checkpoint(str(path)) as last:
                windows = math.ceil(last.stored_nbytes / Tuning().window_nbytes)
        at = account.completed_at
        steps = [later - earlier for earlier, later in itertools.pairwise(at)]
        save = statistics.median(account.save_seconds)
        return Lengths(
            first_step=account.restored or 0,
            last_step=account.completed or account.begun[-1],
            last_save=account.begun[-1],
            step_seconds=statistics.median(steps) if steps else save,
            save_seconds=save,
            save_calls=_SAVE_CALLS + windows,
            restore_seconds=save,
            restore_calls=_RESTORE_CALLS + windows,
            own_process=not reference.wrapped,
        )

    # --- the killed one -----------------------------------------------------------------------------

    def _round(self, number: int, reference: Start, lengths: Lengths) -> bool:
        """One training from nothing to its end, with kills. Whether it came to its end."""
        stage = self._stage(f"killed-{number}")
        left = self.options.times - len(self.kills)
        aims: list[Aim | None] = [*draw(left, lengths, self.options.seed + number - 1), None]
        self.pending = []
        for attempt, aim in enumerate(aims, 1):
            trigger, kill = arrange(aim, lengths) if aim is not None else (None, None)
            doing = f"kill {len(self.kills) + 1} of {self.options.times}" if aim else "to its end"
            start = stage.start(attempt, trigger=trigger, kill=kill, watch=self._watch(doing))
            self.seen += [(len(self.kills), sight) for sight in start.diary.sights]
            self._resume(start)
            self._learn(start, lengths)
            if not start.killed:
                return self._ended(start, stage, reference)
            assert aim is not None
            positions = [account.position for account in start.diary.accounts.values()]
            killed = Killed(
                number=len(self.kills) + 1,
                aim=aim.kind,
                phase=start.phase,
                step=max((place for place in positions if place is not None), default=None),
                due=max((account.due for account in start.diary.accounts.values()), default=0),
            )
            self.kills.append(killed)
            self.pending.append(_Pending(killed, start.diary.accounts))
        raise AssertionError("the last start of a round is not killed")

    def _resume(self, start: Start) -> None:
        """What this start shows about the kills before it, if it came far enough."""
        ready = {
            run: account for run, account in start.diary.accounts.items() if account.position is not None
        }
        if not ready or not self.pending:
            return
        for account in ready.values():
            self._check_use(account)
        for pending in self.pending:
            self._settle(pending, ready)
        last = len(self.kills) - 1
        times = [account for account in ready.values() if account.restored_at is not None]
        durable = [
            account.first_durable_at for account in ready.values() if account.first_durable_at is not None
        ]
        self.kills[last] = replace(
            self.kills[last],
            restored_seconds=max((a.restored_at or 0 for a in times), default=start.began_at) - start.began_at
            if times
            else None,
            durable_seconds=min(durable) - start.began_at if durable else None,
        )
        self.pending = [pending for pending in self.pending if pending.accounts]

    def _check_use(self, account: Account) -> None:
        """Whether the script does with its Checkpointer what makes it resume."""
        due = max((p.accounts[account.run].due for p in self.pending if account.run in p.accounts), default=0)
        if account.first is None or not due:
            return
        if account.restored is None:
            self._problem(
                "restore",
                f"the script did not call restore(), though step {due} was there to go on from: "
                "for step in range(ckpt.restore(), steps)",
            )
        elif account.first < account.restored or account.first == account.restored < (account.completed or 0):
            # The step that was restored may be saved again, as a last one, but not be followed by others.
            self._problem(
                "restore",
                f"the script restored step {account.restored}, but the next step it completed was "
                f"{account.first}: go on where restore() says, for step in range(ckpt.restore(), steps)",
            )

    def _settle(self, pending: _Pending, ready: dict[str, Account]) -> None:
        """Counts what one kill has cost, in the run that it has cost most.

        A script may have several runs, one after the other: those that this start has not come to can wait.
        """
        place = pending.killed.number - 1
        strangers = [run for run in ready if run not in self.runs]
        for run in [run for run in pending.accounts if run in ready or strangers]:
            before = pending.accounts.pop(run)
            if run in ready:
                self._count(place, before, ready[run].restored or 0)
            else:
                self._problem(
                    "path",
                    f"after kill {place + 1} the script opened another run ({', '.join(strangers)}, "
                    f"before: {run}): a run needs the same path at every start to be found again",
                )
        killed = self.kills[place]
        if killed.resumed is None and not pending.accounts:
            resumed = max(account.restored or 0 for account in ready.values())
            self.kills[place] = replace(killed, resumed=resumed, lost=max(0, (killed.step or 0) - resumed))

    def _count(self, place: int, before: Account, resumed: int) -> None:
        killed = self.kills[place]
        missing, lost = before.due - resumed, max(0, (before.position or 0) - resumed)
        if killed.resumed is None or (missing > 0, lost, before.position or 0) > (
            not killed.kept,
            killed.lost or 0,
            killed.step or 0,
        ):
            self.kills[place] = replace(
                killed, step=before.position, due=before.due, resumed=resumed, lost=lost
            )
        if missing > 0:
            self._problem(
                "lost",
                f"kill {killed.number} ({killed.phase}): {lost} steps lost: step {before.due} "
                f"had to survive, training went on from step {resumed}",
            )

    def _learn(self, start: Start, lengths: Lengths) -> None:
        for account in start.diary.accounts.values():
            if account.restored and account.restored_at is not None:
                lengths.restore_seconds = account.restored_at - account.opened_at
                lengths.restore_calls = account.restore_calls or lengths.restore_calls

    def _ended(self, start: Start, stage: Stage, reference: Start) -> bool:
        after = f"after kill {len(self.kills)}" if self.kills else "before the first kill"
        if start.timed_out:
            self._problem(
                "time-out",
                f"started again {after}, the command did not end within {self.options.timeout:g} s",
                start.errors,
            )
            return False
        if not start.finished:
            self._problem(
                "failed",
                f"started again {after}, the command failed: exit code {start.exit_code}",
                start.errors,
            )
            return False
        for run in reference.diary.accounts:
            expected = self._steps_in("reference", run)
            if expected:
                self._compare_last(run, stage, expected[-1])
        return True

    def _compare_last(self, run: str, stage: Stage, expected: int) -> None:
        steps = self._steps_in(stage.directory.name, run)
        if not steps:
            self._problem(
                "path", f"the killed training made no checkpoint in run {run}, the undisturbed one did"
            )
            return
        final = compare_last(self.directory / "reference", stage.directory, run, expected, steps[-1])
        self.finals.append(final)
        if final.step != final.reference_step:
            self._problem(
                "final", f"the killed training ended with step {final.step}, not {final.reference_step}"
            )
        elif not final.equal:
            self._problem(
                "final",
                f"the last checkpoint (step {final.step}) differs: {final.differing[0]}"
                + (f" and {len(final.differing) - 1} more" if len(final.differing) > 1 else ""),
            )

    # --- what it means --------------------------------------------------------------------------------

    def _too_fast(self) -> None:
        made = len(self.kills)
        if not made:
            raise DrillFailed("the training finished before it could be killed even once; give it more steps")
        self.notes.append(f"{made} of {self.options.times} kills: the training finished before the next one")

    def _judge(self, agreement: Agreement) -> None:
        first = agreement.first
        if first is None:
            return
        others = first.leaves + first.values - 1
        more = f" and {others} more" if others else ""
        when = f"after kill {first.after_kill}" if first.after_kill else "before the first kill"
        self._problem(
            "differs",
            f"step {first.step} is the first that differs, in {first.kind} {first.name}{more} ({when})",
        )

    def _explain(self, reference: Start, agreement: Agreement) -> tuple[Agreement | None, tuple[str, ...]]:
        """Whether two undisturbed runs differ as well, and what that makes the likely cause."""
        if agreement.first is None:
            return None, ()
        expected = index(reference.diary.sights)
        try:
            again = self._reference("reference-2", "undisturbed again")
        except DrillFailed as error:  # what the kills have shown is worth telling nevertheless
            self._problem("undisturbed", f"run undisturbed once more, it did not end as before: {error}")
            return None, UNDISTURBED
        undisturbed = agree(expected, [(0, sight) for sight in again.diary.sights])
        if undisturbed.first is not None:
            first = undisturbed.first
            self._problem(
                "undisturbed",
                "not deterministic even without kills: two undisturbed runs differ, first in step "
                f"{first.step}, {first.kind} {first.name}",
            )
        contents = expected[agreement.first.run, agreement.first.step].contents()
        return undisturbed, causes(
            agreement.first,
            [*contents.leaves, *contents.values],
            undisturbed_too=undisturbed.first is not None,
        )

    def _problem(self, kind: str, message: str, details: str = "") -> None:
        # A mistake of the script shows at every start; once is enough. What kills cost is told one by one.
        if kind not in _ONCE or all(problem.kind != kind for problem in self.problems):
            self.problems.append(Problem(kind, message, details))

    def _steps_in(self, stage: str, run: str) -> list[int]:
        path = self.directory / stage / RUNS / run
        return list_steps(str(path)) if path.is_dir() else []

    def _stage(self, name: str) -> Stage:
        return Stage(self.directory / name, self.options.command, self.options.timeout)

    def _watch(self, doing: str) -> Callable[[Diary], None]:
        def watch(diary: Diary) -> None:
            places = [account.position or 0 for account in diary.accounts.values()]
            self.tell(News(doing, len(self.kills), max(places, default=0), self.steps))

        return watch
