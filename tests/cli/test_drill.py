"""``everystep drill``: what it prints, its exit codes and its document; the drill has tests of its own."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from everystep.drill import kill_times, procedure
from everystep.drill.comparison import Agreement, Difference, Final
from everystep.drill.processes import DrillFailed
from everystep.drill.report import DrillProblem, DrillReport, Killed
from support.processes.command import command

KILLS = (
    Killed(1, "saving", "saving", 7, 6, resumed=6, lost=1),
    Killed(
        2, "restoring", "restoring", None, 0, resumed=6, lost=0, restored_seconds=0.5, durable_seconds=0.75
    ),
    Killed(3, "training", "training", 12, 12, resumed=12, lost=0, restored_seconds=0.7, durable_seconds=2.5),
)
PASSED = DrillReport(
    command=("python", "train.py"),
    seed=0,
    times=3,
    steps=20,
    rounds=1,
    kills=KILLS,
    agreement=Agreement(20, 0, None),
    finals=(Final("run-1234", 20, 20, 2, 2048, ()),),
    undisturbed=None,
    causes=(),
    problems=(),
    notes=(),
    reference_seconds=3.0,
    reference_start_seconds=0.25,
    seconds=9.0,
)
FIRST = Difference("run-1234", 7, "leaf", "model.w", ("model.w", "model.b"), 2, 2, 0, 1)
DIFFERS = replace(
    PASSED,
    agreement=Agreement(20, 14, FIRST),
    finals=(Final("run-1234", 20, 20, 2, 0, ("model.w", "model.b")),),
    undisturbed=Agreement(20, 0, None),
    causes=("the generators are not in the state: add [rng]",),
    problems=(DrillProblem("differs", "step 7 is the first that differs, in leaf model.w and 1 more"),),
)

DrillFinds = Callable[[DrillReport], list[procedure.DrillOptions]]


@pytest.fixture
def drill_finds(monkeypatch: pytest.MonkeyPatch) -> DrillFinds:
    """Makes the drill find what the test says; returns the options that it was given."""

    def prepare(report: DrillReport) -> list[procedure.DrillOptions]:
        given: list[procedure.DrillOptions] = []

        def run_drill(options: procedure.DrillOptions, on_progress: procedure.OnProgress) -> DrillReport:
            given.append(options)
            on_progress(procedure.DrillProgress("undisturbed", 0, 3, None))
            return report

        monkeypatch.setattr(procedure, "run_drill", run_drill)
        return given

    return prepare


def test_a_drill_that_is_passed_prints_every_kill_and_exits_with_0(drill_finds: DrillFinds) -> None:
    given = drill_finds(PASSED)
    outcome = command("drill", "--", sys.executable, "train.py")
    assert outcome.code == 0
    assert given == [procedure.DrillOptions((sys.executable, "train.py"))]
    assert "killed 3 times: 1 while restoring, 1 between saves, 1 in a save (seed 0)" in outcome.lines
    assert "steps lost 1 in all, 1 at most per kill" in outcome.lines
    assert "every step 20 checkpoints seen in both, all equal" in outcome.lines
    assert "last one step 20: identical bit for bit (2 leaves, 2.0 KiB)" in outcome.lines
    assert "1 in a save 7 6 1 - -" in outcome.lines
    assert "2 while restoring - 6 0 500.00 ms 750.00 ms" in outcome.lines
    assert "3 between saves 12 12 0 700.00 ms 2.5 s" in outcome.lines
    assert outcome.lines[-1] == "passed: nothing lost that had to survive, not one bit different"
    assert outcome.err == ""


def test_the_times_to_resume_are_the_middle_one_and_the_longest(drill_finds: DrillFinds) -> None:
    drill_finds(PASSED)
    lines = command("drill", "true").lines
    restored = "600.00 ms after the process started, at most 700.00 ms (the first start: 250.00 ms)"
    assert f"restored {restored}" in lines
    assert "next durable 1.6 s after the process started, at most 2.5 s" in lines


def test_options_before_the_command_are_the_drills_and_those_behind_it_the_commands(
    drill_finds: DrillFinds, tmp_path: Path
) -> None:
    given = drill_finds(PASSED)
    drills = ("--times", "3", "--seed", "5", "--timeout", "60", "--workdir", tmp_path)
    for separator in ((), ("--",)):
        outcome = command(
            "drill", *drills, *separator, "true", "train.py", "--seed", "9", "--json", "-n", "1"
        )
        assert outcome.code == 0
        assert outcome.lines[-1] == f"everything is kept in {tmp_path}"
    ours = ("true", "train.py", "--seed", "9", "--json", "-n", "1")
    assert given == [procedure.DrillOptions(ours, 3, 5, 60.0, tmp_path)] * 2


def test_a_difference_is_named_with_its_causes_and_exits_with_1(drill_finds: DrillFinds) -> None:
    drill_finds(DIFFERS)
    outcome = command("drill", "true")
    assert outcome.code == 1
    assert "every step 20 checkpoints seen in both, 14 differ" in outcome.lines
    assert "last one step 20: 2 leaves and values differ" in outcome.lines
    assert outcome.lines[-4:] == [
        "NOT passed",
        "step 7 is the first that differs, in leaf model.w and 1 more",
        "What commonly causes this:",
        "- the generators are not in the state: add [rng]",
    ]


def test_a_kill_that_cost_too_much_is_marked(drill_finds: DrillFinds) -> None:
    lost = tuple(DrillProblem("lost", f"kill {number}: lost") for number in range(1, 6))
    kills = (replace(KILLS[2], resumed=8, lost=4), *KILLS[1:])
    drill_finds(
        replace(PASSED, kills=kills, problems=(*lost, DrillProblem("failed", "it failed", "first\nsecond")))
    )
    outcome = command("drill", "true")
    assert outcome.code == 1
    assert "3 between saves 12 8 4 ! 700.00 ms 2.5 s" in outcome.lines
    assert outcome.lines[-7:] == [
        "kill 1: lost",
        "kill 2: lost",
        "kill 3: lost",
        "it failed",
        "first",
        "second",
        "… and 2 more of the kind 'lost' (--json has them)",
    ]


def test_another_last_step_and_nothing_in_common_are_said_plainly(drill_finds: DrillFinds) -> None:
    finals = (Final("run-1234", 18, 20, 2, 2048, ()),)
    notes = ("2 of 3 kills: the training finished before the next one",)
    drill_finds(
        replace(PASSED, agreement=Agreement(0, 0, None), finals=finals, rounds=2, notes=notes, kills=())
    )
    outcome = command("drill", "true")
    assert "every step no checkpoint was seen in both" in outcome.lines
    assert "last one step 18, undisturbed 20" in outcome.lines
    assert "killed 0 times, in 2 trainings (seed 0)" in outcome.lines
    assert notes[0] in outcome.lines
    assert "next durable never" in outcome.lines


def test_many_kills_are_cut_short_in_the_table_only(drill_finds: DrillFinds) -> None:
    drill_finds(replace(PASSED, kills=KILLS[:1] * 40))
    assert "… and 15 more (--json has them)" in command("drill", "true").lines
    assert len(command("drill", "--json", "true").document["kills"]["each"]) == 40


def test_the_document_has_everything(drill_finds: DrillFinds) -> None:
    drill_finds(DIFFERS)
    outcome = command("drill", "--json", "--", "true", "train.py")
    assert (outcome.code, outcome.err) == (1, "")
    document = outcome.document
    assert (document["ok"], document["identical"]) == (False, False)
    assert document["kills"]["count"] == 3
    assert document["kills"]["by_phase"] == {"starting": 0, "restoring": 1, "training": 1, "saving": 1}
    assert document["kills"]["each"][0] == {
        "number": 1,
        "aim": "saving",
        "phase": "saving",
        "step": 7,
        "due": 6,
        "resumed": 6,
        "lost": 1,
        "restored_seconds": None,
        "durable_seconds": None,
    }
    assert document["steps_lost"] == {"total": 1, "most": 1}
    assert document["resume_seconds"]["restored"] == {"median": 0.6, "longest": 0.7}
    assert document["agreement"]["first"]["step"] == 7
    assert document["agreement"]["first"]["name"] == "model.w"
    assert document["problems"][0]["kind"] == "differs"
    drill_finds(PASSED)
    passed = command("drill", "--json", "true")
    assert (passed.code, passed.document["ok"], passed.document["identical"]) == (0, True, True)


def test_a_drill_that_cannot_be_held_is_an_error_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_drill(options: procedure.DrillOptions, on_progress: procedure.OnProgress) -> DrillReport:
        raise DrillFailed("the command failed by itself: exit code 1\nTraceback [most recent]")

    monkeypatch.setattr(procedure, "run_drill", run_drill)
    outcome = command("drill", "true")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "everystep: the command failed by itself: exit code 1\nTraceback [most recent]\n"
    error = command("drill", "--json", "true").document["error"]
    assert error["type"] == "DrillFailed"
    assert "Traceback [most recent]" in error["message"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--",), ("--times", "0", "true"), ("--timeout", "0", "true"), ("no-such-command-anywhere",)],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    outcome = command("drill", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Usage" in outcome.err


def test_a_script_that_cannot_be_executed_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    outcome = command("drill", "train.py")
    assert outcome.code == 2
    assert "python train.py" in outcome.err


def test_a_real_drill_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kill_times, "_SHORT_SECONDS", math.inf)  # killed by a call, however long a sync takes
    code = """
import numpy, everystep
state = {"w": numpy.zeros(10)}
with everystep.Checkpointer("run", state, mode="sync") as ckpt:
    for step in range(ckpt.restore(), 10):
        state["w"] += step
        ckpt.save(step + 1)
"""
    outcome = command("drill", "-n", "1", "--json", "--", sys.executable, "-c", code)
    assert outcome.code == 0
    assert outcome.document["identical"] is True
    assert outcome.document["kills"]["by_phase"]["saving"] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_drill_ends_the_training_too_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The training is in a session of its own, where neither a terminal nor a scheduler reaches it."""
    script = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600"
    arguments = [sys.executable, "-m", "everystep.cli", "drill", "--", "bash", "-c", script]
    (tmp_path / "here").mkdir()

    def heed() -> None:
        signal.signal(number, signal.SIG_DFL)  # under nohup, the tests themselves ignore one of these

    with subprocess.Popen(arguments, cwd=tmp_path / "here", preexec_fn=heed) as drill:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists():
            assert drill.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        drill.send_signal(number)
        assert drill.wait(120) == 128 + number
    stat = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] in "ZX"
    assert list((tmp_path / "here").iterdir()) == []
