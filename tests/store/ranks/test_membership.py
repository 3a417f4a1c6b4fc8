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
from everystep.store.ranks import meeting as meeting_module
from everystep.store.ranks import membership
from everystep.store.ranks.meeting import Meeting
from everystep.store.ranks.membership import _cpus, machine, name_ranks, numa_node
from everystep.store.ranks.message_store import MessageStore
from everystep.store.ranks.transport import _default_store, join
from support.worlds.launcher import HOST, launch, values
from support.worlds.meetings import meet
from support.worlds.patience import PATIENCE_SECONDS, expecting, said_together

pytestmark = pytest.mark.race


def _failure(what: str, timeout: float):
    with pytest.raises(RankFailed) as caught:
        meet(what, timeout)
    return str(caught.value), caught.value.ranks


def _works(meeting: Meeting) -> bool:
    return list(meeting.exchange(b"%d" % meeting.rank).values()) == [(0,), (1,), (2,)]


def _alone() -> bool:
    return join() is None


def test_there_is_no_transport_without_others(monkeypatch):
    assert _alone()  # no process group
    assert values(launch(1, _alone)) == [True]
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert _alone()


def _different_purposes(timeout):
    what = "save to /here" if dist.get_rank() == 0 else "Checkpointer of /there"
    with said_together():
        found = _failure(what, timeout)
    dist.barrier()  # until all have told where the others are, no rank is elsewhere
    return found, _works(meet("long " * 10_000))


def test_ranks_that_come_for_different_purposes_learn_what_the_others_are_at():
    coordinator, *others = values(launch(3, _different_purposes, 1.0))
    assert coordinator == (
        (
            "save to /here failed: nothing heard from rank 1 (last at: Checkpointer of /there), rank 2 (last "
            "at: Checkpointer of /there) within 1 s; it has ended, hangs, or does not make this call. All "
            "ranks must make it, with the same path",
            (1, 2),
        ),
        True,
    )
    for (message, ranks), works in others:
        assert message.startswith(
            "Checkpointer of /there failed: nothing heard from rank 0 (last at: save to /here) within 1 s"
        )
        assert ranks == (0,)
        assert works


def _misses(timeout):
    """Each rank in turn stays away from a meeting, while the others wait in vain; then all meet."""
    rank, out = dist.get_rank(), []
    messages = MessageStore(_default_store(), "test")
    for absent in (2, 0, 1):
        others = [other for other in range(3) if other != absent]
        if rank != absent:
            # A rank that waits for one that is there has time: the coordinator gives up, or no rank does.
            in_vain = rank == 0 or absent == 0
            meeting_module.GRACE_SECONDS = 0.1 if in_vain else PATIENCE_SECONDS
            with expecting(*others):
                out.append(_failure("run", timeout if in_vain else PATIENCE_SECONDS)[1])
            messages.post(f"{absent}/gave up/{rank}", b"")
        else:
            keys = [f"{absent}/gave up/{other}" for other in others]
            assert len(messages.collect(keys, PATIENCE_SECONDS)) == 2
        meeting_module.GRACE_SECONDS = PATIENCE_SECONDS
        meeting = meet("run")
        assert _works(meeting)
        if absent != 2:  # whether they leave in order or not
            meeting.leave()
    return out


def test_a_rank_that_missed_a_meeting_finds_the_next():
    assert values(launch(3, _misses, 1.0)) == [[(2,), (1,)], [(2,), (0,)], [(0,), (1,)]]


def _give_up():
    """The coordinator is interrupted while it waits for another rank."""
    if dist.get_rank() == 0:
        collect = MessageStore.collect

        def interrupted(self, keys, timeout):
            self.read(keys[0], PATIENCE_SECONDS)
            raise KeyboardInterrupt

        MessageStore.collect = interrupted
        with pytest.raises(KeyboardInterrupt):
            meet("run")
        MessageStore.collect = collect
        out = None
    elif dist.get_rank() == 1:
        out = _failure("run", PATIENCE_SECONDS)
        MessageStore(_default_store(), "test").post("told", b"")
    else:
        out = MessageStore(_default_store(), "test").read("told", PATIENCE_SECONDS)
    return out, _works(meet("run"))


def test_a_meeting_that_the_coordinator_gave_up_is_closed():
    first, second, third = values(launch(3, _give_up))
    assert (first, third) == ((None, True), (b"", True))
    assert second == (("run failed on rank 0: KeyboardInterrupt: KeyboardInterrupt", (0,)), True)


def _coordinator_dies_in_the_meeting(timeout):
    if dist.get_rank() == 0:
        MessageStore.collect = lambda self, keys, timeout: time.sleep(600)  # it never closes the meeting
        path = []
        post = MessageStore.post

        def noted(self, key, data):
            if key.endswith("/open"):
                path.append(msgspec.msgpack.decode(data, type=meeting_module._Opening).path)
            post(self, key, data)

        MessageStore.post = noted
        threading.Thread(target=meet, args=("run", timeout), daemon=True).start()
        while not path:
            time.sleep(0.01)
        MessageStore(_default_store(), f"everystep/{path[0]}").read("said/1/1", PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    elif dist.get_rank() == 1:
        meeting_module.GRACE_SECONDS = 0.0
        return _failure("run", timeout)
    return None


@pytest.mark.parametrize(
    ("store", "timeout", "expected"),
    [
        ("agent", 5.0, "run failed: nothing heard from rank 0 (last at: run) within 5 s"),
        ("rank0", PATIENCE_SECONDS, "cannot be reached"),  # at once
    ],
)
def test_a_coordinator_that_dies_in_a_meeting_is_noticed(store, timeout, expected):
    killed, waiting, _ = launch(3, _coordinator_dies_in_the_meeting, timeout, store=store)
    assert killed.exitcode == -signal.SIGKILL
    message, _ = values([waiting])[0]
    assert expected in message


def _again_and_again(turns, removes):
    """A rank that is first comes again before the others have left: it must not find the old meeting."""
    rank = dist.get_rank()
    if not removes:
        MessageStore.forget = lambda self, keys: False
    paths = []
    for turn in range(turns):
        meeting = meet("run")
        assert meeting.tell(b"%d" % turn if rank == 0 else None) == b"%d" % turn
        paths.append(meeting.path)
        if turn % 2:
            meeting.leave()
    return paths


@pytest.mark.parametrize("removes", [True, False], ids=["removes", "keeps"])
def test_no_meeting_is_attended_twice_whether_the_store_removes_messages_or_not(removes):
    first, *others = values(launch(4, _again_and_again, 30, removes))
    assert len(set(first)) == 30
    assert all(other == first for other in others)


def _known_members():
    """How many answers of meetings have the members in them: all ranks know them, until one forgets."""
    found = []
    for turn in range(4):
        if turn == 2 and dist.get_rank() == 1:
            join().membership = None
        meeting = meet(f"meeting {turn}")
        found.append((meeting.is_new, meeting.membership.token))
        meeting.leave()
    return found


def test_ranks_tell_each_other_who_they_are_only_if_one_of_them_does_not_know():
    first, *others = values(launch(3, _known_members))
    assert [new for new, _ in first] == [True, False, True, False]
    assert first[0][1] == first[1][1] != first[2][1] == first[3][1]
    assert others == [first] * 2


def _another_process():
    """Another process takes the place of rank 1: all learn of it, and none believes the old one."""
    meet("before").leave()
    rank = dist.get_rank()
    if rank == 1:
        found = membership.this_member()
        meeting_module.this_member = lambda: msgspec.structs.replace(found, pid=found.pid + 1)
    meeting = meet("after")
    return meeting.is_new, meeting.membership.members[1].pid


def test_a_process_that_takes_the_place_of_another_is_known_to_all():
    found = values(launch(3, _another_process))
    assert [new for new, _ in found] == [True] * 3
    assert len({pid for _, pid in found}) == 1


def _new_process_groups():
    rank, out = dist.get_rank(), []
    port = int(os.environ["MASTER_PORT"])
    for turn in range(3):
        meeting = meet("run")
        out.append(_works(meeting) and meeting.is_new)
        if turn == 0:
            meeting.leave()
        dist.barrier()
        dist.destroy_process_group()
        assert join() is None
        # Each a store of its own, on the same host; the last has been there before.
        store = dist.PrefixStore(f"group {turn}", dist.TCPStore(HOST, port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        dist.barrier()  # a rank that has made it and ends would disturb one that has not
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
