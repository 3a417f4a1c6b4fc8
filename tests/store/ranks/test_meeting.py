"""Meetings of real processes: what they tell, agree on and exchange, and what happens when a rank is gone."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from everystep.errors import CheckpointNotFound, EverystepError, RankFailed, RanksDisagree
from everystep.store.ranks import meeting as meeting_module
from everystep.store.ranks import membership
from everystep.store.ranks.meeting import meeting_for, open_meeting
from everystep.store.ranks.message_store import MessageStore
from everystep.store.ranks.transport import join
from support.worlds.launcher import launch, values
from support.worlds.meetings import meet
from support.worlds.patience import PATIENCE_SECONDS, expecting

pytestmark = pytest.mark.race


def _failure(function, *args):
    """What a call fails with, as something that can be sent to the test."""
    try:
        function(*args)
    except EverystepError as error:
        return type(error).__name__, str(error), tuple(getattr(error, "ranks", ()))
    raise AssertionError("it did not fail")


def _members():
    rank = dist.get_rank()
    membership.machine = lambda: f"machine {rank // 2}"
    membership.numa_node = lambda: rank % 2
    meeting = meet()
    meeting.transport.say(f"work of rank {rank}")
    dist.barrier()
    found = meeting.transport.last_reports([0, 2])
    meeting.leave()
    return rank, meeting.world, meeting.membership.members, meeting.membership.topology, found


def test_every_rank_knows_who_runs_where():
    found = values(launch(3, _members))
    pids = [member.pid for member in found[0][2]]
    assert len(set(pids)) == 3
    for rank, (its, world, members, topology, reports) in enumerate(found):
        assert (its, world) == (rank, 3)
        assert [member.pid for member in members] == pids
        assert [member.socket for member in members] == [0, 1, 0]
        assert topology.nodes == (0, 0, 1)
        assert topology.sockets == (0, 1, 0)
        assert reports == {0: "work of rank 0", 2: "work of rank 2"}


def _calls():
    meeting = meet()
    rank = meeting.rank
    out = []
    for turn in range(3):
        told = meeting.tell(b"plan %d" % turn if rank == 0 else None)
        agreed = meeting.agree(b"%d" % rank, lambda found: b"+".join(found))
        exchanged = meeting.exchange([b"even", b"", b"even"][rank])
        letters = [((rank + 1) % 3, b"%d from %d" % (n, rank)) for n in range(rank)]
        out.append((told, agreed, list(exchanged.items()), meeting.deliver(letters)))
    empty = meeting.tell(b"" if rank == 0 else None)
    large = meeting.exchange(os.urandom(1 << 20) if rank == 2 else bytes(1 << 22))
    sizes = [(len(data), ranks) for data, ranks in large.items()]
    if rank == 0:
        with pytest.raises(ValueError, match="must give"):
            meeting.tell(None)
    meeting.leave()
    return rank, out, empty, sizes


@pytest.mark.parametrize("store", ["agent", "rank0"])
def test_a_meeting_tells_agrees_exchanges_and_delivers(store):
    letters = {0: [(2, b"0 from 2"), (2, b"1 from 2")], 1: [], 2: [(1, b"0 from 1")]}
    for rank, out, empty, sizes in values(launch(3, _calls, store=store)):
        views = [(b"even", (0, 2)), (b"", (1,))]
        assert out == [(b"plan %d" % turn, b"0+1+2", views, letters[rank]) for turn in range(3)]
        assert empty == b""
        assert sizes == [(1 << 22, (0, 1)), (1 << 20, (2,))]


def _far_behind(turns):
    """The coordinator tells everything before any other rank reads."""
    meeting = meet()
    if meeting.rank != 0:
        meeting.messages.read(f"told/{turns}", PATIENCE_SECONDS)
    told = [meeting.tell(b"%d" % turn if meeting.rank == 0 else None) for turn in range(turns)]
    meeting.leave(wait=True)
    return told


def test_nothing_that_is_told_is_lost_however_far_a_rank_is_behind():
    assert values(launch(2, _far_behind, 200)) == [[b"%d" % turn for turn in range(200)]] * 2


def _announce_and_die():
    meeting = meet()
    if meeting.rank == 1:
        # What `exchange` does, up to the announcement.
        meeting.agree(b"0123456789abcdef1", len)
        os.kill(os.getpid(), signal.SIGKILL)
    agree = meeting.agree

    def agreed(mine, decide):
        found = agree(mine, decide)
        meeting.timeout = 1.0  # short only where it waits for the dead
        return found

    meeting.agree = agreed
    return _failure(meeting.exchange, b"x")


def test_a_rank_that_dies_in_the_middle_of_an_exchange_is_named_by_all():
    first, _, last = launch(3, _announce_and_die)
    for kind, message, ranks in values([first, last]):
        assert kind == "RankTimeout"
        assert message.startswith("the test failed: nothing heard from rank 1 (last at: the test) within 1 s")
        assert ranks == (1,)


def _failing_decisions():
    def disagree(found):
        raise RanksDisagree(f"heard {found}", ranks=(1,))

    def break_down(found):
        raise ZeroDivisionError("nothing left")

    def too_large(found):
        return os.urandom(9 << 20)

    out = []
    for decide in (disagree, break_down, too_large):
        meeting = meet()
        try:
            meeting.agree(b"%d" % meeting.rank, decide)
        except Exception as error:
            out.append((type(error).__name__, str(error)[:60], getattr(error, "ranks", None)))
        meeting.leave()
    return out, meet().agree(b"x", lambda found: b"next")


def test_a_decision_that_fails_ends_the_meeting_on_all_ranks_and_they_can_meet_again():
    coordinator, other = values(launch(2, _failing_decisions))
    assert coordinator[1] == other[1] == b"next"
    assert [kind for kind, *_ in coordinator[0]] == ["RanksDisagree", "ZeroDivisionError", "ValueError"]
    failed = "the test failed on rank 0: "
    assert other[0][:2] == [
        ("RanksDisagree", "heard [b'0', b'1']", (1,)),
        ("RankFailed", f"{failed}ZeroDivisionError: nothing left", (0,)),
    ]
    assert other[0][2][1].startswith(f"{failed}ValueError: a message of")


def _settled(troubles):
    """What each rank raises in one meeting, for errors of some ranks, again and again."""
    errors = {"absent": CheckpointNotFound("no such step"), "own": ValueError("odd"), "": None}
    meeting = meet()
    out = []
    for kinds in troubles:
        try:
            meeting.settle(errors[kinds[meeting.rank]])
            out.append("")
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}")
    meeting.leave()
    return out


def test_an_error_of_one_rank_is_raised_by_all_and_the_meeting_goes_on():
    found = values(launch(3, _settled, [("", "own", ""), ("own", "", "absent"), ("", "", "")]))
    elsewhere = "RankFailed: the test failed on rank 1: ValueError: odd"
    absent = "CheckpointNotFound: found by rank 2: no such step"
    assert found == [
        [elsewhere, absent, ""],
        ["ValueError: odd", absent, ""],
        [elsewhere, "CheckpointNotFound: no such step", ""],
    ]


def _one_raises(who):
    """The block of a meeting raises on one rank, while the others wait for it."""
    transport = join()

    def take_part():
        with meeting_for(transport, "the test", PATIENCE_SECONDS) as meeting:
            if meeting.rank == who:
                raise KeyError("a bug")
            meeting.exchange(b"x")

    try:
        take_part()
    except (KeyError, RankFailed) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_raises_tells_the_others_at_once(who):
    found = values(launch(3, _one_raises, who))
    expected = ("RankFailed", f"the test failed on rank {who}: KeyError: 'a bug'")
    assert found == [("KeyError", "'a bug'") if rank == who else expected for rank in range(3)]


def _fail_before_the_others_come():
    transport = join()
    if transport.rank > 0:
        transport.messages.read("failed", PATIENCE_SECONDS)
        return _failure(lambda: meet("the test"))
    meeting = open_meeting(transport, "the test", PATIENCE_SECONDS)
    collect = MessageStore.collect

    def collect_later(self, keys, timeout):
        transport.messages.post("failed", b"")
        return collect(self, keys, timeout)

    MessageStore.collect = collect_later
    meeting.failed(ValueError("a bad path"))
    meeting.leave()
    return None


def test_ranks_that_come_after_the_coordinator_has_failed_learn_why():
    found = values(launch(3, _fail_before_the_others_come))
    assert found == [None, *[("RankFailed", "the test failed on rank 0: ValueError: a bad path", (0,))] * 2]


def _late_for_a_meeting(timeout):
    """Rank 1 leaves out a meeting until the others have given up."""
    transport = join()
    transport.say(f"step {transport.rank}")
    dist.barrier()
    patience = timeout if transport.rank == 0 else PATIENCE_SECONDS  # others hear from the coordinator
    failed = None
    if transport.rank == 1:
        transport.messages.read("both gave up", PATIENCE_SECONDS)
    else:
        with expecting(2):
            failed = _failure(lambda: meet("first", patience))
        if transport.messages.count("gave up") == transport.world - 1:
            transport.messages.post("both gave up", b"")
    meeting = meet("first")
    again = meeting.exchange(b"%d" % transport.rank)
    meeting.leave()
    return failed, list(again.values())


def test_a_rank_that_missed_a_meeting_is_named_and_comes_to_the_next():
    found = values(launch(3, _late_for_a_meeting, 1.0))
    for rank, (failed, again) in enumerate(found):
        assert again == [(0,), (1,), (2,)]
        if rank != 1:
            kind, message, ranks = failed
            assert (kind, ranks) == ("RankTimeout", (1,))
            assert message == (
                "first failed: nothing heard from rank 1 (last at: step 1) within 1 s; it has ended, "
                "hangs, or does not make this call. All ranks must make it, with the same path"
            )


def _die_after_the_meeting(victim, timeout):
    meeting = meet()
    meeting.transport.say("the end" if meeting.rank == victim else "life")
    for word in ("said", "heard"):  # the second time: all know that all have said it
        meeting.messages.post(f"{word}/{meeting.rank}", b"")
        if word == "said" or meeting.rank == victim:
            keys = [f"{word}/{rank}" for rank in range(meeting.world)]
            assert len(meeting.messages.collect(keys, PATIENCE_SECONDS)) == meeting.world
    if meeting.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim == 0:
        meeting_module.GRACE_SECONDS = 0.1  # the dead are not worth waiting for
        meeting.timeout = timeout
    elif meeting.rank == 0:
        meeting.timeout = timeout
    with expecting(2):
        failure = _failure(meeting.exchange, b"x")
    meeting.leave()
    return failure


def test_a_killed_rank_fails_the_calls_of_all_others():
    first, killed, last = launch(3, _die_after_the_meeting, 1, 1.0)
    assert killed.exitcode == -signal.SIGKILL
    for kind, message, ranks in values([first, last]):
        assert (kind, ranks) == ("RankTimeout", (1,))
        assert "nothing heard from rank 1 (last at: the end) within 1 s" in message


def test_a_killed_coordinator_is_named_and_a_store_that_died_with_it_is_noticed_at_once():
    _, *others = launch(3, _die_after_the_meeting, 0, 1.0)
    for kind, message, ranks in values(others):
        assert (kind, ranks) == ("RankTimeout", (0,))
        assert "nothing heard from rank 0 (last at: the end) within 1 s" in message
    _, *others = launch(3, _die_after_the_meeting, 0, PATIENCE_SECONDS, store="rank0")
    for _, message, _ in values(others):
        assert "the process group's store cannot be reached" in message


def test_threads_wait_for_messages_while_others_are_in_collectives():
    for total, out in values(launch(3, _waits_beside_collectives, 30)):
        assert total == 1.0
        assert out == [b"not before the collectives"] + [True] * 30


def _waits_beside_collectives(turns):
    commit, meanwhile = meet("commit"), meet("meanwhile")
    out = []

    def background():
        out.append(commit.messages.read("late", PATIENCE_SECONDS))
        for turn in range(turns):
            verdict = commit.agree(b"%d," % turn, lambda found: b"".join(found))
            out.append(verdict == b"%d," % turn * commit.world)

    thread = threading.Thread(target=background)
    thread.start()
    total = torch.ones(1)
    for turn in range(3 * turns):
        dist.all_reduce(total)
        total /= commit.world
        meanwhile.exchange(b"%d" % meanwhile.rank)
        dist.barrier()
        if turn == turns and commit.rank == 1:
            commit.messages.post("late", b"not before the collectives")
    thread.join()
    return float(total), out


def _number_of_keys():
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    number = store.num_keys()
    dist.barrier()
    return number


def _count_keys(turns):
    """How many keys the store has before any meeting, and after some of them, some of which fail."""
    counts = [_number_of_keys()]
    for turn in range(turns):
        transport = join()
        with meeting_for(transport, f"meeting {turn}", PATIENCE_SECONDS) as meeting:
            meeting.tell(b"plan" if meeting.rank == 0 else None)
            meeting.exchange(b"%d" % meeting.rank)
            meeting.deliver([(turn % 3, b"letter")])
        failing = meet("one that fails")
        _failure(failing.agree, b"", _disagree)
        failing.leave()
        transport.close()
        counts.append(_number_of_keys())
    return counts


def _disagree(found):
    raise RanksDisagree("they do", ranks=(0, 1))


def test_the_store_does_not_grow_with_the_number_of_meetings():
    before, *later = values(launch(3, _count_keys, 25))[0]
    assert max(later) - before <= 20  # what each rank is at, and what is left of the last meeting


def _late_to_leave():
    """The coordinator leaves a meeting long before another rank; a later meeting removes its messages."""
    meeting = meet("first")
    meeting_module.LEAVING_SECONDS = 0.0
    if meeting.rank == 0:
        meeting.leave(wait=True)
    dist.barrier()
    before = meeting.transport.messages.has(f"{meeting.path}/told/1")
    dist.barrier()
    if meeting.rank == 1:
        meeting.leave()
    second = meet("second")
    second.leave()
    dist.barrier()
    return before, meeting.transport.messages.has(f"{meeting.path}/told/1")


def test_the_messages_of_a_meeting_stay_until_all_have_left_it():
    assert values(launch(2, _late_to_leave)) == [(True, False)] * 2


def _garbage():
    meeting = meet()
    if meeting.rank == 0:
        meeting.messages.post("told/2", b"\xff")
        return None
    return _failure(meeting.tell, None)


def test_a_message_that_cannot_be_decoded_is_a_failure_of_a_rank():
    kind, message, _ = values(launch(2, _garbage))[1]
    assert kind == "RankFailed"
    assert message.startswith("cannot decode a message of another rank")
