"""How ranks come together: for the same purpose, in time or not, again, and after a new process group."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec
import pytest
import torch.distributed as dist

from everystep.errors import RankFailed
from everystep.store.ranks import membership as rendezvous
from everystep.store.ranks.machines import _cpus, machine, numa_node
from everystep.store.ranks.membership import name_ranks, purpose_prefix
from everystep.store.ranks.message_store import MessageStore
from everystep.store.ranks.transport import Transport, _default_store, join
from support.worlds.launcher import HOST, launch, values
from support.worlds.patience import PATIENCE_SECONDS, expecting, said_together

pytestmark = pytest.mark.race


def _join(purpose: str, timeout: float = PATIENCE_SECONDS) -> Transport:
    transport = join(purpose, timeout)
    assert transport is not None
    return transport


def _failure(purpose: str, timeout: float):
    with pytest.raises(RankFailed) as caught:
        join(purpose, timeout)
    return str(caught.value), caught.value.ranks


def _works(transport: Transport) -> bool:
    return list(transport.exchange("views", b"%d" % transport.rank, PATIENCE_SECONDS).values()) == [
        (0,),
        (1,),
        (2,),
    ]


def _nobody() -> bool:
    return join("anything", 5) is None


def test_there_is_no_team_without_others(monkeypatch):
    assert _nobody()  # no process group
    assert values(launch(1, _nobody)) == [True]
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert _nobody()


def _different_purposes(timeout):
    purpose = "save to /here" if dist.get_rank() == 0 else "Checkpointer /there"
    with said_together():
        found = _failure(purpose, timeout)
    dist.barrier()  # until all have said where the others are, none is elsewhere
    transport = _join("long " * 10_000)
    return found, _works(transport)


def test_ranks_that_come_for_different_purposes_learn_what_the_others_are_at():
    coordinator, *others = values(launch(3, _different_purposes, 1.0))
    assert coordinator == (
        (
            "ranks 1, 2 did not come to the meeting for save to /here within 1 s; "
            "last report of rank 1: meeting for Checkpointer /there; "
            "last report of rank 2: meeting for Checkpointer /there. All ranks must make this call, with the "
            "same path",
            (1, 2),
        ),
        True,
    )
    for (message, ranks), works in others:
        assert message.startswith("rank 0 did not open the meeting for Checkpointer /there within 1 s")
        assert ranks == (0,)
        assert works


def _misses(timeout):
    """Each rank in turn stays away from a meeting, while the others wait in vain; then all meet."""
    rank, out = dist.get_rank(), []
    mail = MessageStore(_default_store(), "test")
    for absent in (2, 0, 1):
        others = [other for other in range(3) if other != absent]
        if rank != absent:
            # Who waits for one that is there has time: only the coordinator gives up.
            in_vain = rank == 0 or absent == 0
            rendezvous.GRACE_SECONDS = 0.1 if in_vain else PATIENCE_SECONDS
            with expecting(*others):
                out.append(_failure("run", timeout if in_vain else PATIENCE_SECONDS)[1])
            mail.post(f"{absent}/gave up/{rank}", b"")
        else:
            assert len(mail.collect([f"{absent}/gave up/{other}" for other in others], PATIENCE_SECONDS)) == 2
        rendezvous.GRACE_SECONDS = PATIENCE_SECONDS
        transport = _join("run")
        assert _works(transport)
        if absent != 2:  # whether they leave in order or not
            transport.close()
    return out


def test_a_rank_that_missed_a_meeting_finds_the_next():
    assert values(launch(3, _misses, 1.0)) == [[(2,), (1,)], [(2,), (0,)], [(0,), (1,)]]


def _give_up():
    """The coordinator is interrupted while it waits for a rank."""
    if dist.get_rank() == 0:
        collect = MessageStore.collect

        def interrupted(self, keys, timeout):
            self.read(keys[0], PATIENCE_SECONDS)
            raise KeyboardInterrupt

        MessageStore.collect = interrupted
        with pytest.raises(KeyboardInterrupt):
            join("run", PATIENCE_SECONDS)
        MessageStore.collect = collect
        out = None
    elif dist.get_rank() == 1:
        out = _failure("run", PATIENCE_SECONDS)
        MessageStore(_default_store(), "test").post("told", b"")
    else:
        out = MessageStore(_default_store(), "test").read("told", PATIENCE_SECONDS)
    return out, _works(_join("run"))


def test_a_meeting_that_the_coordinator_gave_up_is_closed():
    first, second, third = values(launch(3, _give_up))
    assert (first, third) == ((None, True), (b"", True))
    assert second == (("rank 0 abandoned the meeting for run", (0,)), True)


def _coordinator_dies_in_the_meeting(timeout):
    if dist.get_rank() == 0:
        MessageStore.collect = lambda self, keys, timeout: time.sleep(600)  # it never closes the meeting
        threading.Thread(target=join, args=("run", timeout), daemon=True).start()
        home = MessageStore(_default_store(), f"everystep/{purpose_prefix('run')}")
        opening = msgspec.msgpack.decode(home.read("open", PATIENCE_SECONDS), type=rendezvous._Opening)
        home.read(f"answer/{opening.token}/1", PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    elif dist.get_rank() == 1:
        if timeout < PATIENCE_SECONDS:
            MessageStore.forget = lambda self, keys: None  # however late rank 0 looks, there is the answer
        return _failure("run", PATIENCE_SECONDS)
    return None


@pytest.mark.parametrize(
    ("store", "timeout", "expected"),
    [
        ("agent", 0.5, "rank 0 opened the meeting for run and did not close it within 0.5 s"),
        ("rank0", PATIENCE_SECONDS, "cannot be reached"),  # at once
    ],
)
def test_a_coordinator_that_dies_in_a_meeting_is_noticed(store, timeout, expected):
    killed, waiting, _ = launch(3, _coordinator_dies_in_the_meeting, timeout, store=store)
    assert killed.exitcode == -signal.SIGKILL
    message, _ = values([waiting])[0]
    assert expected in message


def _again_and_again(turns, removes):
    """The first rank comes again before the others have left: it must not find the old meeting."""
    rank = dist.get_rank()
    if not removes:
        MessageStore.forget = lambda self, keys: False
    tokens = []
    for turn in range(turns):
        transport = _join("run")
        told = transport.tell("turn", b"%d" % turn if rank == 0 else None, PATIENCE_SECONDS)
        assert told == b"%d" % turn
        tokens.append(transport.mail._prefix)
        if turn % 2:
            transport.close()
    return tokens


@pytest.mark.parametrize("removes", [True, False], ids=["removes", "keeps"])
def test_no_meeting_is_attended_twice_whether_the_store_removes_messages_or_not(removes):
    first, *others = values(launch(4, _again_and_again, 30, removes))
    assert len(set(first)) == 30
    assert all(other == first for other in others)


def _new_process_groups():
    rank, out = dist.get_rank(), []
    port = int(os.environ["MASTER_PORT"])
    for turn in range(3):
        transport = _join("run")
        out.append(_works(transport))
        if turn == 0:
            transport.close()
        dist.barrier()
        dist.destroy_process_group()
        assert join("run", 5) is None
        # Each a store of its own, on the same host; the last has been there before.
        store = dist.PrefixStore(f"group {turn}", dist.TCPStore(HOST, port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        dist.barrier()  # who has made it and ends would disturb who has not
    return out


def test_a_new_process_group_is_a_new_world():
    assert values(launch(3, _new_process_groups)) == [[True] * 3] * 3


def test_processors_belong_to_sockets(tmp_path):
    assert _cpus("0-3,8\n") == {0, 1, 2, 3, 8}
    assert _cpus("\n") == set()
    assert numa_node(tmp_path) == 0
    here = sorted(os.sched_getaffinity(0))
    for number, cpus in ((0, "9000-9001"), (1, ",".join(map(str, here)))):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    assert numa_node(tmp_path) == 1
    (tmp_path / "node1" / "cpulist").write_text("none of this kind")
    assert numa_node(tmp_path) == 0
    assert machine() == machine()


def test_many_ranks_are_named_by_the_first_of_them():
    assert name_ranks((3,)) == "rank 3"
    assert name_ranks((1, 2)) == "ranks 1, 2"
    assert name_ranks(tuple(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
