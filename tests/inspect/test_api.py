"""`everystep.inspect` from Python: typed results, no output, no command behind it."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import everystep
from everystep import inspect


def make_run(path: Path, steps: int = 3) -> Path:
    state = {"w": np.zeros(1000), "b": np.ones(3), "lr": 0.1}
    with everystep.Checkpointer(path, state, keep=everystep.Keep(last=100), mode="sync") as ckpt:
        for step in range(1, steps + 1):
            state["w"][:] = step
            ckpt.save(step, metrics={"loss": 1.0 / step})
    return path


def test_the_package_is_an_attribute_that_is_imported_on_first_use() -> None:
    code = (
        "import sys, everystep; assert 'everystep.inspect' not in sys.modules; everystep.inspect.list_run; "
        "print(*[name for name in ('typer', 'rich', 'torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_results_are_frozen_dataclasses_and_functions_say_what_they_do() -> None:
    for name in inspect.__all__:
        found = getattr(inspect, name)
        if dataclasses.is_dataclass(found):
            assert found.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
        if name != "Progress":
            assert found.__doc__, name


def test_list_run_names_checkpoints_and_leftovers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "step-000000000009.partial").mkdir()
    found = inspect.list_run(run)
    assert [entry.step for entry in found.checkpoints] == [1, 2, 3]
    assert found.checkpoints[1].metrics == {"loss": 0.5}
    assert [left.kind for left in found.leftovers] == ["partial"]
    assert found.damaged == ()


def test_describe_has_leaves_in_the_order_of_the_state(tmp_path: Path) -> None:
    found = inspect.describe(make_run(tmp_path / "run"))
    assert (found.step, list(found.leaves), found.values["lr"]) == (3, ["w", "b"], 0.1)
    only = inspect.describe(tmp_path / "run", leaves="b*")
    assert (list(only.leaves), only.all_leaves) == (["b"], 2)
    with pytest.raises(everystep.StateMismatch, match="nothing"):
        inspect.describe(tmp_path / "run", leaves="nothing*")


def test_compare_tells_how_far_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    told: list[tuple[int, int]] = []
    first = run / "step-000000000001"
    found = inspect.compare(first, run, progress=lambda done, total: told.append((done, total)))
    assert (found.equal, [change.name for change in found.leaves]) == (False, ["w"])
    assert (found.leaves[0].differing, found.leaves[0].max_abs) == (1000, 2.0)
    assert told[-1] == (8024, 8024)
    assert inspect.compare(run, run).equal


def test_export_writes_the_chosen_leaves_and_keeps_what_exists(tmp_path: Path) -> None:
    run, output = make_run(tmp_path / "run"), tmp_path / "out.safetensors"
    done = inspect.export(run, output, select=["b"])
    assert (done.leaves, done.step, done.nbytes) == (1, 3, output.stat().st_size)
    before = output.read_bytes()
    with pytest.raises(everystep.CheckpointExists):
        inspect.export(run, output)
    assert output.read_bytes() == before
    assert inspect.export(run, output, force=True).leaves == 2


def test_verify_all_reports_every_checkpoint_and_progress_reaches_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (shard,) = (run / "step-000000000002").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    told: list[tuple[int, int]] = []
    reports = inspect.verify_all(run, progress=lambda done, total: told.append((done, total)))
    assert [(report.step, report.intact) for report in reports if report.intact] == [(1, True), (3, True)]
    assert len(reports) == 3
    assert told[-1][0] == told[-1][1] > 0


def test_prune_says_what_it_would_do_and_then_does_it(tmp_path: Path) -> None:
    run, keep = make_run(tmp_path / "run"), everystep.Keep(last=1)
    would = inspect.prune(run, keep, dry_run=True)
    assert [item.step for item in would.removed] == [1, 2]
    assert len(inspect.list_run(run).checkpoints) == 3
    done = inspect.prune(run, keep)
    assert dataclasses.replace(done, dry_run=True) == would
    assert [entry.step for entry in inspect.list_run(run).checkpoints] == [3]


def test_summarize_sums_up_events_and_says_why_there_are_none(tmp_path: Path) -> None:
    found = inspect.summarize(make_run(tmp_path / "run"))
    assert found.summary.saves is not None
    assert (found.summary.saves.count, found.summary.failed, found.skipped_lines) == (3, 0, 0)
    with pytest.raises(inspect.NoEvents, match="is a checkpoint") as caught:
        inspect.summarize(tmp_path / "run" / "step-000000000003")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path) == (str(caught.value), caught.value.path)
    assert isinstance(caught.value, FileNotFoundError)


def test_diagnose_measures_as_much_as_asked(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = inspect.diagnose(
        tmp_path, speed_nbytes=1 << 20, progress=lambda done, total: told.append((done, total))
    )
    assert found.speed is not None
    assert found.speed.nbytes == 1 << 20
    assert told[-1] == (6 << 20, 6 << 20)
    assert list(tmp_path.iterdir()) == []
    assert inspect.diagnose(tmp_path, speed_nbytes=0).speed is None
