"""The parts of a drill by themselves: moments, logs, comparisons, causes, processes."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import everystep
from everystep.checkpointer.drilling import DIARY, DIRECTORY, RUNS, Contents, Kill, Mark, Observed, What
from everystep.drill import kill_times, processes
from everystep.drill.activity import ActivityLog, RunActivity, SeenCheckpoint
from everystep.drill.comparison import Difference, agree, compare_last, index
from everystep.drill.kill_times import Aim, TrainingProfile, draw_aims, how_to_kill
from everystep.drill.likely_causes import likely_causes
from everystep.drill.procedure import DrillOptions, _Pending, _Procedure
from everystep.drill.processes import Stage, Start
from everystep.drill.report import Killed
from everystep.engine import BACKENDS, Backend, capabilities, faults
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.store.read.checkpoint import open_newest
from support.worlds.several_ranks import write_several

SHORT = TrainingProfile(
    first_step=0,
    last_step=100,
    last_save=100,
    step_seconds=0.2,
    save_seconds=0.01,
    save_calls=10,
    restore_seconds=0.01,
    restore_calls=3,
    own_process=True,
)


def profile(**changed: float | bool) -> TrainingProfile:
    fields = {name: getattr(SHORT, name) for name in SHORT.__dataclass_fields__}
    return TrainingProfile(**{**fields, **changed})


# --- moments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3, 10, 200])
def test_moments_are_drawn_by_the_seed_and_spread_over_the_training(times: int) -> None:
    aims = draw_aims(times, SHORT, seed=3)
    assert len(aims) == times
    assert draw_aims(times, SHORT, seed=3) == aims
    assert times == 1 or draw_aims(times, SHORT, seed=4) != aims
    places = [aim.place for aim in aims]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 100
    assert aims[0].kind != "restoring"
    if times >= 3:
        assert {aim.kind for aim in aims} == {"saving", "restoring", "training"}
    if times == 200:
        assert places[0] < 10
        assert places[-1] > 90


def test_a_short_save_is_hit_by_its_own_calls_and_a_long_one_also_by_the_clock() -> None:
    saves = [aim for aim in draw_aims(100, SHORT, seed=0) if aim.kind == "saving"]
    assert all(how_to_kill(aim, SHORT)[1] is not None for aim in saves)
    found = {how_to_kill(aim, profile(save_seconds=2.0))[1] is None for aim in saves}
    assert found == {True, False}
    # Behind a launcher no rank kills itself.
    assert all(how_to_kill(aim, profile(own_process=False))[1] is None for aim in saves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kills_by_call_fall_on_every_call_of_a_large_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    able = capabilities(str(tmp_path))
    if (backend != "buffered" and not able.direct) or (backend == "uring" and not able.uring):
        pytest.skip(f"no {backend} here")
    monkeypatch.setenv("EVERYSTEP_BACKEND", backend)
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "reference"))
    log = ActivityLog(tmp_path / "reference" / DIARY)
    calls: list[int] = []
    with everystep.Checkpointer("large", {"w": np.zeros(64 << 20, np.uint8)}, mode="sync") as ckpt:
        for step in range(1, 7):
            with faults.injected(f"any:{1 << 30}:EIO"):  # never: only to count
                ckpt.save(step)
                calls.append(faults.count_calls())
    log.follow()
    (run,) = log.runs.values()
    start = Start(log, 0.0, 1.0, 0, False, False, False, "")
    found = _Procedure(DrillOptions(("true",)), tmp_path, lambda progress: None)._profile(start, run)

    kills = [how_to_kill(Aim("saving", 3.0, share / 1000, True), found)[1] for share in range(1000)]
    assert {kill.nth for kill in kills if kill is not None} == set(range(1, found.save_calls + 1))
    # The number of calls varies a little: the first save gets its memory, later ones recycle files.
    assert statistics.median(calls) - 2 <= found.save_calls <= statistics.median(calls)


def test_a_kill_in_a_save_falls_on_any_of_its_calls_and_never_behind_the_last_save() -> None:
    late = profile(last_save=50)
    kills = [how_to_kill(aim, late)[1] for aim in draw_aims(400, late, seed=1) if aim.kind == "saving"]
    assert {kill.nth for kill in kills if kill is not None} == set(range(1, 11))
    assert max(kill.step for kill in kills if kill is not None) == 50


def test_a_moment_between_saves_comes_so_long_after_its_step(tmp_path: Path) -> None:
    aim = next(aim for aim in draw_aims(10, SHORT, seed=0) if aim.kind == "training")
    step, part = divmod(aim.place, 1)
    trigger, kill = how_to_kill(aim, SHORT)
    assert kill is None
    assert trigger is not None
    log = ActivityLog(tmp_path / DIARY)
    log.runs["run"] = activity = RunActivity("run", 1, 0.0)
    assert not trigger(log, 0.0)
    activity.completed = int(step) - 1
    assert not trigger(log, 10.0)
    activity.completed = int(step)
    assert not trigger(log, 20.0)
    assert not trigger(log, 20.0 + part * 0.2 - 0.001)
    assert trigger(log, 20.0 + part * 0.2 + 0.001)


# --- logs ------------------------------------------------------------------------------------------


def line(what: What, step: int | None = None, *, mode: str | None = None, digest: str | None = None) -> bytes:
    mark = Mark(what, "run", 1.0, 7, step, digest=digest, mode=mode)
    return msgspec.json.encode(mark) + b"\n"


def test_a_line_that_a_kill_cut_short_is_neither_read_nor_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / DIARY
    log = ActivityLog(path)
    log.follow()
    assert log.phase == "starting"
    whole = line("opened") + line("restored", 0) + line("completed", 1)
    path.write_bytes(whole + line("saving", 1)[:-9])
    log.follow()
    assert log.phase == "training"
    log.close()
    assert path.read_bytes() == whole

    following = ActivityLog(path)
    with path.open("ab") as file:
        file.write(line("opened") + line("restoring"))
    following.follow()
    assert following.phase == "restoring"
    assert following.runs["run"].completed is None  # the start before is another start's log


def test_a_line_that_comes_in_two_parts_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / DIARY
    log = ActivityLog(path)
    data = line("opened") + line("saving", 3)
    for cut in range(len(data)):
        path.write_bytes(data[: cut + 1])
        log.follow()
    assert log.runs["run"].begun == [3]
    assert log.phase == "saving"


def activity(*marks: tuple[What, int], mode: str | None = None, run: str = "run") -> RunActivity:
    made = RunActivity(run, 1, 0.0)
    for number, (what, step) in enumerate(marks):
        made.note(Mark(what, run, float(number), 1, step, mode=mode if what == "saving" else None))
    return made


STEP: tuple[What, ...] = ("completed", "saving", "durable")
STEP_OF_6: tuple[tuple[What, int], ...] = tuple((what, 6) for what in STEP)
FIRST: tuple[tuple[What, int], ...] = (
    ("restored", 4),
    ("completed", 5),
    ("saving", 5),
    ("durable", 5),
    ("completed", 6),
    ("saving", 6),
)


def test_what_must_survive_a_kill() -> None:
    assert activity().due == 0
    assert activity(("restored", 4)).due == 4
    assert activity(*FIRST[:3]).due == 4  # in its first save
    assert activity(*FIRST[:4]).due == 5
    assert activity(*FIRST).due == 5
    assert activity(*FIRST).completed == 6
    # One save at a time: that of step 7 has begun, so that of step 6 has ended.
    assert activity(*FIRST, ("completed", 7), ("saving", 7)).due == 6


def test_a_step_ends_when_the_save_before_it_is_durable_except_where_saves_only_copy() -> None:
    marks: tuple[tuple[What, int], ...] = (*FIRST, ("completed", 7))
    assert activity(*marks, mode="overlap").due == 6
    assert activity(*marks, mode="sync").due == 6
    assert activity(*marks, mode="snapshot").due == 5


def test_a_save_that_failed_need_not_survive() -> None:
    assert activity(*FIRST, ("failed", 6), ("completed", 7), ("saving", 7)).due == 5
    assert activity(*FIRST, ("failed", 6)).phase == "training"


def test_a_training_that_goes_back_gives_up_what_came_later() -> None:
    went_on: tuple[tuple[What, int], ...] = (
        ("restored", 4),
        *((what, step) for step in (5, 6, 7) for what in STEP),
    )
    back = activity(*went_on, ("restored", 5))
    assert (back.restored, back.due, back.durable) == (4, 5, 5)
    assert activity(*went_on, ("restored", 5), *STEP_OF_6[:2]).due == 5
    assert activity(*went_on, ("restored", 5), *STEP_OF_6).due == 6
    # Below where this start began, too.
    assert activity(*went_on, ("restored", 2), ("completed", 3), ("saving", 3), ("durable", 3)).due == 3


# --- what kills have cost -----------------------------------------------------------------------------


def killed_and_resumed(tmp_path: Path, before: list[RunActivity], *starts: list[RunActivity]) -> _Procedure:
    """A drill of two runs, after a kill and these starts, each of which shows what came of it."""
    drill = _Procedure(
        DrillOptions(("true",)), tmp_path, lambda progress: None, runs=frozenset({"pre", "fine"})
    )
    for number, runs in enumerate((before, *starts), 1):
        log = ActivityLog(tmp_path / DIARY)
        log.runs = {activity.run: activity for activity in runs}
        drill._resume(Start(log, 0.0, 1.0, -9, True, False, False, ""))
        step = max((activity.position or 0 for activity in runs), default=0)
        killed = Killed(number, "training", "training", step, max(activity.due for activity in runs))
        drill.kills.append(killed)
        drill.pending.append(_Pending(killed, dict(log.runs)))
    return drill


def test_runs_that_follow_each_other_are_judged_when_a_start_comes_to_them(tmp_path: Path) -> None:
    first = activity(("restored", 0), ("completed", 10), ("saving", 10), ("durable", 10), run="pre")
    second = activity(("restored", 0), ("completed", 3), ("saving", 3), ("durable", 3), run="fine")
    again = activity(("restored", 10), run="pre")
    found = killed_and_resumed(tmp_path, [first, second], [again])
    assert found.problems == []
    assert [(kill.step, kill.resumed, kill.lost, kill.kept) for kill in found.kills][:1] == [
        (10, 10, 0, True)
    ]
    found = killed_and_resumed(
        tmp_path, [first, second], [again], [again, activity(("restored", 1), run="fine")]
    )
    assert [problem.kind for problem in found.problems] == ["lost"]
    assert "2 steps lost: step 3 had to survive, training went on from step 1" in found.problems[0].message
    kill = found.kills[0]
    assert (kill.step, kill.due, kill.resumed, kill.lost, kill.kept) == (3, 3, 1, 2, False)


def test_a_step_that_is_saved_again_at_the_end_is_no_mistake(tmp_path: Path) -> None:
    before = activity(("restored", 0), ("completed", 10), ("saving", 10), ("durable", 10), run="pre")
    last_again: tuple[tuple[What, int], ...] = (("restored", 10), ("completed", 10), ("saving", 10))
    assert killed_and_resumed(tmp_path, [before], [activity(*last_again, run="pre")]).problems == []
    found = killed_and_resumed(tmp_path, [before], [activity(*last_again, ("completed", 11), run="pre")])
    assert [problem.kind for problem in found.problems] == ["restore"]


def test_to_restore_once_more_at_the_end_is_no_mistake(tmp_path: Path) -> None:
    before = activity(("restored", 0), ("completed", 10), ("saving", 10), ("durable", 10), run="pre")
    after = activity(
        ("restored", 10), ("completed", 11), ("saving", 11), ("durable", 11), ("restored", 11), run="pre"
    )
    found = killed_and_resumed(tmp_path, [before], [after])
    assert found.problems == []
    assert found.kills[0].resumed == 10


# --- comparisons --------------------------------------------------------------------------------------


def checkpoints(path: Path, steps: dict[int, dict[str, str]]) -> list[SeenCheckpoint]:
    """A log of durable steps, each with a digest for each leaf."""
    log = ActivityLog(path)
    with path.open("wb") as file:
        for step, leaves in steps.items():
            digest = str(sorted(leaves.items()))
            found = Observed(
                "durable", "run", 1.0, 1, step, digest=digest, contents=Contents(leaves, {"n": "1"})
            )
            file.write(msgspec.json.encode(found) + b"\n")
    log.follow()
    return log.checkpoints


def test_the_first_step_that_differs_is_named_with_its_leaves_in_order(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path / "a", {step: {"a": "0", "w": "1", "v": "2"} for step in range(1, 6)})
    good = {"a": "0", "w": "1", "v": "2"}
    other = checkpoints(
        tmp_path / "b", {2: good, 5: {"a": "9"}, 4: {"a": "0", "w": "8", "x": "7"}, 9: {"a": "9"}}
    )
    agreement = agree(index(mine), [(number, checkpoint) for number, checkpoint in enumerate(other)])
    assert (agreement.compared, agreement.differing) == (3, 2)
    first = agreement.first
    assert first is not None
    assert (first.step, first.name, first.names, first.after_kill) == (4, "w", ("w", "v", "x"), 2)
    assert (first.leaves, first.leaves_in_all, first.values) == (3, 3, 0)
    assert agree(index(mine), [(0, checkpoint) for checkpoint in mine]).first is None


def test_last_checkpoints_are_compared_by_their_bytes_not_by_their_checksums(tmp_path: Path) -> None:
    import numpy as np

    for stage in ("a", "b"):
        (tmp_path / stage / RUNS / "run").mkdir(parents=True)
        state = {"w": np.arange(2_000_000.0), "b": np.zeros(3), "lr": 0.1}
        everystep.save(tmp_path / stage / RUNS / "run" / "step-000000000003", state)
    same = compare_last(tmp_path / "a", tmp_path / "b", "run", 3, 3)
    assert (same.equal, same.leaves, same.nbytes) == (True, 2, 16_000_024)

    path = tmp_path / "b" / RUNS / "run" / "step-000000000003"
    with open_newest(path) as opened:
        leaf = next(leaf for leaf in opened._parts.root.part.leaves if leaf.name == "w")
    with (path / "r00000.v0.safetensors").open("r+b") as file:
        file.seek(leaf.fragments[0].offset + 9_000_000)
        file.write(b"\xff")
    assert compare_last(tmp_path / "a", tmp_path / "b", "run", 3, 3).differing == ("w",)


def test_what_every_rank_wrote_of_the_last_checkpoint_is_compared(tmp_path: Path) -> None:
    import numpy as np

    layout = LeafLayout("w", "F32", (40, 8), (MeshPlacement(Mesh.grid(2), (Split(0, 0),)),), "numpy")
    plan = WritePlan([layout], Topology.regular(2), block_nbytes=64)
    for stage in ("a", "b"):
        path = tmp_path / stage / RUNS / "run" / "step-000000000003"
        path.parent.mkdir(parents=True)
        state = {"w": np.arange(320, dtype=np.float32).reshape(40, 8)}
        write_several(path, plan, state, tree={"w": {"$leaf": "w"}}, step=3)
    same = compare_last(tmp_path / "a", tmp_path / "b", "run", 3, 3)
    assert (same.equal, same.leaves, same.nbytes) == (True, 1, 1280)

    with open_newest(path) as opened:
        (leaf,) = opened._parts[1].leaves
    with (path / "r00001.v0.safetensors").open("r+b") as file:
        file.seek(leaf.fragments[0].offset)
        file.write(b"\xff")
    assert compare_last(tmp_path / "a", tmp_path / "b", "run", 3, 3).differing == ("w",)


# --- causes -------------------------------------------------------------------------------------------


def likely(names: list[str], state: list[str], *, undisturbed_too: bool = False) -> str:
    found = Difference("run", 3, "leaf", names[0], tuple(names), len(names), len(state), 0, 1)
    return likely_causes(found, state, undisturbed_too=undisturbed_too)[0]


def test_the_causes_are_named_in_plain_words() -> None:
    """A rename of a function once put its name into these sentences."""
    found = Difference("run", 3, "leaf", "w", ("w",), 1, 1, 0, 1)
    printed = " ".join(likely_causes(found, [], undisturbed_too=False)) + likely(["data.epoch"], ["rng"])
    assert "dropout, shuffling and augmentation draw from them" in printed
    assert printed.count("or draw each batch from the step number") == 1
    assert "or draw the batch from the step number" in printed
    names = {name for name in vars(kill_times) if "_" in name.strip("_")}
    assert names.isdisjoint(re.findall(r"\w+", printed))


def test_the_likeliest_cause_follows_from_what_differs_and_what_is_missing() -> None:
    weights = ["model.0.weight", "optimizer.0.weight.exp_avg"]
    assert "everystep.rng()" in likely(weights, weights)
    assert "order of the data is not in the state" in likely(weights, [*weights, "rng.torch"])
    assert "loader.position: the place in the data" in likely(
        ["loader.position"], [*weights, "loader.position"]
    )
    assert "rng.torch: a random number generator is in the state" in likely(["rng.torch"], ["rng.torch"])
    assert "started_time depends on the clock" in likely(["started_time"], [*weights, "started_time"])
    counted = ["rng.torch", "model.1.num_batches_tracked"]
    assert "order of the data is not in the state" in likely(weights, counted)
    complete = ["rng.torch", "data.epoch"]
    assert "is a buffer" in likely(["model.1.running_mean"], [*complete, "model.1.running_mean"])
    assert "the optimizer or schedule" in likely(["optimizer.lr"], [*complete, "optimizer.lr"])
    assert "add up in any order" in likely(weights, [*weights, *complete])
    assert "seeds that are not fixed" in likely(weights, weights, undisturbed_too=True)
    assert "rng.python.words belongs to a generator" in likely(
        ["rng.python.words"], complete, undisturbed_too=True
    )


# --- processes ----------------------------------------------------------------------------------------


def test_no_process_outlives_a_start(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; exit 3"
    start = Stage(tmp_path / "stage", ("bash", "-c", script), 60).start(1)
    assert (start.exit_code, start.killed, start.timed_out, start.finished) == (3, False, False, False)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_kill_takes_the_whole_group_and_counts_as_a_kill(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait"
    stage = Stage(tmp_path / "stage", ("bash", "-c", script), 60)
    start = stage.start(1, trigger=lambda log, now: (tmp_path / "pid").exists())
    assert (start.killed, start.timed_out, start.finished) == (True, False, False)
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("killed", [True, False])
def test_a_worker_in_a_session_of_its_own_does_not_outlive_a_start(tmp_path: Path, killed: bool) -> None:
    """Launchers make such workers: no signal to the group of the launcher reaches them."""
    worker = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 600"
    script = f"setsid bash -c '{worker}' & until [ -e {tmp_path}/pid ]; do sleep 0.01; done"
    stage = Stage(tmp_path / "stage", ("bash", "-c", f"{script}; {'wait' if killed else ''}"), 60)
    start = stage.start(1, trigger=lambda log, now: killed and (tmp_path / "pid").exists())
    assert (start.killed, start.finished) == (killed, not killed)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_an_interrupt_while_a_start_begins_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    def begin(*arguments: object) -> object:
        pids.append(real(*arguments).pid)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    real = processes._begin
    monkeypatch.setattr(processes, "_begin", begin)
    with pytest.raises(KeyboardInterrupt):
        Stage(tmp_path / "stage", ("sleep", "600"), 60).start(1)
    assert not alive(pids[0])


def test_an_interrupt_while_a_start_is_cleared_away_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker in a session of its own is known from a look at all processes only."""

    def running() -> object:
        monkeypatch.undo()
        raise KeyboardInterrupt

    worker = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 600"
    script = f"setsid bash -c '{worker}' & until [ -e {tmp_path}/pid ]; do sleep 0.01; done"
    monkeypatch.setattr(processes, "_running", running)
    with pytest.raises(KeyboardInterrupt):
        Stage(tmp_path / "stage", ("bash", "-c", script), 60).start(1)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_process_that_is_just_becoming_another_program_is_known_by_its_environment() -> None:
    """Its environment is empty for a moment, in which every tenth of these would be met."""
    marked = {**os.environ, DIRECTORY: "here"}
    for _ in range(100):
        with subprocess.Popen(("sleep", "600"), env=marked) as worker:
            try:
                assert f"{DIRECTORY}=here".encode() in processes._environment(worker.pid)
            finally:
                worker.kill()


def test_a_process_that_carries_the_name_of_another_drill_is_left_alone(tmp_path: Path) -> None:
    other = {**os.environ, DIRECTORY: f"{tmp_path}/stage-2"}
    with subprocess.Popen(("sleep", "600"), env=other) as bystander:
        try:
            Stage(tmp_path / "stage", ("true",), 60).start(1)
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_drill_kills_neither_itself_nor_older_processes_that_carry_its_name(tmp_path: Path) -> None:
    """Who looks into a start by hand exports the variable, and then holds the drill again."""
    exported = {**os.environ, DIRECTORY: f"{tmp_path}/stage"}
    code = (
        "import sys; from pathlib import Path; from everystep.drill.processes import Stage\n"
        "print(Stage(Path(sys.argv[1]), ('true',), 60).start(1).finished)"
    )
    with subprocess.Popen(("sleep", "600"), env=exported) as older:
        try:
            drill = (sys.executable, "-c", code, f"{tmp_path}/stage")
            assert subprocess.check_output(drill, env=exported, text=True, timeout=60) == "True\n"
            assert older.poll() is None
        finally:
            older.kill()


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    start = Stage(tmp_path / "stage", ("sleep", "600"), 0.2).start(1)
    assert (start.killed, start.timed_out, start.finished) == (False, True, False)
    assert start.seconds < 600


def test_the_end_of_what_a_start_complained_of_is_kept(tmp_path: Path) -> None:
    code = "import sys; [print('line', n, file=sys.stderr) for n in range(100)]; print('result')"
    start = Stage(tmp_path / "stage", (sys.executable, "-c", code), 60).start(4)
    assert start.finished
    assert start.errors.splitlines()[-1] == "line 99"
    assert len(start.errors.splitlines()) < 30
    assert (tmp_path / "stage" / "start-004.out").read_text() == "result\n"


def test_the_kill_of_an_earlier_start_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYSTEP_DRILL_KILL", "saving:1:1")
    show = ("bash", "-c", "echo ${EVERYSTEP_DRILL_KILL-none} $EVERYSTEP_DRILL")
    stage = Stage(tmp_path / "stage", show, 60)
    stage.start(1)
    stage.start(2, kill=Kill("saving", 2, 5))
    found = [(tmp_path / "stage" / f"start-00{number}.out").read_text().split() for number in (1, 2)]
    assert found == [["none", str(tmp_path / "stage")], ["saving:2:5", str(tmp_path / "stage")]]


def alive(pid: int) -> bool:
    """A killed process that is not reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
