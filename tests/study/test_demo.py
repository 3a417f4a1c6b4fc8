"""The demo must prove what it says, and must be able to say no."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import holdfast
from holdfast.study import demo, demo_speed, demo_train

SHORT = {"steps": 6, "kill_at": 4, "race_repeats": 0}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_killed_and_resumed_training_equals_an_undisturbed_one(tmp_path: Path) -> None:
    console = quiet()
    report = demo.tell(demo.DemoOptions(directory=tmp_path, **SHORT), console)
    assert report.problems == ()
    assert report.equal
    assert report.resumed_after == 3
    assert report.digest_resumed == report.digest_straight
    # 3 layers of weights, two moments and a step counter for each parameter, and both generators.
    assert report.comparison.leaves > 100
    assert "Equal, bit for bit" in console.file.getvalue()  # type: ignore[attr-defined]


def test_comparison_names_the_one_leaf_that_differs_in_one_bit(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    other = tensor.clone()
    other.view(torch.int32)[500] ^= 1
    for run, value in (("a", tensor), ("b", other)):
        (tmp_path / run).mkdir()
        holdfast.save(tmp_path / run / "step-000000000002", {"same": tensor, "other": value, "lr": 0.1})
    comparison = demo.compare(tmp_path / "a", tmp_path / "b", 2)
    assert comparison.differing == ("other",)
    assert comparison.leaves == 2
    assert comparison.nbytes == 8000


def test_comparison_notices_a_leaf_only_one_run_has_and_a_different_value(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    holdfast.save(tmp_path / "a" / "step-000000000002", {"w": torch.zeros(3), "lr": 0.1})
    holdfast.save(tmp_path / "b" / "step-000000000002", {"w": torch.zeros(3), "v": torch.zeros(1), "lr": 0.2})
    assert demo.compare(tmp_path / "a", tmp_path / "b", 2).differing == ("v", "(values)")


def test_demo_exits_1_when_the_process_is_not_killed_in_the_save(tmp_path: Path) -> None:
    console = quiet()
    options = demo.DemoOptions(directory=tmp_path, steps=2, kill_at=99, race_repeats=0)
    assert demo.main(options, console=console) == 1
    assert "should have been killed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_demo_refuses_a_directory_with_an_earlier_one_and_leaves_it_alone(tmp_path: Path) -> None:
    old = tmp_path / "interrupted" / "step-000000000006"
    old.mkdir(parents=True)
    (tmp_path / "straight").mkdir()  # nothing in it: no run
    console = quiet()
    assert demo.main(demo.DemoOptions(directory=tmp_path, **SHORT), console=console) == 1
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"There are runs of an earlier demo: {tmp_path / 'interrupted'}." in said
    assert "another directory" in said
    assert old.is_dir()


def test_demo_exits_1_and_shows_the_traceback_when_training_fails(tmp_path: Path) -> None:
    console = quiet()
    (tmp_path / "interrupted").write_text("a file where the run should be")
    assert demo.main(demo.DemoOptions(directory=tmp_path, **SHORT), console=console) == 1
    assert "Traceback" in console.file.getvalue()  # type: ignore[attr-defined]


def test_square_brackets_of_a_traceback_reach_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: demo.DemoOptions, console: Console) -> demo.DemoReport:
        raise demo.DemoFailed("sync([job, manifest], directory)")

    monkeypatch.setattr(demo, "tell", fails)
    console = quiet()
    assert demo.main(console=console) == 1
    assert "sync([job, manifest], directory)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_report_as_json_carries_the_ratios() -> None:
    ours, theirs = demo_speed.Speed("holdfast", 1.0, 2.0), demo_speed.Speed("torch", 3.0, 3.0)
    report = demo.DemoReport(
        equal=True,
        killed_at=2,
        resumed_after=1,
        comparison=demo.Comparison(1, 8, ()),
        digest_resumed="x",
        digest_straight="x",
        race=demo_speed.Race(8, 1, ours, theirs),
        seconds=1.0,
    )
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["race"]["save_ratio"] == 3.0
    assert plain["race"]["load_ratio"] == 1.5


def test_race_leaves_nothing_behind(tmp_path: Path) -> None:
    result = demo_speed.race(tmp_path, nbytes=1 << 20, repeats=1)
    assert result.nbytes == 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_race_refuses_wrong_bytes() -> None:
    right = {"w": torch.zeros(4)}
    with pytest.raises(AssertionError, match="other bytes"):
        demo_speed.require_equal(right, {"w": -right["w"]}, "somebody")  # -0.0 == 0.0, but not bit for bit


def test_digest_sees_a_single_bit_and_a_plain_value() -> None:
    tensor = torch.zeros(3)
    changed = tensor.clone()
    changed.view(torch.int32)[1] = 1
    digests = {
        demo_train.digest_of({"w": tensor, "n": 1}),
        demo_train.digest_of({"w": changed, "n": 1}),
        demo_train.digest_of({"w": tensor, "n": 2}),
    }
    assert len(digests) == 3


def test_batches_go_on_where_they_stopped() -> None:
    text = "a holdfast grips the rock " * 20
    first = demo_train.Batches(text, seed=1)
    first.draw()
    remembered = first.state_dict()
    expected = first.draw()
    second = demo_train.Batches(text, seed=2)
    second.load_state_dict(remembered)
    actual = second.draw()
    assert torch.equal(expected[0], actual[0])
    assert torch.equal(expected[1], actual[1])
