"""The training loop: saving, resuming, keeping, and what happens when checkpoints are damaged."""

from __future__ import annotations

import errno
import gc
import math
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep import Checkpointer, Keep
from everystep.checkpointer import preemption
from everystep.engine import faults
from everystep.store import step_name
from support.crashes.run_model import hurt

DAMAGE = ["shard", "manifest", "missing", "truncated"]


def blank() -> dict[str, Any]:
    return {"w": np.zeros(1000), "note": "", "epoch": 0}


def at(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, float(step)), "note": f"after {step}", "epoch": step}


def set_state(state: dict[str, Any], step: int) -> None:
    state["w"][:] = step
    state["note"], state["epoch"] = f"after {step}", step


def is_at(state: dict[str, Any], step: int) -> bool:
    return bool((state["w"] == step).all()) and (state["note"], state["epoch"]) == (f"after {step}", step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 5, all kept."""
    state = blank()
    with Checkpointer(tmp_path / "run", state, keep=Keep(last=10), mode="sync") as checkpointer:
        for step in range(1, 6):
            set_state(state, step)
            checkpointer.save(step, metrics={"loss": 1 / step})
    return tmp_path / "run"


@pytest.fixture
def asked() -> Iterator[None]:
    """What a test asks this process to do is forgotten behind it."""
    yield
    preemption._leave_to_the_parent()


def test_a_loop_that_is_interrupted_again_and_again_ends_like_one_that_is_not(tmp_path: Path) -> None:
    def train(run: Path, stop: int) -> tuple[int, bytes]:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 30)
        optimizer = torch.optim.Adam(model.parameters())
        steps = {"seen": 0}
        with Checkpointer(
            run, {"model": model, "optimizer": optimizer, "steps": steps}, mode="sync"
        ) as checkpointer:
            start = checkpointer.restore()
            for step in range(start, stop):
                optimizer.zero_grad()
                model(torch.arange(30.0) * (step + 1)).square().mean().backward()
                optimizer.step()
                steps["seen"] += 1
                checkpointer.save(step + 1)
        assert steps["seen"] == stop
        return start, b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())

    starts = [train(tmp_path / "often", stop)[0] for stop in (2, 5, 6)]
    assert starts == [0, 2, 5]
    start, often = train(tmp_path / "often", 9)
    assert start == 6
    assert often == train(tmp_path / "once", 9)[1]


def test_a_new_run_starts_at_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "deep" / "er" / "run", blank(), mode="sync") as checkpointer:
        assert checkpointer.restore() == 0
        assert checkpointer.steps == []
        assert checkpointer.last_durable is None
        assert checkpointer.path == os.fspath(tmp_path / "deep" / "er" / "run")


def test_a_save_is_durable_and_counted_when_it_returns(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, at(1), mode="sync") as checkpointer:
        saving = checkpointer.save(1, metrics={"loss": 0.5})
        assert saving is not None
        info = saving.result()
        assert (info.step, info.metrics) == (1, {"loss": 0.5})
        assert info.path == os.fspath(tmp_path / step_name(1))
        assert checkpointer.last_durable == 1
        assert checkpointer.steps == [1]
        assert is_at(everystep.load(tmp_path), 1)


def test_restoring_brings_back_the_newest(run: Path) -> None:
    state = blank()
    with Checkpointer(run, state, mode="sync") as checkpointer:
        assert checkpointer.last_durable is None
        assert checkpointer.restore() == 5
        assert checkpointer.last_durable == 5
        assert is_at(state, 5)
        with pytest.warns(RuntimeWarning, match="going back to step 2"):
            assert checkpointer.restore(2) == 2
        assert checkpointer.last_durable == 2
        assert is_at(state, 2)
        with pytest.raises(everystep.CheckpointNotFound, match="no checkpoint of step 7"):
            checkpointer.restore(7)


@pytest.mark.parametrize("name", ["latest", step_name(9)])
def test_a_link_that_leads_to_itself_is_no_checkpoint(run: Path, name: str) -> None:
    (run / name).symlink_to(name)
    state = blank()
    with Checkpointer(run, state, mode="sync") as checkpointer:
        assert checkpointer.steps == [1, 2, 3, 4, 5]
        assert checkpointer.restore() == 5
        if name == step_name(9):
            with pytest.raises(everystep.errors.ReadFailed, match=name):
                checkpointer.restore(9)
    assert is_at(everystep.load(run), 5)


def test_a_run_that_cannot_be_listed_is_a_typed_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with Checkpointer(run, blank(), mode="sync") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr("everystep.store.run.os.scandir", denied)
            for read in (checkpointer.restore, lambda: everystep.load(run)):
                with pytest.raises(everystep.errors.ReadFailed, match="Permission denied") as caught:
                    read()
                assert caught.value.errno == errno.EACCES
        assert checkpointer.restore() == 5


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["one file", "manifest apart"])
def test_a_single_checkpoint_is_not_taken_for_a_run(tmp_path: Path, size: int) -> None:
    everystep.save(tmp_path / "c", {"w": np.ones(size)})
    before = sorted(os.listdir(tmp_path / "c"))
    with pytest.raises(everystep.CheckpointExists, match="a directory of its own"):
        Checkpointer(tmp_path / "c", {"w": np.zeros(size)}, mode="sync")
    assert sorted(os.listdir(tmp_path / "c")) == before


def test_a_file_in_place_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for run in (tmp_path / "file", tmp_path / "file" / "deeper" / "run"):
        with pytest.raises(everystep.SaveFailed, match=f"{tmp_path / 'file'} is not a directory; move it"):
            Checkpointer(run, blank(), mode="sync")


def test_every_may_be_a_whole_number_of_any_library(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"w": np.zeros(3)}, every=np.int64(3), mode="sync") as checkpointer:  # type: ignore[arg-type]
        assert [step for step in range(1, 7) if checkpointer.save(step)] == [3, 6]
        assert checkpointer.events.broken is None
    assert '"every":3' in (tmp_path / "events.jsonl").read_text().splitlines()[0]


def test_every_skips_the_steps_between(tmp_path: Path) -> None:
    state = blank()
    with Checkpointer(tmp_path, state, every=3, keep=Keep(last=9), mode="sync") as checkpointer:
        saved = [step for step in range(1, 10) if checkpointer.save(step) is not None]
        assert saved == checkpointer.steps == [3, 6, 9]


def test_calls_that_are_far_apart_save_however_short_a_process_lives(tmp_path: Path) -> None:
    for step in (391, 782, 1173):
        with Checkpointer(tmp_path, blank(), every=100, mode="sync") as checkpointer:
            assert checkpointer.restore() == step - 391
            assert checkpointer.save(step) is not None
            assert checkpointer.save(step + 8) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"every": -1},
        {"every": "often"},
        {"mode": "async"},
        {"on_error": "ignore"},
        {"timeout": 0},
        {"mtbf": "6h"},
        {"budget": 2},
        {"keep": 5},
        {"keep": 0},
        {"options": 5},
        {"options": {}},
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{next(iter(arguments))} "):
        Checkpointer(tmp_path / "run", blank(), **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 10**12, 2.5, True, "7"])
def test_a_step_that_no_name_can_hold_is_refused_and_never_skipped(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path, blank(), every=3, mode="sync") as checkpointer:
        with pytest.raises(ValueError, match="step"):
            checkpointer.save(step)
        assert checkpointer.steps == []


# --- keeping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "snapshot"])
@pytest.mark.parametrize(
    "metrics",
    [{"loss": None}, {"loss": "0.5"}, {"loss": torch.zeros(2)}, {"loss": 10**400}, {1: 0.5}, [0.5], 5],
)
def test_metrics_that_are_no_numbers_are_refused_at_once(tmp_path: Path, metrics: Any, mode: Any) -> None:
    with Checkpointer(tmp_path / "run", blank(), mode=mode) as checkpointer:
        with pytest.raises(TypeError, match="metric"):
            checkpointer.save(1, metrics=metrics)
        assert checkpointer.steps == []
    with pytest.raises(TypeError, match="metric"):
        everystep.save(tmp_path / "c", blank(), metrics=metrics)
    assert not (tmp_path / "c").exists()


def test_metrics_are_taken_when_save_is_called(tmp_path: Path) -> None:
    loss = torch.tensor(0.5)
    metrics = {"loss": loss, "accuracy": np.float32(0.25), "epoch": 3}
    keep = Keep(last=1, best=("loss", "min", 1))
    with Checkpointer(tmp_path, blank(), mode="snapshot", keep=keep) as checkpointer:
        saving = checkpointer.save(1, metrics=metrics)  # type: ignore[arg-type]
        loss.fill_(9.0)
        assert saving is not None
        found = saving.result().metrics
        assert found == {"loss": 0.5, "accuracy": 0.25, "epoch": 3.0}
        assert {type(value) for value in found.values()} == {float}


def test_three_stay_by_default(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, at(0), mode="sync") as checkpointer:
        for step in range(8):
            checkpointer.save(step)
        assert checkpointer.steps == [5, 6, 7]


def test_the_best_by_a_metric_stay(tmp_path: Path) -> None:
    losses = [0.9, 0.2, math.nan, 0.1, 0.8, 0.7, 0.6]
    with Checkpointer(
        tmp_path, at(0), keep=Keep(last=1, best=("loss", "min", 2)), mode="sync"
    ) as checkpointer:
        for step, loss in enumerate(losses):
            checkpointer.save(step, metrics={"loss": loss})
        assert checkpointer.steps == [1, 3, 6]
    # The next process knows the metrics, too.
    with Checkpointer(
        tmp_path, at(0), keep=Keep(last=1, best=("loss", "min", 2)), mode="sync"
    ) as checkpointer:
        assert checkpointer.restore() == 6
        checkpointer.save(7, metrics={"loss": 0.15})
        assert checkpointer.steps == [3, 7]


def test_going_back_gives_up_what_came_later_once_something_new_is_durable(run: Path) -> None:
    state = blank()
    with Checkpointer(run, state, keep=Keep(last=2), mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="the first save removes the later checkpoints"):
            checkpointer.restore(1)
        assert checkpointer.steps == [1, 2, 3, 4, 5]
        set_state(state, 77)
        checkpointer.save(2)
        assert checkpointer.steps == [1, 2]
        assert checkpointer.restore() == 2
        assert is_at(state, 77)


def test_going_back_and_forth_again_removes_nothing(run: Path) -> None:
    state = blank()
    with Checkpointer(run, state, keep=Keep(last=10), mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="removes the later"):
            checkpointer.restore(1)
        assert checkpointer.restore() == 5
        checkpointer.save(6)
        assert checkpointer.steps == [1, 2, 3, 4, 5, 6]


def test_saving_a_step_of_ones_own_again_replaces_it(run: Path) -> None:
    state = blank()
    with Checkpointer(run, state, keep=Keep(last=10), mode="sync") as checkpointer:
        checkpointer.restore()
        for value in (98, 99):
            set_state(state, value)
            checkpointer.save(5)
        checkpointer.save(6)
        checkpointer.save(6)
        assert checkpointer.steps == [1, 2, 3, 4, 5, 6]
    assert is_at(everystep.load(run / step_name(5)), 99)


# --- one training per run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "snapshot"])
def test_the_first_save_of_a_new_training_in_a_used_run_fails(run: Path, mode: Any) -> None:
    with Checkpointer(run, at(99), every=10, mode=mode) as checkpointer:
        assert checkpointer.last_durable is None
        for step in (1, 10):  # also where nothing would be saved yet: now is the time to say it
            with pytest.raises(everystep.errors.RunInUse) as caught:
                checkpointer.save(step)
            assert caught.value.steps == (1, 2, 3, 4, 5)
        for words in (os.fspath(run), "steps 1 to 5", "restore()", "another directory", "start_over=True"):
            assert words in str(caught.value)
        assert checkpointer.steps == [1, 2, 3, 4, 5]
        assert is_at(everystep.load(run), 5)
        state = blank()
        assert checkpointer.restore(into=state) == (5, state)  # which mends it
        assert is_at(state, 5)
        assert checkpointer.save(10) is not None


@pytest.mark.usefixtures("asked")
def test_a_preempted_training_in_a_used_run_fails_as_well(run: Path) -> None:
    with Checkpointer(run, at(99), every=100, mode="sync") as checkpointer:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(everystep.errors.RunInUse):
            checkpointer.save(7)
        assert checkpointer.steps == [1, 2, 3, 4, 5]


def test_a_restore_that_failed_is_none(run: Path) -> None:
    with Checkpointer(run, {"w": np.zeros(3)}, mode="sync") as checkpointer:
        with pytest.raises(everystep.StateMismatch):
            checkpointer.restore()
        with pytest.raises(everystep.errors.RunInUse):
            checkpointer.save(6)
        state = blank()
        with pytest.warns(RuntimeWarning, match="going back to step 3"):
            assert checkpointer.restore(3, into=state, strict=False) == (3, state)
        checkpointer.save(4)
        assert checkpointer.steps == [1, 2, 3, 4][-3:]


def test_a_step_that_this_training_did_not_make_is_not_replaced(run: Path) -> None:
    state = blank()
    with Checkpointer(run, state, keep=Keep(last=10), mode="sync") as checkpointer:
        assert checkpointer.restore() == 5
        set_state(state, 99)
        with pytest.raises(everystep.CheckpointExists, match=r"step 3 already.*restore\(step="):
            checkpointer.save(3)
        checkpointer.save(6)
        shutil.copytree(run / step_name(2), run / step_name(7))  # one that came from elsewhere meanwhile
        for _ in range(2):
            with pytest.raises(everystep.CheckpointExists, match="step 7 already"):
                checkpointer.save(7)
        assert checkpointer.steps == [1, 2, 3, 4, 5, 6, 7]
    assert is_at(everystep.load(run / step_name(3)), 3)


def test_starting_over_gives_the_old_up_when_the_first_new_one_is_durable(run: Path) -> None:
    state = at(77)
    with Checkpointer(run, state, mode="sync", start_over=True) as checkpointer:
        with pytest.raises(ValueError, match="contradict each other"):
            checkpointer.restore()
        with faults.injected("sync_dir:1:EIO"), pytest.raises(everystep.SaveFailed):
            checkpointer.save(1)
        assert checkpointer.steps == [1, 2, 3, 4, 5]  # it was not
        assert is_at(everystep.load(run), 5)
        assert checkpointer.last_durable is None
        checkpointer.save(2)
        assert checkpointer.steps == [2]
        assert checkpointer.last_durable == 2
        set_state(state, 0)
        assert checkpointer.restore() == 2
        assert is_at(state, 77)


def test_a_kill_while_starting_over_leaves_the_newest_old_one_or_the_new_one(tmp_path: Path) -> None:
    """At every call of the first save. What is reported durable is alone in the run."""
    ends = set()
    for nth in range(1, 60):
        run = tmp_path / str(nth)
        with Checkpointer(run, mode="sync") as checkpointer:
            for step in (8, 9):
                checkpointer.save(step, at(step))
        pid = os.fork()
        if pid == 0:
            with Checkpointer(run, at(1), mode="sync", start_over=True) as checkpointer:
                faults.install(*faults.parse(f"any:{nth}:kill"))
                checkpointer.save(1)
                os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        newest = everystep.open(run).step
        assert is_at(everystep.load(run), newest)
        ends.add((code, newest))
        if code == 7:
            assert os.path.basename(everystep.open(run).path) == step_name(1)
            break
    assert ends == {(-signal.SIGKILL, 9), (-signal.SIGKILL, 1), (7, 1)}


def test_a_run_that_is_empty_needs_no_restore_and_no_start_over(tmp_path: Path) -> None:
    for name, arguments in {"plain": {}, "over": {"start_over": True}}.items():
        with Checkpointer(tmp_path / name, at(1), mode="sync", **arguments) as checkpointer:
            checkpointer.save(1)
            checkpointer.save(2)
            assert checkpointer.steps == [1, 2]


def test_nothing_but_checkpoints_lock_rules_and_events_is_left_after_closing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, at(0), keep=Keep(last=1), mode="sync") as checkpointer:
        for step in range(6):
            checkpointer.save(step)
    assert sorted(os.listdir(tmp_path)) == [".lock", ".rules", "events.jsonl", step_name(5)]


# --- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run: Path, kind: str) -> None:
    hurt(run / step_name(5), kind)
    state = blank()
    with Checkpointer(run, state, keep=Keep(last=2), mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="passing over step 5") as caught:
            assert checkpointer.restore() == 4
        assert caught[0].filename == __file__
        assert is_at(state, 4)
        assert checkpointer.last_durable == 4
        # Training goes on from there and reaches the damaged step again: it is replaced.
        set_state(state, 50)
        checkpointer.save(5)
        assert checkpointer.steps == [4, 5]
    state = blank()
    with warnings.catch_warnings(), Checkpointer(run, state, mode="sync") as checkpointer:
        warnings.simplefilter("error")
        assert checkpointer.restore() == 5
        assert is_at(state, 50)


def test_a_damaged_checkpoint_takes_no_place_among_those_to_keep(run: Path) -> None:
    hurt(run / step_name(5), "shard")
    state = blank()
    with Checkpointer(run, state, keep=Keep(last=2), mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="passing over"):
            assert checkpointer.restore() == 4
        checkpointer.save(6)
        # Two intact ones stay; the damaged one is left to be looked at.
        assert checkpointer.steps == [4, 5, 6]


def test_several_damaged_ones_are_passed_over_one_by_one(run: Path) -> None:
    for step, kind in zip((5, 4, 3), DAMAGE, strict=False):
        hurt(run / step_name(step), kind)
    state = blank()
    with Checkpointer(run, state, mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning) as caught:
            assert checkpointer.restore() == 2
        assert [f"step {step}" in str(w.message) for step, w in zip((5, 4, 3), caught, strict=True)] == [
            True
        ] * 3
        assert is_at(state, 2)


def test_when_none_is_whole_it_is_an_error_and_never_a_fresh_start(run: Path) -> None:
    for step in range(1, 6):
        hurt(run / step_name(step), DAMAGE[step % 4])
    with Checkpointer(run, blank(), mode="sync") as checkpointer:
        with (
            pytest.warns(RuntimeWarning, match="passing over"),
            pytest.raises(everystep.CorruptCheckpoint, match="none of the 5 checkpoints is intact"),
        ):
            checkpointer.restore()
        assert checkpointer.steps == [1, 2, 3, 4, 5]  # all still there to be looked at


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_step_asked_for_by_number_is_that_step_or_an_error(run: Path, kind: str) -> None:
    hurt(run / step_name(5), kind)
    with Checkpointer(run, blank(), mode="sync") as checkpointer, pytest.raises(everystep.CorruptCheckpoint):
        checkpointer.restore(5)


def test_a_state_that_does_not_fit_is_an_error_not_damage(run: Path) -> None:
    with (
        Checkpointer(run, {"w": np.zeros(3)}, mode="sync") as checkpointer,
        pytest.raises(everystep.StateMismatch),
    ):
        checkpointer.restore()


def test_a_checkpoint_under_another_step_s_name_is_damage_to_verify_as_to_restore(run: Path) -> None:
    shutil.copytree(run / step_name(3), run / step_name(9))
    report = everystep.verify(run / step_name(9))
    assert not report.intact
    assert "checkpoint of step 3, put in the place of another" in report.problems[0].reason
    assert everystep.verify(run / step_name(3)).intact
    state = blank()
    with Checkpointer(run, state, mode="sync") as checkpointer:
        with pytest.warns(RuntimeWarning, match="passing over step 9: .*checkpoint of step 3"):
            assert checkpointer.restore() == 5
        assert is_at(state, 5)


# --- one writer, in one process -----------------------------------------------------------------------------


def test_a_second_checkpointer_of_a_run_says_which_one_to_close(tmp_path: Path) -> None:
    """A notebook cell that is run again: the old one is still bound to the name."""
    ckpt = Checkpointer(tmp_path / "run", at(1), mode="sync")
    ckpt.save(1)
    (tmp_path / "link").symlink_to("run")
    for path in (tmp_path / "run", tmp_path / "link"):
        with pytest.raises(everystep.errors.Locked) as caught:
            Checkpointer(path, blank(), mode="sync")
        message = str(caught.value)
        assert f"<Checkpointer of {tmp_path / 'run'}: idle, step 1 durable>" in message
        assert "in this process already" in message
        assert "`ckpt.close()`" in message
    ckpt.close()
    assert "closed" in repr(ckpt)
    with Checkpointer(tmp_path / "run", blank(), mode="sync") as again:
        assert again.restore() == 1


def test_a_checkpointer_that_nothing_refers_to_any_more_gives_its_run_back(tmp_path: Path) -> None:
    """Even one that is part of a cycle, which waits for the garbage collector."""
    state = blank()
    state["cycle"] = {"ckpt": None}
    old = Checkpointer(tmp_path, state["cycle"], mode="sync")
    state["cycle"]["ckpt"] = old
    gc.disable()
    try:
        del old, state
        with Checkpointer(tmp_path, blank(), mode="sync") as ckpt:
            assert ckpt.restore() == 0
    finally:
        gc.enable()


def test_the_mode_of_an_overlapped_run_is_still_known_when_it_is_closed(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.mode == "overlap"
    assert ckpt.mode == "overlap"


# --- closing ------------------------------------------------------------------------------------------------


def frozen(size: int) -> Any:
    array = np.zeros(size)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("state", "place"),
    [
        (7, "the state cannot be restored: no dict, list or object holds this int"),
        ("text", "this str"),
        (frozen(3), "this read-only ndarray"),
        ((torch.zeros(2), 0), r"state\.1 cannot be restored: .* this int"),
        (({"w": 1}, (frozen(3),)), r"state\.1\.0 cannot be restored: .* this read-only ndarray"),
    ],
)
def test_a_state_that_would_be_restored_into_thin_air_is_refused_from_the_first_run_on(
    tmp_path: Path, state: Any, place: str
) -> None:
    """The training holds the old object: a new one in the Checkpointer would be of no use to it."""
    with Checkpointer(tmp_path, state, mode="sync") as checkpointer:
        for _ in range(2):
            with pytest.raises(everystep.StateMismatch, match=f"{place}.* Put it in a dict"):
                checkpointer.restore()
            checkpointer.save(1)


def test_what_a_tuple_holds_is_restored_where_it_is(tmp_path: Path) -> None:
    model, more = torch.nn.Linear(2, 2), {"epoch": 1}
    weights = torch.ones(3)
    with Checkpointer(tmp_path, (model, (weights, more)), mode="sync") as checkpointer:
        checkpointer.save(1)
        weights.zero_()
        more["epoch"] = 0
        assert checkpointer.restore() == 1
    assert weights.tolist() == [1.0] * 3
    assert more == {"epoch": 1}


@pytest.mark.parametrize("state", [{}, {"epoch": 0}, (), torch.zeros(1).expand(2)])
def test_a_checkpoint_of_another_form_is_an_error_and_never_dropped(tmp_path: Path, state: Any) -> None:
    saved = [1, 2] if not isinstance(state, torch.Tensor) else torch.ones(2)
    with Checkpointer(tmp_path, saved, mode="sync") as checkpointer:
        checkpointer.save(1)
    with (
        Checkpointer(tmp_path, state, mode="sync") as checkpointer,
        pytest.raises(everystep.StateMismatch, match="the state is not what was saved"),
    ):
        checkpointer.restore()


def test_what_fits_a_changed_state_is_restored_on_request(run: Path) -> None:
    state = {"w": np.zeros(1000), "note": "", "added": np.zeros(5)}
    with Checkpointer(run, state, mode="sync") as checkpointer:
        with pytest.raises(everystep.StateMismatch, match="strict=False"):
            checkpointer.restore()
        assert not state["w"].any()
        with pytest.warns(RuntimeWarning, match=r"(?s)added.*All else has been restored"):
            assert checkpointer.restore(strict=False) == 5
    assert (state["w"] == 5).all()
    assert state["note"] == "after 5"


@pytest.mark.parametrize("step", ["x", 2.5, True, -1])
def test_restoring_a_step_that_no_checkpoint_can_have_is_refused(run: Path, step: Any) -> None:
    with (
        Checkpointer(run, blank(), mode="sync") as checkpointer,
        pytest.raises(ValueError, match="step must be an int"),
    ):
        checkpointer.restore(step)


def failed_save(checkpointer: Checkpointer) -> None:
    with faults.injected("sync_dir:1:EIO+"):
        pending = checkpointer.save(1)
        assert pending is not None
        assert pending.wait_for_end(60)


def fails_in_its_training(run: Path) -> None:
    with Checkpointer(run, {"w": np.zeros(3)}, mode="snapshot") as checkpointer:
        failed_save(checkpointer)
        raise KeyError("of the training")


def test_the_error_that_ends_a_training_is_the_one_to_see(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="SaveFailed"), pytest.raises(KeyError, match="of the training"):
        fails_in_its_training(tmp_path / "block")
    checkpointer = Checkpointer(tmp_path / "call", {"w": np.zeros(3)}, mode="snapshot")
    failed_save(checkpointer)
    with pytest.warns(RuntimeWarning, match="SaveFailed"):
        checkpointer.close(KeyError("of the training"))
    Checkpointer(tmp_path / "call").close()  # the run is free


def test_a_closed_checkpointer_refuses_and_can_be_closed_again(run: Path) -> None:
    checkpointer = Checkpointer(run, blank(), mode="sync")
    checkpointer.close()
    checkpointer.close()
    for call in (lambda: checkpointer.save(6), checkpointer.restore):
        with pytest.raises(ValueError, match="closed"):
            call()
    with Checkpointer(run, blank(), mode="sync") as another:
        assert another.steps == [1, 2, 3, 4, 5]


def test_an_exception_in_the_loop_lets_go_of_the_run(run: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(run, blank(), mode="sync"):
        _ = 1 / 0
    Checkpointer(run, blank(), mode="sync").close()


def test_a_failure_while_opening_lets_go_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("everystep.checkpointer.opening.history", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Checkpointer(run, blank(), mode="sync")
    Checkpointer(run, blank(), mode="sync").close()
