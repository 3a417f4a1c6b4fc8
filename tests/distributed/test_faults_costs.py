"""What saving together costs: messages that do not grow with the state, and one copy of it, shared out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.store.read.checkpoint import open_newest
from support.worlds.launcher import launch, values

pytestmark = pytest.mark.race

SAVES = 4


def _count_messages(run: Path, leaves: int) -> list[int]:
    """How often this rank speaks to the store, for each save."""
    from everystep.store.ranks.message_store import MessageStore

    calls: list[str] = []
    ask = MessageStore._call

    def counted(self: MessageStore, *arguments: Any) -> Any:
        calls.append("")
        return ask(self, *arguments)

    MessageStore._call = counted  # type: ignore[method-assign]
    state = {f"leaf{number}": np.arange(8.0) + number for number in range(leaves)}
    found: list[int] = []
    with everystep.Checkpointer(run, state, mode="sync", timeout=60.0) as checkpointer:
        for step in range(1, SAVES + 1):
            before = len(calls)
            checkpointer.save(step)
            found.append(len(calls) - before)
    return found


def test_messages_do_not_grow_with_the_state_or_the_world(tmp_path: Path) -> None:
    counts = {
        (world, leaves): values(launch(world, _count_messages, tmp_path / f"{world}-{leaves}", leaves))
        for world, leaves in ((2, 3), (4, 3), (2, 300))
    }
    for found in counts.values():
        followers = {tuple(counts[2:]) for counts in found[1:]}  # before, nothing has ended yet, perhaps
        assert len(followers) == 1
        for number in (*found[0][1:], *followers.pop()):
            assert number <= 10
    assert counts[2, 3][1][-1] == counts[4, 3][1][-1] == counts[2, 300][1][-1]
    assert counts[2, 3][0][-1] == counts[4, 3][0][-1] == counts[2, 300][0][-1]


def _save_and_load_many(folder: Path) -> tuple[list[int], int]:
    """How many keys the store has after each save and load, at a path of its own; how often this connects."""
    import torch.distributed as dist

    from everystep.store.ranks import message_store as mail

    connect, connected = mail._connect, []

    def counted(store: Any) -> Any:
        connected.append(store)
        return connect(store)

    mail._connect = counted
    store = dist.distributed_c10d._get_default_store()
    state = {"w": np.arange(8.0)}
    found: list[int] = []
    for number in range(6):
        everystep.save(folder / str(number), state, timeout=60.0)
        everystep.load(folder / str(number), state, timeout=60.0)
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    return found, len(connected)


def test_nothing_stays_in_the_store_of_saves_to_many_paths_and_no_connection_is_made_for_each(
    tmp_path: Path,
) -> None:
    for keys, connections in values(launch(2, _save_and_load_many, tmp_path)):
        assert keys[1:] == keys[1:2] * 5  # barriers have their own, at first
        assert connections == 1


NBYTES = 3 << 20


def _save_one_copy(folder: Path) -> list[int]:
    """How many bytes of a state that all hold this rank writes: with all, one per node or socket, and two."""
    import torch.distributed as dist

    state = {f"w{number}": np.ones((number + 3, 1001), np.float32) for number in range(30)}
    rest = NBYTES - sum(array.nbytes for array in state.values())
    state["rest"] = np.ones(rest // 4, np.float32)
    found: list[int] = []
    for number, writers in enumerate(("all", "node", "socket", 2)):
        options = everystep.Options(writers=writers)  # type: ignore[arg-type]
        info = everystep.save(folder / str(number), state, options=options)
        with open_newest(info.path) as checkpoint:
            part = checkpoint._parts[dist.get_rank()]
            found.append(sum(piece.nbytes for leaf in part.leaves for piece in leaf.fragments))
        dist.barrier()
    return found


def test_ranks_share_one_copy(tmp_path: Path) -> None:
    world = 4
    found = values(launch(world, _save_one_copy, tmp_path))
    everybody, node, socket, two = zip(*found, strict=True)
    for written in (everybody, node, socket, two):
        assert sum(written) == NBYTES // 4 * 4
    assert max(everybody) - min(everybody) <= NBYTES / world * 0.01
    assert sorted(node) == [0, 0, 0, sum(node)]
    assert sorted(socket) == [0, 0, 0, sum(socket)]  # all may run on the same processors, so on one socket
    writing = [nbytes for nbytes in two if nbytes]
    assert len(writing) == 2
    assert math.isclose(*writing, rel_tol=0.01)
    for path in tmp_path.iterdir():
        with everystep.open(path) as checkpoint:
            assert checkpoint.nbytes == sum(everybody)
