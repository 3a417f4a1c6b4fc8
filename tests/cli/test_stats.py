"""``everystep stats``."""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from PIL import Image

import everystep
from everystep.checkpointer.events import (
    EVENTS_NAME,
    Event,
    Failed,
    Opened,
    PassedOver,
    Phases,
    Preempted,
    Restored,
    Saved,
)
from everystep.inspect.event_summary import distribution, metric_points
from support.processes.command import command, make_run, make_state, step_path
from support.states.shown_runs import write_log


def opened(time: float) -> Opened:
    return Opened(time=time, pid=77, host="node-3", mode="overlap", every=5)


def saved(step: int, time: float, *, write: float = 0.5, stall: float = 0.1) -> Saved:
    return Saved(
        step=step,
        time=time,
        mode="overlap",
        nbytes=10**9,
        stored_nbytes=10**9 + 4096,
        leaves=12,
        seconds=Phases(stage=0.125, write=write, sync=0.25, commit=0.125),
        stall_seconds=stall,
        in_place_nbytes=75 * 10**7,
        copied_nbytes=25 * 10**7,
    )


def failed(step: int, time: float) -> Failed:
    return Failed(
        step=step, time=time, mode="overlap", error="StorageFull", message="no room", stall_seconds=0.3
    )


def story() -> list[Event]:
    """Two trainings: saves and a failed one; then a damaged checkpoint, a restore, a save, and the end."""
    return [
        opened(100.0),
        saved(5, 110.0, stall=0.4),
        saved(10, 120.0),
        failed(15, 130.0),
        saved(20, 140.0, write=4.5),
        opened(1000.0),
        PassedOver(step=20, time=1001.0, reason="digest differs"),
        Restored(step=10, time=1002.0, nbytes=10**9, seconds=0.5),
        saved(15, 1010.0),
        Preempted(step=15, time=1011.0, signal="SIGTERM"),
    ]


def words(svg: Path) -> str:
    return " ".join(
        "".join(node.itertext()) for node in ElementTree.parse(svg).iter() if node.tag.endswith("text")
    )


@pytest.mark.parametrize("name", ["events.jsonl", "events.1.jsonl"])
@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_events_that_are_no_file_are_an_error_and_not_waited_for(
    name: str, kind: str, tmp_path: Path
) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    error = command("stats", tmp_path, "--json").document["error"]
    assert error["type"] == "ReadFailed"
    assert str(tmp_path / name) in error["message"]


def test_the_summary_counts_and_measures(tmp_path: Path) -> None:
    summary = command("stats", write_log(tmp_path / "run", story()), "--json").document["summary"]
    assert (summary["events"], summary["trainings"], summary["failed"]) == (10, 2, 1)
    assert (summary["passed_over"], summary["preempted"]) == (1, 1)
    assert (summary["first_time"], summary["last_time"]) == (100.0, 1011.0)
    saves = summary["saves"]
    assert (saves["count"], saves["first_step"], saves["last_step"]) == (4, 5, 15)
    assert (saves["nbytes"], saves["stored_nbytes"]) == (4 * 10**9, 4 * 10**9 + 4 * 4096)
    assert saves["gb_per_second"]["median"] == pytest.approx(1.0)
    assert saves["gb_per_second"]["low"] == pytest.approx(0.2)
    assert saves["seconds"]["write"] == {"median": 0.5, "low": 0.5, "p95": 4.5, "high": 4.5, "total": 6.0}
    assert saves["seconds"]["total"]["total"] == pytest.approx(8.0)
    assert summary["restores"]["count"] == 1
    assert summary["restores"]["seconds"]["median"] == 0.5
    assert summary["stall_seconds"]["total"] == pytest.approx(0.4 + 0.1 + 0.3 + 0.1 + 0.1)


def test_the_time_between_two_trainings_is_no_interval(tmp_path: Path) -> None:
    summary = command("stats", write_log(tmp_path / "run", story()), "--json").document["summary"]
    # From 110 to 120 and on to 140; a failed save makes no interval of its own, but its stall counts.
    assert summary["saves"]["between_seconds"]["total"] == 30.0
    assert summary["saves"]["between_seconds"]["high"] == 20.0
    assert summary["saves"]["between_steps"]["high"] == 10
    assert summary["stall_share"] == pytest.approx((0.1 + 0.3 + 0.1) / 30.0)


def test_a_clock_that_was_set_back_makes_no_negative_interval(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", [saved(1, 100.0), saved(2, 50.0), saved(3, 60.0)])
    summary = command("stats", run, "--json").document["summary"]
    assert summary["saves"]["between_seconds"]["low"] == 10.0
    assert summary["stall_share"] == pytest.approx(0.01)


def test_a_single_save_has_no_interval(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", [saved(1, 100.0)])
    summary = command("stats", run, "--json").document["summary"]
    assert summary["saves"]["between_seconds"] is summary["stall_share"] is summary["restores"] is None
    assert "between saves" not in command("stats", run).out


def test_a_spread_is_computed_by_nearest_rank() -> None:
    found = distribution(range(1, 101))
    assert found is not None
    assert (found.median, found.low, found.p95, found.high, found.total) == (50.5, 1, 95, 100, 5050)
    assert distribution([]) is None


def test_the_text_says_what_the_numbers_are(tmp_path: Path) -> None:
    outcome = command("stats", write_log(tmp_path / "run", story()))
    assert "opened 2 times by a Checkpointer" in " ".join(outcome.out.split())
    assert outcome.code == 0
    assert outcome.err == ""
    for line in (
        f"run {tmp_path / 'run'}",
        "saves 4 durable, 1 failed; step 5 to 15",
        "state 954 MiB in 12 leaves; 75% read in place",
        "stall 1.67% of the time between saves",
        "skipped 1 damaged checkpoint, by restores",
        "preempted once",
        "median lowest 95% highest total",
        "GB/s 1.00 0.20 - 1.00 -",
        "write 500.00 ms 500.00 ms 4.5 s 4.5 s 6.0 s",
        "restore 500.00 ms 500.00 ms 500.00 ms 500.00 ms 500.00 ms",
    ):
        assert line in outcome.lines
    assert "step 15 failed, StorageFull: no room" in " ".join(outcome.lines)
    assert "step 10 restored 954 MiB in 500.00 ms, 2.00 GB/s" in " ".join(outcome.lines)
    assert "opened by process 77 on node-3, mode overlap, every 5" in outcome.out


@pytest.mark.parametrize(("last", "shown"), [("0", 0), ("3", 3), ("99", 10)])
def test_last_chooses_how_many_events_are_listed(last: str, shown: int, tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", story())
    latest = command("stats", run, "--json", "--last", last).document["latest"]
    names = ["opened", "saved", "saved", "failed", "saved", "opened", "passed_over", "restored", "saved"]
    assert [event["event"] for event in latest] == [*names, "preempted"][10 - shown :]
    listed = [line for line in command("stats", run, "--last", last).lines if line.startswith("19")]
    assert len(listed) == shown


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", story())
    with open(run / EVENTS_NAME, "ab") as file:
        file.write(b'{"event":"sav')
    outcome = command("stats", run)
    assert outcome.code == 0
    assert "1 line skipped" in outcome.out
    document = command("stats", run, "--json").document
    assert document["skipped_lines"] == 1
    assert document["summary"]["events"] == 10


def test_text_from_the_log_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    bad = Failed(step=1, time=1.0, mode="sync", error="X\x1b[2J", message="[red]\x1b]0;owned\x07")
    out = command("stats", write_log(tmp_path / "run", [bad])).out
    assert "\x1b" not in out
    assert "[red]" in out


def test_a_run_with_only_failures_is_reported(tmp_path: Path) -> None:
    outcome = command("stats", write_log(tmp_path / "run", [opened(1.0), failed(1, 2.0), failed(2, 3.0)]))
    assert outcome.code == 0
    assert "saves none durable, 2 failed" in outcome.lines


# Where there is nothing to tell.


def test_a_run_without_events_is_one_helpful_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    (run / EVENTS_NAME).unlink(missing_ok=True)
    outcome = command("stats", run)
    assert (outcome.code, outcome.out) == (1, "")
    assert f"{run} has checkpoints but no events.jsonl" in outcome.err
    assert "everystep ls" in outcome.err
    error = command("stats", run, "--json").document["error"]
    assert (error["type"], error["path"]) == ("NoEvents", str(run))


@pytest.mark.parametrize("kind", ["nothing", "file", "directory"])
def test_what_is_not_a_run_is_named(kind: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if kind == "file":
        elsewhere.write_text("not a directory")
    elif kind == "directory":
        elsewhere.mkdir()
    outcome = command("stats", elsewhere)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("everystep: ")
    assert outcome.err.count("\n") == 1
    assert str(elsewhere) in outcome.err
    assert str(elsewhere) in command("stats", elsewhere, "--json").document["error"]["message"]


def test_a_checkpoint_points_to_its_run(tmp_path: Path) -> None:
    everystep.save(step_path(tmp_path, 7), make_state(), step=7)
    outcome = command("stats", step_path(tmp_path, 7))
    assert outcome.code == 1
    assert f"everystep stats {tmp_path}\n" in outcome.err


def test_a_log_without_a_single_event_says_so(tmp_path: Path) -> None:
    (tmp_path / EVENTS_NAME).write_text("hello\nworld\n")
    outcome = command("stats", tmp_path)
    assert outcome.code == 1
    assert "has 2 lines, and none that this version knows" in outcome.err


# The picture.


def test_the_picture_is_a_png_with_the_phases_and_the_failures(tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    outcome = command("stats", write_log(tmp_path / "run", story()), "--plot", picture)
    assert outcome.code == 0
    assert f"drawn: {picture}" in outcome.out
    with Image.open(picture) as image:
        image.load()
        assert image.format == "PNG"
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    for expected in ((0x0B, 0x72, 0x85), (0x66, 0xB2, 0xC0), (0xD9, 0x48, 0x0F)):
        assert expected in colours  # write, sync, a failed save


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    picture = tmp_path / "out.SVG"
    document = command("stats", write_log(tmp_path / "a$b$", story()), "--plot", picture, "--json").document
    assert document["plot"] == str(picture)
    said = words(picture)
    for text in ("Saves of a$b$", "4 durable saves", "1 failed", "resumed 1 time", "Stall", "GB/s", "commit"):
        assert text in said
    assert "drawn together" not in said


def test_one_save_and_ten_thousand_can_be_drawn(tmp_path: Path) -> None:
    command("stats", write_log(tmp_path / "one", [saved(1, 1.0)]), "--plot", tmp_path / "one.svg")
    said = words(tmp_path / "one.svg")
    assert "1 durable save of" in said
    assert "training waited, ms 1 step" in said  # the only place on the axis of steps
    many = [saved(step, float(step), stall=5.0 if step == 7000 else 0.01) for step in range(1, 10_001)]
    command("stats", write_log(tmp_path / "many", many), "--plot", tmp_path / "many.svg")
    said = words(tmp_path / "many.svg")
    assert "10,000 durable saves" in said
    assert "drawn together" in said
    assert "5 s" in said  # the one far above the others is told, not drawn to scale
    assert (tmp_path / "many.svg").stat().st_size < 1 << 20


def test_a_run_whose_name_is_no_text_can_be_drawn(tmp_path: Path) -> None:
    run = write_log(tmp_path / os.fsdecode(b"run\xff\n"), story())
    assert command("stats", run, "--plot", tmp_path / "out.svg").code == 0
    assert r"Saves of run\udcff\n" in words(tmp_path / "out.svg")


def test_without_a_durable_save_all_else_is_reported_and_nothing_plotted(tmp_path: Path) -> None:
    run, picture = write_log(tmp_path / "run", [failed(1, 1.0)]), tmp_path / "out.png"
    outcome = command("stats", run, "--plot", picture)
    assert (outcome.code, outcome.err) == (0, "")
    assert "none durable, 1 failed" in outcome.out
    assert "nothing to plot: no save of this run was durable" in outcome.out
    assert command("stats", run, "--plot", picture, "--json").document["plot"] is None
    assert not picture.exists()


@pytest.mark.parametrize("options", [("--plot", "x.jpg"), ("--last", "-1"), ("--last", "few")], ids=" ".join)
def test_options_that_make_no_sense_are_wrong_usage(options: tuple[str, ...], tmp_path: Path) -> None:
    outcome = command("stats", write_log(tmp_path / "run", story()), *options)
    assert outcome.code == 2
    assert outcome.out == ""


def test_metrics_of_pruned_steps_stay(tmp_path: Path) -> None:
    state = make_state()
    with everystep.Checkpointer(
        tmp_path / "run", state, keep=everystep.Keep(last=1), mode="sync"
    ) as checkpointer:
        for step, loss in ((1, 3.0), (2, math.nan), (3, 2.0), (4, 2.5)):
            checkpointer.save(step, metrics={"loss": loss, "tokens": step * 10**6})
    outcome = command("stats", tmp_path / "run")
    assert "loss 3 2.5 2 3 3 1" in outcome.lines
    assert "tokens 1000000 4000000 1000000 1 4000000 4" in outcome.lines
    table = command("stats", tmp_path / "run", "--metrics").lines
    assert [line.split()[0] for line in table[2:]] == ["1", "2", "3", "4"]
    assert table[3].endswith("nan 2000000")
    document = command("stats", tmp_path / "run", "--json").document
    assert [point["values"]["loss"] for point in document["metrics"]] == [3.0, "nan", 2.0, 2.5]
    assert document["summary"]["metrics"]["loss"]["low_step"] == 3
    assert command("stats", tmp_path / "run", "--plot", tmp_path / "p.svg").code == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert ">loss<" in drawn
    assert ">tokens<" in drawn


def test_metrics_of_steps_that_a_training_went_back_behind_are_gone() -> None:
    def point(step: int, loss: float) -> Saved:
        return msgspec.structs.replace(saved(step, float(step)), metrics={"loss": loss})

    back = Restored(step=2, time=9.0, nbytes=1, seconds=0.1)
    events: list[Event] = [
        opened(0),
        point(1, 1.0),
        point(2, 2.0),
        point(3, 3.0),
        opened(8),
        back,
        point(4, 4.0),
    ]
    assert [(found.step, found.values["loss"]) for found in metric_points(events)] == [(1, 1), (2, 2), (4, 4)]
    over: list[Event] = [*events, opened(10), point(2, 9.0)]
    assert [(found.step, found.values["loss"]) for found in metric_points(over)] == [(1, 1), (2, 9)]


def test_a_run_without_metrics_says_how_to_save_some(tmp_path: Path) -> None:
    with everystep.Checkpointer(tmp_path / "run", make_state(), mode="sync") as checkpointer:
        checkpointer.save(1)
    assert "save them with" in command("stats", tmp_path / "run", "--metrics").out
