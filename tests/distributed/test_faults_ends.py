"""How trainings of several ranks end: by a signal to one, by an error on one, or before a save has."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import everystep
from everystep.store import list_steps
from support.worlds.disturbed_trainings import (
    Mode,
    advance,
    bits,
    check_alone,
    leftovers,
    make_state,
    set_patience,
)
from support.worlds.launcher import StoreHost, launch, values
from support.worlds.patience import PATIENCE_SECONDS, expecting

pytestmark = pytest.mark.race

WORLD = 3
MANY_STEPS = 1000
SILENCE_SECONDS = 2.0


def _checkpointer(run: Path, state: dict[str, Any], mode: Any, **more: Any) -> everystep.Checkpointer:
    return everystep.Checkpointer(run, state, mode=mode, timeout=PATIENCE_SECONDS, **more)


def _train_until_asked(run: Path, mode: Mode, every: int, asked: int, at: int) -> None:
    """Rank `asked` gets a signal in the middle of step `at`."""
    import torch.distributed as dist

    state = make_state()
    with _checkpointer(run, state, mode, every=every) as checkpointer:
        for step in range(1, MANY_STEPS):
            advance(state)
            if (dist.get_rank(), step) == (asked, at):
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.save(step)
            dist.barrier()  # as gradients do
    raise AssertionError("this training was not ended")


@pytest.mark.parametrize(
    ("mode", "every", "asked", "store"),
    [("overlap", 5, 1, "agent"), ("sync", 1, 2, "rank0"), ("overlap", 5, 0, "rank0")],
)
def test_one_rank_is_asked_to_end(
    tmp_path: Path, mode: Mode, every: int, asked: int, store: StoreHost
) -> None:
    run = tmp_path / "run"
    found = launch(WORLD, _train_until_asked, run, mode, every, asked, 7, store=store)
    for outcome in found:
        # SystemExit(0) ended it, which the launcher tells as an error.
        assert (outcome.error, outcome.message) == ("SystemExit", "0"), outcome.describe()
    assert check_alone(run, MANY_STEPS) in (7, 8)


def _raise_on_one(run: Path, mode: Mode, failing: int) -> tuple[str, bool]:
    """One rank leaves its training by an error; what the others get."""
    import torch.distributed as dist

    state = make_state()
    with _checkpointer(run, state, mode) as checkpointer:
        for step in range(1, MANY_STEPS):
            advance(state)
            if step == 5:
                if dist.get_rank() == failing:
                    raise KeyError("a bug in the training")
                checkpointer.wait()
                set_patience(checkpointer, SILENCE_SECONDS)
            checkpointer.save(step)
    raise AssertionError("this training was not ended")


@pytest.mark.parametrize(("mode", "failing"), [("overlap", 0), ("sync", 1)])
def test_one_rank_raises(tmp_path: Path, mode: Mode, failing: int) -> None:
    run = tmp_path / "run"
    found = launch(WORLD, _raise_on_one, run, mode, failing)
    assert [outcome.timed_out for outcome in found] == [False] * WORLD
    expected = ["KeyError" if rank == failing else "SaveTimedOut" for rank in range(WORLD)]
    assert [outcome.error for outcome in found] == expected, "\n".join(map(str, found))
    assert check_alone(run, 4) == 4


class _Asked(everystep.Checkpointer):
    """Is asked to end, as by a launcher that has seen a rank die, while it closes."""

    def _close(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super()._close()


def _end_beside_a_dead_rank(run: Path, dead: int) -> None:
    import torch.distributed as dist

    with _Asked(run, make_state(), mode="snapshot", timeout=PATIENCE_SECONDS) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        if dist.get_rank() == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        set_patience(checkpointer, SILENCE_SECONDS)  # for all to come to the save, in the training's thread
        checkpointer.save(2)
        raise KeyError("what a collective without all ranks raises")


def test_a_training_that_ends_by_an_error_beside_a_dead_rank_obeys_the_launcher(tmp_path: Path) -> None:
    found = launch(WORLD, _end_beside_a_dead_rank, tmp_path / "run", 1)
    assert [outcome.exitcode for outcome in found] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
    assert list_steps(tmp_path / "run") == [1]


def _leave_out_the_last(run: Path, silent: int) -> tuple[str, tuple[int, ...]] | None:
    import torch.distributed as dist

    checkpointer = _checkpointer(run, make_state(), "snapshot")
    checkpointer.save(1)
    checkpointer.wait()
    meeting = checkpointer._group.meeting
    assert meeting is not None
    meeting.timeout = SILENCE_SECONDS if dist.get_rank() == 0 else PATIENCE_SECONDS  # it tells the others
    with expecting(*(rank for rank in range(WORLD) if rank != silent)):
        try:
            if dist.get_rank() != silent:
                checkpointer.save(2)
        except everystep.RankFailed as error:
            return str(error), error.ranks
        finally:
            checkpointer.close()
    return None


def test_the_others_learn_which_rank_has_left_out_the_last_save(tmp_path: Path) -> None:
    found = values(launch(WORLD, _leave_out_the_last, tmp_path / "run", 1))
    assert found.pop(1) is None
    for text, ranks in found:
        assert ranks == (1,)
        assert "nothing heard from rank 1" in text
    assert list_steps(tmp_path / "run") == [1]


def _end_at_once(run: Path) -> None:
    """The interpreter ends while a save is under way; the script neither waits nor closes anything."""
    from everystep.store.commit.shard_writer import ShardWriter

    start = ShardWriter.start

    def slowly(self: ShardWriter, directory: Any, *, recycle: bool) -> None:
        import threading

        threading.main_thread().join()  # the training's thread has nothing more to do
        start(self, directory, recycle=recycle)

    state = make_state()
    checkpointer = _checkpointer(run, state, "overlap")
    advance(state)
    checkpointer.save(1)
    checkpointer.wait()
    advance(state)
    ShardWriter.start = slowly  # type: ignore[method-assign]
    checkpointer.save(2)


def test_the_interpreter_ends_while_a_save_is_under_way(tmp_path: Path) -> None:
    run = tmp_path / "run"
    values(launch(WORLD, _end_at_once, run))
    assert list_steps(str(run)) == [1, 2]
    restored = make_state()
    everystep.load(run, restored)
    assert bits(restored) == bits(make_state(2))
    assert leftovers(run) == []
