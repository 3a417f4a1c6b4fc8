"""``everystep prune``."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep import inspect
from everystep.checkpointer import keep as keep_module
from everystep.checkpointer.keep import record_rules, recorded_rules
from everystep.store import WritableRun
from everystep.store.names import RULES
from support.processes.command import (
    command,
    damage_manifest,
    make_run,
    make_state,
    run_names,
    step_path,
    truncate,
)


def steps(run: Path) -> list[int]:
    return [int(name[5:]) for name in run_names(run)]


def trained(run: Path, keep: everystep.Keep | None, steps: range = range(1, 7)) -> Path:
    """A run with more checkpoints than its own rules keep, as after a kill, and those rules."""
    make_run(run, list(steps))
    (run / RULES).unlink()
    with closing(everystep.Checkpointer(run, make_state(), keep=keep, mode="sync")) as checkpointer:
        record_rules(checkpointer._context.run.directory, keep or everystep.Keep())
    return run


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (None, [4, 5, 6]),
        (everystep.Keep(last=1), [6]),
        (everystep.Keep(last=1, every=3, best=("loss", "max", 1)), [1, 3, 6]),
        (everystep.Keep(last=np.int64(1), every=np.int32(4), best=("loss", "max", np.int8(2))), [1, 2, 4, 6]),
        (everystep.Keep(last=1, seconds=math.inf), [1, 6]),
    ],
)
def test_the_rules_of_the_runs_own_training_hold(
    keep: everystep.Keep | None, stay: list[int], tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", keep)
    assert recorded_rules(str(run)) == (keep or everystep.Keep())
    assert "rules of the run: keep the last" in command("prune", run, "--dry-run").out
    document = command("prune", run, "--json").document
    assert document["kept"] == steps(run) == stay
    assert inspect.prune(run).rules == (keep or everystep.Keep())


def test_a_training_records_its_rules_with_its_first_save(tmp_path: Path) -> None:
    with everystep.Checkpointer(
        tmp_path / "run", make_state(), keep=everystep.Keep(last=7), mode="sync"
    ) as checkpointer:
        assert recorded_rules(str(tmp_path / "run")) is None
        checkpointer.save(1)
        checkpointer.wait()
        assert recorded_rules(str(tmp_path / "run")) == everystep.Keep(last=7)
    # A script that only restores has rules of its own, which say nothing of the run.
    with everystep.Checkpointer(tmp_path / "run", make_state(), keep=everystep.Keep(last=1)) as checkpointer:
        checkpointer.restore()
    assert recorded_rules(str(tmp_path / "run")) == everystep.Keep(last=7)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b'{"last":3',
        b'{"last":3,"every":null,"best":null}',
        b'{"last":3,"every":null,"best":null,"seconds":null,"newer":1}',
        b'{"last":0,"every":null,"best":null,"seconds":null}',
        b'{"last":"3","every":null,"best":null,"seconds":null}',
        b'{"last":1,"every":null,"best":["loss","least",1],"seconds":null}',
        b"[1]",
        b'"',
        b"\xff",
    ],
)
def test_without_readable_rules_prune_asks_for_one(content: bytes | None, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / RULES).unlink()
    if content is not None:
        (run / RULES).write_bytes(content)
    for arguments in ([], ["--dry-run"]):
        outcome = command("prune", run, *arguments)
        assert outcome.code == 2
        assert "--last 3" in outcome.err
    with pytest.raises(ValueError, match="does not say which of its checkpoints to keep"):
        inspect.prune(run)
    assert steps(run) == [1, 2, 3, 4, 5]
    assert command("prune", run, "--last", "3").code == 0
    assert steps(run) == [3, 4, 5]


def test_rules_that_cannot_be_recorded_leave_no_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = make_state()
    with everystep.Checkpointer(
        run, state, keep=everystep.Keep(last=100, every=2), mode="sync"
    ) as checkpointer:
        checkpointer.restore()
        monkeypatch.setattr(keep_module, "replace_file", full)
        with pytest.warns(RuntimeWarning, match="rules of .* were not recorded"):
            checkpointer.save(6)
    monkeypatch.undo()
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert recorded_rules(str(run)) is None


def test_rules_that_are_given_hold_alone(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", everystep.Keep(every=1))
    outcome = command("prune", run, "--last", "3")
    assert outcome.code == 0
    assert steps(run) == [4, 5, 6]
    assert "rules: keep the last 3" in outcome.out
    assert "kept: step 4, 5, 6" in outcome.out


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        (["--last", "1"], [5]),
        (["--last", "1", "--every", "2"], [2, 4, 5]),
        (["--last", "1", "--best", "loss:max:2"], [1, 2, 5]),
        (["--last", "1", "--best", "loss:min:2"], [4, 5]),
        (["--last", "1", "--seconds", "1000000"], [1, 5]),
        (["--last", "100"], [1, 2, 3, 4, 5]),
    ],
)
def test_a_checkpoint_stays_if_any_rule_wants_it(rules: list[str], stay: list[int], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    document = command("prune", run, *rules, "--json").document
    assert steps(run) == stay
    assert document["kept"] == stay
    assert [item["step"] for item in document["removed"]] == [
        step for step in range(1, 6) if step not in stay
    ]
    for step in stay:
        assert command("verify", step_path(run, step)).code == 0


def test_json_holds_what_was_done(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    nbytes = sum(file.stat().st_size for file in step_path(run, 1).iterdir())
    document = command("prune", run, "--last", "1", "--best", "loss:min:1", "--json").document
    (removed,) = document.pop("removed")
    assert (removed["path"], removed["step"], removed["nbytes"]) == (str(step_path(run, 1)), 1, nbytes)
    assert document == {
        "path": str(run),
        "dry_run": False,
        "rules": {"last": 1, "every": None, "best": ["loss", "min", 1], "seconds": None},
        "swept": [],
        "kept": [2],
        "damaged": [],
        "held": [],
        "freed_nbytes": nbytes,
    }


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.copytree(step_path(run, 5), run / "step-000000000006.partial")
    before = sorted(run.rglob("*"))
    outcome = command("prune", run, "--last", "2", "--dry-run")
    assert outcome.code == 0
    assert sorted(run.rglob("*")) == before
    assert "would go" in outcome.out
    document = command("prune", run, "--last", "2", "-n", "--json").document
    assert [item["step"] for item in document["removed"]] == [1, 2, 3]
    assert document["dry_run"] is True


def test_what_unfinished_saves_left_goes_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    shutil.copytree(step_path(run, 2), run / "step-000000000003.partial")
    document = command("prune", run, "--json").document
    assert steps(run) == [1, 2]
    assert [Path(item["path"]).name for item in document["swept"]] == ["step-000000000003.partial"]
    assert document["freed_nbytes"] == document["swept"][0]["nbytes"] > 0


def test_damaged_checkpoints_stay_and_count_for_no_rule(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    truncate(step_path(run, 5))
    damage_manifest(step_path(run, 4))
    document = command("prune", run, "--last", "1", "--json").document
    assert steps(run) == [3, 4, 5]  # 3 is the last one that is whole
    assert document["damaged"] == [4, 5]


def test_a_run_that_is_being_written_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with everystep.Checkpointer(run, make_state(), keep=everystep.Keep(last=10), mode="sync"):
        outcome = command("prune", run, "--last", "1", "--json")
        assert outcome.code == 1
        assert outcome.document["error"]["type"] == "Locked"
    assert steps(run) == [1, 2, 3, 4, 5]


def test_one_that_is_being_read_is_held_and_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    with everystep.open(step_path(run, 1)) as reader:
        document = command("prune", run, "--last", "1", "--json").document
        assert [Path(path).name for path in document["held"]] == ["step-000000000001.retired"]
        assert document["freed_nbytes"] == 0
        assert reader.read("model.b")["model.b"].tolist() == [1.0] * 20
    assert "step-000000000001.retired" in run_names(run)
    command("prune", run)
    assert steps(run) == [2]


@pytest.mark.parametrize(
    "rules",
    [
        ["--last", "0"],
        ["--every", "0"],
        ["--seconds", "-1"],
        ["--best", "loss"],
        ["--best", "loss:least:2"],
        ["--best", "loss:min:x"],
        ["--best", "loss:min:0"],
        ["--best", ":min:2"],
    ],
    ids=" ".join,
)
def test_rules_that_make_no_sense_are_wrong_usage(rules: list[str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    assert command("prune", run, *rules).code == 2
    assert steps(run) == [1, 2]


def test_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1])
    outcome = command("prune", step_path(run, 1))
    assert outcome.code == 1
    assert "not a run" in outcome.err


def test_a_directory_without_checkpoints_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not delete")
    outcome = command("prune", tmp_path)
    assert outcome.code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("when", ["before the lock", "after the lock"])
def test_a_link_that_is_re_pointed_meanwhile_costs_the_other_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    first, other = make_run(tmp_path / "first"), make_run(tmp_path / "other", [1, 2, 3])
    current = tmp_path / "current"
    current.symlink_to(first)

    def re_pointed() -> None:
        current.unlink()
        current.symlink_to(other)

    def changed(real: Callable[..., None]) -> Callable[..., None]:
        def call(self: WritableRun, *args: Any, **more: Any) -> None:
            re_pointed()
            real(self, *args, **more)

        return call

    name = "__init__" if when == "before the lock" else "retire"
    monkeypatch.setattr(WritableRun, name, changed(getattr(WritableRun, name)))
    outcome = command("prune", current, "--last", "3", "--json")
    assert steps(other) == [1, 2, 3]
    assert steps(first) == [1, 2, 3, 4, 5]
    if when == "after the lock":
        assert outcome.document["error"]["type"] == "RunMoved"
    else:
        assert outcome.document["kept"] == [1, 2, 3]


def test_a_metric_that_no_checkpoint_has_removes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    outcome = command("prune", run, "--last", "1", "--best", "los:min:2")
    assert outcome.code == 1
    assert "'los'" in outcome.err
    assert "'loss'" in outcome.err
    assert steps(run) == [1, 2, 3, 4, 5]
    assert command("prune", run, "--best", "los:min:2", "--dry-run").code == 1
    assert "metric 'a:b'" in command("prune", run, "--best", "a:b:max:3").err


def test_checkpoints_of_other_names_are_not_said_to_be_gone(tmp_path: Path) -> None:
    for name in ("best", "final"):
        everystep.save(tmp_path / name, make_state())
    outcome = command("prune", tmp_path)
    assert outcome.code == 0
    assert "nothing to prune" in outcome.out
    assert "kept" not in outcome.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "final"]
