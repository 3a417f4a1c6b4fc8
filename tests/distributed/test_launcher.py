"""The launcher's own promises: real ranks, every end is told, nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.worlds.launcher import launch, started, values


def _sum(number: int) -> tuple[int, int, int, str]:
    tensor = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(tensor)
    return dist.get_rank(), int(tensor), os.getpid(), os.environ["RANK"]


def _different_ends() -> str:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    print(f"rank {rank} prints")
    if rank == 3:
        store.set("where it hangs", b"")
        time.sleep(600)
    store.wait(["where it hangs"])
    if rank == 1:
        raise ValueError("one does not fit")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def _ask_the_store_of_a_dead_rank() -> str:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.distributed_c10d._get_default_store().check(["anything"])
    except RuntimeError as error:
        return type(error).__name__


def _end_at_different_times(seconds: float) -> bytes:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        return b"first"
    time.sleep(seconds)
    store.set("late", b"message")
    return store.get("late")


@pytest.mark.parametrize("store", ["agent", "rank0"])
def test_a_world_of_processes_runs_collectives(store):
    found = values(launch(3, _sum, 5, store=store))
    assert [value[:2] for value in found] == [(0, 18), (1, 18), (2, 18)]
    assert len({pid for _, _, pid, _ in found} | {os.getpid()}) == 4
    assert [variable for *_, variable in found] == ["0", "1", "2"]


def test_every_end_is_reported_and_a_hang_is_one_of_them():
    with started(4, _different_ends) as ranks:
        ranks.await_ended([0, 1, 2])
        fine, raised, killed, hung = ranks.join(0.0)
    assert fine.ok
    assert fine.value == "fine"
    assert (raised.error, raised.message, raised.exitcode) == ("ValueError", "one does not fit", 1)
    assert "_different_ends" in raised.traceback
    assert "rank 1 prints" in raised.output
    assert (killed.exitcode, killed.error, killed.timed_out) == (-signal.SIGKILL, None, False)
    assert hung.timed_out
    assert "_different_ends" in hung.output  # where it stood
    with pytest.raises(AssertionError, match="one does not fit"):
        values([fine, raised])


def _one_waits_for_the_other() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["the other has given up"])
        return
    time.sleep(1.0)  # the time-out of a wait in vain
    store.set("the other has given up", b"")
    raise TimeoutError("nothing heard from rank 1")


def test_a_failing_test_shows_where_the_rank_stood_that_another_waited_for():
    with started(2, _one_waits_for_the_other, dump_after=0.4) as ranks:
        outcomes = ranks.join()
    with pytest.raises(AssertionError, match="nothing heard from rank 1") as caught:
        values(outcomes)
    said = str(caught.value).partition("rank 1: ")[2]
    assert "Timeout (0:00:00.4" in said
    assert "_one_waits_for_the_other" in said


def test_a_store_of_rank_0_dies_with_it_but_not_before():
    first, second = launch(2, _ask_the_store_of_a_dead_rank, store="rank0")
    assert first.exitcode == -signal.SIGKILL
    assert second.value in {"DistNetworkError", "DistStoreError", "RuntimeError"}
    assert values(launch(2, _end_at_different_times, 0.5, store="rank0")) == [b"first", b"message"]


def test_ranks_can_be_killed_from_outside_and_none_is_left():
    with started(2, time.sleep, 600) as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        pids = ranks.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
