"""Transports of real processes: what they send, agree on and exchange, and what happens without a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from everystep.errors import RankFailed, RanksDisagree
from everystep.store.ranks import membership as rendezvous
from everystep.store.ranks import transport as transport_module
from everystep.store.ranks.message_store import MessageStore
from everystep.store.ranks.transport import Transport, join
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS, expecting

pytestmark = pytest.mark.race

PURPOSE = "Checkpointer /data/run"


def _join(timeout: float = PATIENCE_SECONDS, purpose: str = PURPOSE) -> Transport:
    transport = join(purpose, timeout)
    assert transport is not None
    return transport


def _failure(function, *args):
    """What a call fails with, as something that can be sent to the test."""
    try:
        function(*args)
    except RankFailed as error:
        return str(error), error.ranks
    raise AssertionError("it did not fail")


def _members():
    rank = dist.get_rank()
    rendezvous.machine = lambda: f"machine {rank // 2}"
    rendezvous.numa_node = lambda: rank % 2
    transport = _join()
    transport.say(f"work of rank {rank}")
    dist.barrier()
    found = transport.whereabouts([0, 2])
    transport.close()
    return (
        transport.rank,
        transport.world,
        transport.members,
        transport.topology,
        transport.node_peers,
        transport.is_coordinator,
        found,
    )


def test_all_ranks_know_which_rank_runs_where():
    found = values(launch(3, _members))
    pids = [member.pid for member in found[0][2]]
    assert len(set(pids)) == 3
    for rank, (its, world, members, topology, peers, coordinator, at) in enumerate(found):
        assert (its, world, coordinator) == (rank, 3, rank == 0)
        assert [member.rank for member in members] == [0, 1, 2]
        assert [member.pid for member in members] == pids
        assert [member.socket for member in members] == [0, 1, 0]
        assert topology.nodes == (0, 0, 1)
        assert topology.sockets == (0, 1, 0)
        assert peers == ((0, 1) if rank < 2 else (2,))
        assert at == {0: "work of rank 0", 2: "work of rank 2"}


def _calls():
    transport = _join()
    rank = transport.rank
    out = []
    for turn in range(3):  # the same keys again and again
        told = transport.tell("plan", b"plan %d" % turn if rank == 0 else None, PATIENCE_SECONDS)
        agreed = transport.agree("commit", b"%d" % rank, lambda found: b"+".join(found), PATIENCE_SECONDS)
        exchanged = transport.exchange("views", [b"even", b"", b"even"][rank], PATIENCE_SECONDS)
        letters = [((rank + 1) % 3, b"%d from %d" % (n, rank)) for n in range(rank)]
        delivered = transport.deliver("letters", letters, PATIENCE_SECONDS)
        out.append((told, agreed, list(exchanged.items()), delivered))
    empty = transport.tell("nothing", b"" if rank == 0 else None, PATIENCE_SECONDS)
    large = transport.exchange(
        "large", os.urandom(1 << 20) if rank == 2 else bytes(1 << 22), PATIENCE_SECONDS
    )
    sizes = [(len(data), ranks) for data, ranks in large.items()]
    if rank == 0:
        with pytest.raises(ValueError, match="must give"):
            transport.tell("none", None, PATIENCE_SECONDS)
    transport.close()
    return rank, out, empty, sizes


@pytest.mark.parametrize("store", ["agent", "rank0"])
def test_a_team_tells_agrees_exchanges_and_delivers(store):
    letters = {0: [(2, b"0 from 2"), (2, b"1 from 2")], 1: [], 2: [(1, b"0 from 1")]}
    for rank, out, empty, sizes in values(launch(3, _calls, store=store)):
        views = [(b"even", (0, 2)), (b"", (1,))]
        assert out == [(b"plan %d" % turn, b"0+1+2", views, letters[rank]) for turn in range(3)]
        assert empty == b""
        assert sizes == [(1 << 22, (0, 1)), (1 << 20, (2,))]


def _far_behind(turns):
    """The coordinator tells more than it is allowed to keep, before anybody reads."""
    transport = _join()
    if transport.rank != 0:
        transport.mail.read("number/60/verdict", PATIENCE_SECONDS)
    told = [
        transport.tell("number", b"%d" % turn if transport.rank == 0 else None, PATIENCE_SECONDS)
        for turn in range(turns)
    ]
    transport.close()
    transport.close()
    return told


def test_no_message_is_lost_however_far_a_rank_is_behind():
    assert values(launch(2, _far_behind, 200)) == [[b"%d" % turn for turn in range(200)]] * 2


def _announce_and_die():
    transport = _join()
    if transport.rank == 1:
        # What `exchange` does, up to the announcement.
        transport.mail.post("e/1/from/1", b"0123456789abcdef1")
        transport.mail.read("e/1/verdict", PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    blobs = Transport._blobs
    # Short only where it waits for the dead: that all have announced theirs takes as long as it takes.
    Transport._blobs = lambda self, call, mine, table, timeout: blobs(self, call, mine, table, 1.0)
    return _failure(transport.exchange, "e", b"x", PATIENCE_SECONDS)


def test_a_rank_that_dies_in_the_middle_of_an_exchange_is_named_by_all():
    first, _, last = launch(3, _announce_and_die)
    for message, ranks in values([first, last]):
        assert message.startswith("rank 1 did not send what was announced within 1 s")
        assert ranks == (1,)


def _failing_decisions():
    transport = _join()

    def disagree(found):
        raise RanksDisagree(f"heard {found}", ranks=(1,))

    def break_down(found):
        raise ZeroDivisionError("nothing left")

    if transport.rank == 0:
        with pytest.raises(RanksDisagree):
            transport.agree("a", b"0", disagree, PATIENCE_SECONDS)
        with pytest.raises(ZeroDivisionError):
            transport.agree("a", b"0", break_down, PATIENCE_SECONDS)
        out = []
    else:
        out = [
            _failure(transport.agree, "a", b"1", disagree, PATIENCE_SECONDS),
            _failure(transport.agree, "a", b"1", break_down, PATIENCE_SECONDS),
        ]
    if transport.rank == 0:
        with pytest.raises(ValueError, match="a message of"):
            transport.agree("a", b"0", lambda found: os.urandom(9 << 20), PATIENCE_SECONDS)
    else:
        out.append(_failure(transport.agree, "a", b"1", break_down, PATIENCE_SECONDS))
        assert "ValueError: a message of" in out.pop()[0]
    after = transport.agree("a", b"x", lambda found: b"goes on", PATIENCE_SECONDS)
    transport.close()
    return out, after


def test_what_the_coordinator_cannot_decide_fails_everywhere_and_the_team_goes_on():
    coordinator, other = values(launch(2, _failing_decisions))
    assert coordinator == ([], b"goes on")
    assert other == (
        [("rank 0: heard [b'0', b'1']", (1,)), ("rank 0: ZeroDivisionError: nothing left", (0,))],
        b"goes on",
    )


def _somebody_is_late(timeout):
    """Rank 1 leaves out a call of each kind until the others have given up."""
    transport = _join()
    transport.say(f"step {transport.rank}")
    dist.barrier()
    patience = timeout if transport.rank == 0 else PATIENCE_SECONDS  # others are told by the coordinator

    def decide(found):
        return b"without " + b",".join(b"%d" % rank for rank, data in enumerate(found) if data is None)

    if transport.rank == 1:
        transport.mail.read("both gave up", PATIENCE_SECONDS)
        agreed = transport.agree("a", b"late", decide, 0.1)
        exchanged = _failure(transport.exchange, "e", b"late", 0.1)
    else:
        with expecting(2):
            agreed = transport.agree("a", b"in time", decide, patience)
            exchanged = _failure(transport.exchange, "e", b"in time", patience)
        if transport.mail.count("gave up") == transport.world - 1:
            transport.mail.post("both gave up", b"")
    again = transport.exchange("e", b"%d" % transport.rank, PATIENCE_SECONDS)
    transport.close()
    return agreed, exchanged, list(again.values())


def test_who_is_late_learns_what_was_decided_and_takes_part_in_the_next_call():
    for agreed, (message, ranks), again in values(launch(3, _somebody_is_late, 1.0)):
        assert agreed == b"without 1"
        assert message == "rank 1 was not heard of within 1 s; last report of rank 1: step 1"
        assert ranks == (1,)
        assert again == [(0,), (1,), (2,)]


def _die_after_the_meeting(victim, timeout):
    transport = _join()
    transport.say("the end" if transport.rank == victim else "life")
    for word in ("said", "heard"):  # the second time: all know that all have said it
        transport.mail.post(f"{word}/{transport.rank}", b"")
        if word == "said" or transport.rank == victim:
            keys = [f"{word}/{rank}" for rank in range(transport.world)]
            assert len(transport.mail.collect(keys, PATIENCE_SECONDS)) == transport.world
    if transport.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim == 0:
        transport_module.GRACE_SECONDS = 0.1  # no rank there whose word is worth waiting for
    elif transport.rank == 2:
        timeout = PATIENCE_SECONDS  # the coordinator tells
    with expecting(2):
        failures = [
            _failure(transport.exchange, "e", b"x", timeout),
            _failure(transport.agree, "a", b"x", _nobody_missing, timeout),
        ]
    if transport.rank != 0:
        failures.append(_failure(transport.tell, "t", None, timeout) if victim == 0 else None)
    transport.close()
    return failures


def _nobody_missing(found):
    missing = [rank for rank, data in enumerate(found) if data is None]
    if missing:
        raise RankFailed(f"missing {missing}", ranks=missing)
    return b"fine"


def test_a_killed_rank_fails_the_calls_of_all_others():
    first, killed, last = launch(3, _die_after_the_meeting, 1, 1.0)
    assert killed.exitcode == -signal.SIGKILL
    exchange = ("rank 1 was not heard of within 1 s; last report of rank 1: the end", (1,))
    assert values([first])[0] == [exchange, ("missing [1]", (1,))]
    assert values([last])[0] == [exchange, ("rank 0: missing [1]", (1,)), None]


def test_a_killed_coordinator_is_named_and_a_store_that_died_with_it_is_noticed_at_once():
    _, *others = launch(3, _die_after_the_meeting, 0, 1.0)
    for failures in values(others):
        assert failures[0] == ("rank 0 was not heard of within 1 s; last report of rank 0: the end", (0,))
        assert [ranks for _, ranks in failures] == [(0,)] * 3
    _, *others = launch(3, _die_after_the_meeting, 0, PATIENCE_SECONDS, store="rank0")
    for failures in values(others):
        assert all("the process group's store cannot be reached" in message for message, _ in failures)


def test_threads_wait_for_messages_while_others_are_in_collectives():
    for total, out in values(launch(3, _waits_beside_collectives, 30)):
        assert total == 1.0
        assert out == [b"not before the collectives"] + [True] * 30


def _waits_beside_collectives(turns):
    transport = _join()
    out = []

    def background():
        out.append(transport.mail.read("late", PATIENCE_SECONDS))
        for turn in range(turns):
            verdict = transport.agree(
                "commit", b"%d," % turn, lambda found: b"".join(found), PATIENCE_SECONDS
            )
            out.append(verdict == b"%d," % turn * transport.world)

    thread = threading.Thread(target=background)
    thread.start()
    total = torch.ones(1)
    for turn in range(3 * turns):
        dist.all_reduce(total)
        total /= transport.world
        transport.exchange("meanwhile", b"%d" % transport.rank, PATIENCE_SECONDS)
        dist.barrier()
        if turn == turns and transport.rank == 1:
            transport.mail.post("late", b"not before the collectives")
    thread.join()
    transport.close()
    return float(total), out


def _count_keys(turns):
    """How many keys the store has after some calls, after many more, and after the team has gone."""
    store = dist.distributed_c10d._get_default_store()

    def keys():
        dist.barrier()
        number = store.num_keys()
        dist.barrier()
        return number

    before = keys()
    transport = _join()
    counts = []
    for turn in range(turns):
        transport.tell("plan", b"plan" if transport.rank == 0 else None, PATIENCE_SECONDS)
        transport.agree("commit", b"x", lambda found: b"y", PATIENCE_SECONDS)
        transport.exchange("views", b"%d" % transport.rank, PATIENCE_SECONDS)
        transport.agree(
            f"step {turn}", b"x", lambda found: b"y", PATIENCE_SECONDS
        )  # keys that are not used again
        transport.deliver("letters", [(turn % 3, b"letter")], PATIENCE_SECONDS)
        transport.say(f"step {turn}")
        counts.append(keys())
    transport.close()
    after = keys()
    for turn in range(3):
        _join(purpose=f"save to {turn}").close()
        with contextlib.closing(_join()) as transport, transport.again("restore", PATIENCE_SECONDS):
            pass
    return before, counts, after, keys()


def _overtaken():
    """The last one leaves while the one before it has counted itself, and has not said that it was so."""
    store = dist.distributed_c10d._get_default_store()
    transport = _join()
    dist.barrier()
    post = MessageStore.post

    def late(self, key, data):
        if key == "gone":
            store.set("counted", b"")
            store.wait(["closed"])
        post(self, key, data)

    if transport.rank == 1:
        MessageStore.post = late
        transport.close()
    else:
        store.wait(["counted"])
        transport.close()
        store.set("closed", b"")
    dist.barrier()
    return store.check([f"{transport.mail._prefix}/gone"])


def test_nothing_is_left_of_a_team_whose_last_members_leave_together():
    assert values(launch(2, _overtaken)) == [False, False]


def test_the_store_does_not_grow_with_the_number_of_calls():
    before, counts, after, again = values(launch(3, _count_keys, 25))[0]
    assert max(counts[5:]) <= max(counts[:5])
    assert after - before <= 3  # what each rank is at
    assert again == after
