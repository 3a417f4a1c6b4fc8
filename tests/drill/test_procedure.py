"""A drill must pass what resumes as it should, and must find every way in which it does not.

Real processes: scripts in `scripts/`, most of them without torch, because a start of torch takes seconds.
"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from everystep.drill import kill_times, procedure
from everystep.drill.kill_times import Aim, TrainingProfile
from everystep.drill.procedure import DrillOptions, run_drill
from everystep.drill.processes import DrillFailed
from everystep.drill.report import DrillReport

SCRIPTS = Path(__file__).parent / "scripts"
QUICK = ("--steps", "16", "--step-seconds", "0.005")
TIMEOUT = 240.0


@pytest.fixture(autouse=True)
def _saves_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills in a save come by a call of the engine, not by the clock, also where syncs take long today."""
    monkeypatch.setattr(kill_times, "_SHORT_SECONDS", math.inf)


def steady(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPTS / "steady.py"), "runs/steady", *QUICK, *arguments)


def held(tmp_path: Path, command: tuple[str, ...], times: int = 1, **options: float) -> DrillReport:
    return run_drill(
        DrillOptions(command, times=times, directory=tmp_path / "drill", timeout=TIMEOUT, **options)
    )  # type: ignore[arg-type]


def kinds(report: DrillReport) -> list[str]:
    return [problem.kind for problem in report.problems]


def test_a_training_that_resumes_as_it_should_passes(tmp_path: Path) -> None:
    told: list[procedure.DrillProgress] = []
    options = DrillOptions(steady(), times=4, directory=tmp_path / "drill", timeout=TIMEOUT)
    report = run_drill(options, told.append)
    assert report.problems == ()
    assert report.ok
    assert len(report.kills) == 4
    assert sum(report.phases.values()) == 4
    assert any(kill.aim == "saving" for kill in report.kills)
    if report.rounds == 1:  # else the draw_aims of another round, whose call may be the last of its save
        assert report.phases["saving"] >= 1
    assert report.steps == 16
    assert max(report.lost) <= 1
    assert all(kill.resumed is not None and kill.kept for kill in report.kills)
    assert (report.agreement.compared, report.agreement.differing) == (16, 0)
    assert [(final.step, final.equal) for final in report.finals] == [(16, True)] * report.rounds
    assert report.undisturbed is None
    assert report.causes == ()
    assert report.restored_seconds is not None
    assert 0 < report.restored_seconds.median <= report.restored_seconds.longest
    assert {progress.doing for progress in told} >= {"undisturbed", "kill 1 of 4", "kill 4 of 4"}
    # What was kept is what the report is about.
    names = {path.name for path in (tmp_path / "drill").iterdir()}
    assert names == {"reference", *[f"killed-{number}" for number in range(1, report.rounds + 1)]}


def test_noise_that_is_not_in_the_state_is_found_by_step_and_leaf(tmp_path: Path) -> None:
    report = held(tmp_path, steady("--forget-random"))
    first = report.agreement.first
    assert first is not None
    killed = report.kills[0]
    # The first step that a resumed training does itself is the first that can differ, and does.
    assert first.step == (killed.resumed or 0) + 1
    assert (first.kind, first.name, first.names) == ("leaf", "weights", ("weights", "momentum"))
    assert (first.leaves, first.leaves_in_all, first.values) == (2, 2, 0)
    assert first.after_kill == 1
    assert kinds(report) == ["final", "differs"]
    assert f"step {first.step} is the first that differs, in leaf weights" in report.problems[1].message
    assert report.undisturbed is not None
    assert report.undisturbed.differing == 0
    assert "everystep.rng()" in report.causes[0]
    assert max(report.lost) <= 1  # nothing was lost: the training itself goes another way


def dropout(*arguments: str) -> tuple[str, ...]:
    """A training with torch in the default mode, where saves run beside it."""
    pytest.importorskip("torch")
    return (sys.executable, str(SCRIPTS / "dropout.py"), "--steps", "20", *arguments)


def test_dropout_of_torch_goes_on_with_rng_in_the_state(tmp_path: Path) -> None:
    # By hand, because making an optimizer loads torch's compiler, which takes longer than all the rest.
    report = held(tmp_path, dropout("--by-hand", "--remember"))
    assert report.problems == ()
    assert report.agreement.compared == 20


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--by-hand",), ()], ids=["by-hand", "optimizer"])
def test_dropout_of_torch_that_is_not_in_the_state_is_found(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    report = held(tmp_path, dropout(*arguments))
    first = report.agreement.first
    assert first is not None
    assert first.step == (report.kills[0].resumed or 0) + 1
    assert first.name.startswith("model.")
    assert report.undisturbed is not None
    assert report.undisturbed.differing == 0
    assert "everystep.rng()" in report.causes[0]


def test_a_script_that_never_does_the_same_twice_is_recognised(tmp_path: Path) -> None:
    report = held(tmp_path, steady("--seed-from-time"))
    assert report.agreement.first is not None
    assert (report.agreement.first.step, report.agreement.first.after_kill) == (1, 0)
    assert report.undisturbed is not None
    assert report.undisturbed.differing == 16
    assert "undisturbed" in kinds(report)
    assert "time" in report.causes[0]


def test_steps_that_every_skips_may_be_lost(tmp_path: Path) -> None:
    report = held(tmp_path, steady("--every", "5"))
    assert report.problems == ()
    # Killed in a save, the only moment that can take all five; unless its last call had done it already.
    assert report.lost in ([5], [0])
    assert report.agreement.compared == 3


@pytest.mark.parametrize(
    ("mistake", "found", "message"),
    [
        ("--never-restore", ["restore", "lost"], "did not call restore()"),
        # It comes to steps that it did not make, which are not to be replaced.
        ("--ignore-restore", ["restore", "failed", "differs"], "the next step it completed was 1:"),
        pytest.param("--forget-checkpoints", ["lost"], "had to survive", marks=pytest.mark.slow),
        pytest.param("--new-path", ["path"], "opened another run", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_does_not_go_on_where_it_stopped(
    tmp_path: Path, mistake: str, found: list[str], message: str
) -> None:
    report = held(tmp_path, steady(mistake))
    assert kinds(report) == found
    assert message in report.problems[0].message
    assert not report.ok
    if "lost" in found:
        assert not report.kills[0].kept


def test_a_script_that_fails_when_resumed_is_shown_with_its_own_words(tmp_path: Path) -> None:
    report = held(tmp_path, steady("--fail-on-resume"))
    assert kinds(report) == ["failed"]
    assert "after kill 1, the command failed: exit code 1" in report.problems[0].message
    assert report.problems[0].details == "this script cannot resume"


@pytest.mark.slow
def test_a_script_that_hangs_when_resumed_runs_into_the_time_out(tmp_path: Path) -> None:
    options = DrillOptions(steady("--hang-on-resume"), times=1, directory=tmp_path / "drill", timeout=10)
    report = run_drill(options)
    assert kinds(report) == ["time-out"]
    assert "did not end within 10 s" in report.problems[0].message


def test_a_script_that_removes_its_run_in_the_end_is_compared_step_by_step(tmp_path: Path) -> None:
    report = held(tmp_path, steady("--remove-run"))
    assert report.problems == ()
    assert (report.agreement.compared, report.agreement.differing, report.finals) == (16, 0, ())
    assert "holds no checkpoint" in report.notes[0]


def test_a_second_undisturbed_run_that_fails_takes_nothing_of_the_report_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = procedure._Procedure._reference

    def reference(self: procedure._Procedure, name: str, doing: str) -> object:
        if name == "reference-2":
            raise DrillFailed("the command failed by itself")
        return real(self, name, doing)

    monkeypatch.setattr(procedure._Procedure, "_reference", reference)
    report = held(tmp_path, steady("--forget-random"))
    assert kinds(report) == ["final", "differs", "undisturbed"]
    assert "the command failed by itself" in report.problems[-1].message
    assert report.undisturbed is None


def test_behind_a_shell_the_whole_group_is_killed(tmp_path: Path) -> None:
    # Hit by the clock, since the process is not ours alone: long enough for a busy machine to look in time.
    line = f"{shlex.join(steady('--steps', '60'))}; exit $?"
    report = held(tmp_path, ("bash", "-c", line))
    assert report.problems == ()
    assert len(report.kills) == 1


@pytest.mark.crash_large
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "snapshot"])
def test_two_hundred_kills_cost_no_more_than_is_allowed_and_not_one_bit(tmp_path: Path, mode: str) -> None:
    report = held(tmp_path, steady("--mode", mode, "--steps", "400"), times=200)
    assert report.problems == ()
    assert len(report.kills) == 200
    assert all(count >= 20 for phase, count in report.phases.items() if phase != "starting")
    # A save that only copies may still be under way when the next step is done.
    assert max(report.lost) <= (1 if mode == "sync" else 2)


# --- nothing to judge ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pass", "created no everystep.Checkpointer"),
        ("raise SystemExit('out of coffee')", r"exit code 1\nout of coffee"),
        ("import everystep; everystep.Checkpointer('run', {'n': 1}).close()", "saved no checkpoint"),
    ],
)
def test_a_script_that_cannot_be_drilled_is_an_error_with_the_reason(
    tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(DrillFailed, match=message):
        held(tmp_path, (sys.executable, "-c", code))


def test_a_script_that_does_not_end_undisturbed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DrillFailed, match=r"did not end within 0\.2 s"):
        run_drill(DrillOptions(("sleep", "60"), directory=tmp_path / "drill", timeout=0.2))


def test_a_command_that_cannot_be_started_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(DrillFailed, match="cannot start '/nowhere/train'"):
        held(tmp_path, ("/nowhere/train",))


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drill").mkdir()
    (tmp_path / "drill" / "precious").touch()
    with pytest.raises(DrillFailed, match="not empty"):
        held(tmp_path, steady())
    assert [path.name for path in (tmp_path / "drill").iterdir()] == ["precious"]


def test_a_training_that_is_over_before_it_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procedure, "how_to_kill", lambda aim, profile: (lambda log, now: False, None))
    monkeypatch.setattr(procedure, "_FRUITLESS_ROUNDS", 2)
    with pytest.raises(DrillFailed, match="finished before it could be killed"):
        held(tmp_path, steady())
    assert (tmp_path / "drill" / "killed-2").is_dir()  # it was tried more than once


def test_a_training_that_ends_too_early_is_begun_again_for_the_other_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kill in the first training; one in the second, none in its second start; one in the third."""
    real, calls = procedure.how_to_kill, 0

    def how_to_kill(aim: Aim, profile: TrainingProfile) -> object:
        nonlocal calls
        calls += 1
        if calls in (1, 3):
            return lambda log, now: False, None
        return real(replace(aim, kind="saving"), profile)  # by a call of the engine: certain

    monkeypatch.setattr(procedure, "how_to_kill", how_to_kill)
    report = held(tmp_path, steady(), times=2)
    assert report.problems == ()
    assert (len(report.kills), report.rounds) == (2, 3)
    assert [final.equal for final in report.finals] == [True] * 3
