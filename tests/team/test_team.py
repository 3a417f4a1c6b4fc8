from __future__ import annotations

import os

import torch.distributed as dist

from distributed.launcher import launch, values
from holdfast.team import join


def _everything():
    rank = dist.get_rank()
    team = join("Checkpointer /data/run", 10)
    assert team is not None
    told = team.tell("plan", b"the plan" if rank == 0 else None, 5)
    agreed = team.agree("commit", b"%d" % rank, lambda found: b"+".join(found), 5)
    exchanged = team.exchange("views", b"even" if rank % 2 == 0 else b"odd", 5)
    team.close()
    return told, agreed, exchanged, [m.pid for m in team.members], os.getpid(), team.topology, team.node_peers


def test_a_team_tells_agrees_and_exchanges():
    found = values(launch(3, _everything, timeout=30))
    pids = [value[4] for value in found]
    for told, agreed, exchanged, members, _, topology, peers in found:
        assert told == b"the plan"
        assert agreed == b"0+1+2"
        assert list(exchanged.items()) == [(b"even", (0, 2)), (b"odd", (1,))]
        assert members == pids
        assert topology.nodes == (0, 0, 0)
        assert peers == (0, 1, 2)
