"""The drill: a user's own training is killed again and again, and compared with an undisturbed one.

1. The command runs once undisturbed. Its checkpoints are the reference.
2. It runs again in a fresh directory, is killed with SIGKILL at drawn moments (`kill_times`) and started
   again, until it ends by itself. If it ends before there were enough kills, it starts over.
3. Every checkpoint that both made is compared, the last one byte by byte (`comparison`).
4. If they differ, the command runs undisturbed a second time: it may not be deterministic.

Owns the order of events and what counts as a problem.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from everystep.checkpointer.drilling import RUNS
from everystep.drill.activity import ActivityLog, RunActivity, SeenCheckpoint
from everystep.drill.comparison import Agreement, Final, agree, compare_last, index
from everystep.drill.kill_times import (
    Aim,
    TrainingProfile,
    count_restore_calls,
    count_save_calls,
    draw_aims,
    how_to_kill,
)
from everystep.drill.likely_causes import UNDISTURBED, likely_causes
from everystep.drill.processes import DrillFailed, Stage, Start
from everystep.drill.report import DrillProblem, DrillReport, Killed
from everystep.engine import choose_backend
from everystep.paths import local_path
from everystep.store import list_steps, step_name
from everystep.store.read.checkpoint import open_checkpoint

_FRUITLESS_ROUNDS = 5
"""How many trainings in a row may end before they are killed. A busy machine may react late."""
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
class DrillProgress:
    """The progress of a drill."""

    doing: str
    kills: int
    step: int
    steps: int | None


OnProgress = Callable[[DrillProgress], None]


def run_drill(options: DrillOptions, on_progress: OnProgress = lambda progress: None) -> DrillReport:
    """The whole drill. Raises `DrillFailed` if the script fails by itself, or saves nothing."""
    began = time.monotonic()
    with ExitStack() as stack:
        directory = options.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="everystep-drill-", dir=Path.cwd())
            directory = Path(stack.enter_context(temporary))
        else:
            directory = Path(local_path(directory))
            if directory.exists() and any(directory.iterdir()):
                raise DrillFailed(f"{directory} is not empty: a drill must start in an empty directory")
        return _Procedure(options, directory, on_progress).report(began)


@dataclass(slots=True)
class _Pending:
    """A kill, and the runs of the killed start that no later start has opened yet."""

    killed: Killed
    runs: dict[str, RunActivity]


@dataclass(slots=True)
class _Procedure:
    options: DrillOptions
    directory: Path
    on_progress: OnProgress
    steps: int | None = None
    runs: frozenset[str] = frozenset()
    kills: list[Killed] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    seen: list[tuple[int, SeenCheckpoint]] = field(default_factory=list)
    finals: list[Final] = field(default_factory=list)
    problems: list[DrillProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, began: float) -> DrillReport:
        reference = self._reference("reference", "undisturbed")
        saved = [activity for activity in reference.log.runs.values() if activity.durable is not None]
        activity = max(saved, key=lambda activity: len(activity.begun))
        self.steps = activity.completed
        self.runs = frozenset(reference.log.runs)
        self.notes += [
            f"when the script has ended, run {gone.run} holds no checkpoint: its last one is compared by "
            "checksums alone"
            for gone in saved
            if not self._steps_in("reference", gone.run)
        ]
        profile = self._profile(reference, activity)
        rounds = fruitless = 0
        while len(self.kills) < self.options.times:
            rounds += 1
            before = len(self.kills)
            if not self._round(rounds, reference, profile):
                break
            fruitless = fruitless + 1 if len(self.kills) == before else 0
            if fruitless == _FRUITLESS_ROUNDS:
                self._too_fast()
                break
        agreement = agree(index(reference.log.checkpoints), self.seen)
        self._judge(agreement)
        undisturbed, likely = self._explain(reference, agreement)
        return DrillReport(
            command=self.options.command,
            seed=self.options.seed,
            times=self.options.times,
            steps=activity.completed or 0,
            rounds=rounds,
            kills=tuple(self.kills),
            agreement=agreement,
            finals=tuple(self.finals),
            undisturbed=undisturbed,
            causes=likely,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            reference_seconds=reference.seconds,
            reference_start_seconds=(activity.restored_at or activity.opened_at) - reference.began_at,
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
        if not start.log.runs:
            raise DrillFailed(
                "the command created no everystep.Checkpointer, so there is nothing to resume from "
                "(was another installation of Everystep, or an older one, used?)"
            )
        if all(activity.durable is None for activity in start.log.runs.values()):
            raise DrillFailed(
                "the command saved no checkpoint: it never came to a save, or `every` skips all"
            )
        return start

    def _profile(self, reference: Start, activity: RunActivity) -> TrainingProfile:
        stored_nbytes = 0
        for step in self._steps_in("reference", activity.run)[-1:]:
            path = self.directory / "reference" / RUNS / activity.run / step_name(step)
            with open_checkpoint(str(path)) as last:
                stored_nbytes = last.stored_nbytes
        backend = choose_backend(str(self.directory))
        at = activity.completed_at
        steps = [later - earlier for earlier, later in itertools.pairwise(at)]
        save = statistics.median(activity.save_seconds)
        return TrainingProfile(
            first_step=activity.restored or 0,
            last_step=activity.completed or activity.begun[-1],
            last_save=activity.begun[-1],
            step_seconds=statistics.median(steps) if steps else save,
            save_seconds=save,
            save_calls=count_save_calls(stored_nbytes, backend),
            restore_seconds=save,
            restore_calls=count_restore_calls(stored_nbytes),
            own_process=not reference.wrapped,
        )

    # --- the killed one -----------------------------------------------------------------------------

    def _round(self, number: int, reference: Start, profile: TrainingProfile) -> bool:
        """One training from the beginning to its end, with kills. Returns whether it reached its end."""
        stage = self._stage(f"killed-{number}")
        left = self.options.times - len(self.kills)
        aims: list[Aim | None] = [*draw_aims(left, profile, self.options.seed + number - 1), None]
        self.pending = []
        for attempt, aim in enumerate(aims, 1):
            trigger, kill = how_to_kill(aim, profile) if aim is not None else (None, None)
            doing = f"kill {len(self.kills) + 1} of {self.options.times}" if aim else "to its end"
            start = stage.start(attempt, trigger=trigger, kill=kill, watch=self._watch(doing))
            self.seen += [(len(self.kills), checkpoint) for checkpoint in start.log.checkpoints]
            self._resume(start)
            self._learn(start, profile)
            if not start.killed:
                return self._ended(start, stage, reference)
            assert aim is not None
            positions = [activity.position for activity in start.log.runs.values()]
            killed = Killed(
                number=len(self.kills) + 1,
                aim=aim.kind,
                phase=start.phase,
                step=max((place for place in positions if place is not None), default=None),
                due=max((activity.due for activity in start.log.runs.values()), default=0),
            )
            self.kills.append(killed)
            self.pending.append(_Pending(killed, start.log.runs))
        raise AssertionError("the last start of a round is not killed")

    def _resume(self, start: Start) -> None:
        """Judges the kills before this start, if the start came far enough."""
        ready = {run: activity for run, activity in start.log.runs.items() if activity.position is not None}
        if not ready or not self.pending:
            return
        for activity in ready.values():
            self._check_use(activity)
        for pending in self.pending:
            self._settle(pending, ready)
        last = len(self.kills) - 1
        times = [activity for activity in ready.values() if activity.restored_at is not None]
        durable = [
            activity.first_durable_at for activity in ready.values() if activity.first_durable_at is not None
        ]
        self.kills[last] = replace(
            self.kills[last],
            restored_seconds=max((a.restored_at or 0 for a in times), default=start.began_at) - start.began_at
            if times
            else None,
            durable_seconds=min(durable) - start.began_at if durable else None,
        )
        self.pending = [pending for pending in self.pending if pending.runs]

    def _check_use(self, activity: RunActivity) -> None:
        """Whether the script uses its Checkpointer in a way that makes it resume."""
        due = max((p.runs[activity.run].due for p in self.pending if activity.run in p.runs), default=0)
        if activity.first is None or not due:
            return
        if activity.restored is None:
            self._problem(
                "restore",
                f"the script did not call restore(), though step {due} was there to go on from: "
                "for step in range(ckpt.restore(), steps)",
            )
        elif activity.first < activity.restored or activity.first == activity.restored < (
            activity.completed or 0
        ):
            # The step that was restored may be saved again, as a last one, but not be followed by others.
            self._problem(
                "restore",
                f"the script restored step {activity.restored}, but the next step it completed was "
                f"{activity.first}: go on where restore() says, for step in range(ckpt.restore(), steps)",
            )

    def _settle(self, pending: _Pending, ready: dict[str, RunActivity]) -> None:
        """Counts what one kill has cost, in the run that it has cost most.

        A script may have several runs, one after the other. Those that this start has not opened yet are
        judged later.
        """
        place = pending.killed.number - 1
        strangers = [run for run in ready if run not in self.runs]
        for run in [run for run in pending.runs if run in ready or strangers]:
            before = pending.runs.pop(run)
            if run in ready:
                self._count(place, before, ready[run].restored or 0)
            else:
                self._problem(
                    "path",
                    f"after kill {place + 1} the script opened another run ({', '.join(strangers)}, "
                    f"before: {run}): a run needs the same path at every start to be found again",
                )
        killed = self.kills[place]
        if killed.resumed is None and not pending.runs:
            resumed = max(activity.restored or 0 for activity in ready.values())
            self.kills[place] = replace(killed, resumed=resumed, lost=max(0, (killed.step or 0) - resumed))

    def _count(self, place: int, before: RunActivity, resumed: int) -> None:
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

    def _learn(self, start: Start, profile: TrainingProfile) -> None:
        for activity in start.log.runs.values():
            if activity.restored and activity.restored_at is not None:
                profile.restore_seconds = activity.restored_at - activity.opened_at
                profile.restore_calls = activity.restore_calls or profile.restore_calls

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
        for run in reference.log.runs:
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
        expected = index(reference.log.checkpoints)
        try:
            again = self._reference("reference-2", "undisturbed again")
        except DrillFailed as error:  # report what the kills have shown
            self._problem("undisturbed", f"run undisturbed once more, it did not end as before: {error}")
            return None, UNDISTURBED
        undisturbed = agree(expected, [(0, checkpoint) for checkpoint in again.log.checkpoints])
        if undisturbed.first is not None:
            first = undisturbed.first
            self._problem(
                "undisturbed",
                "not deterministic even without kills: two undisturbed runs differ, first in step "
                f"{first.step}, {first.kind} {first.name}",
            )
        contents = expected[agreement.first.run, agreement.first.step].contents()
        return undisturbed, likely_causes(
            agreement.first,
            [*contents.leaves, *contents.values],
            undisturbed_too=undisturbed.first is not None,
        )

    def _problem(self, kind: str, message: str, details: str = "") -> None:
        # A mistake of the script shows at every start: report it once. Report every loss by a kill.
        if kind not in _ONCE or all(problem.kind != kind for problem in self.problems):
            self.problems.append(DrillProblem(kind, message, details))

    def _steps_in(self, stage: str, run: str) -> list[int]:
        path = self.directory / stage / RUNS / run
        return list_steps(str(path)) if path.is_dir() else []

    def _stage(self, name: str) -> Stage:
        return Stage(self.directory / name, self.options.command, self.options.timeout)

    def _watch(self, doing: str) -> Callable[[ActivityLog], None]:
        def watch(log: ActivityLog) -> None:
            places = [activity.position or 0 for activity in log.runs.values()]
            self.on_progress(DrillProgress(doing, len(self.kills), max(places, default=0), self.steps))

        return watch
