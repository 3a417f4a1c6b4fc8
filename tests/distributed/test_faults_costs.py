"""What saving together costs: messages that do not grow with the state, and one copy of it, shared out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.store.read.checkpoint import open_newest
from support.worlds.launcher import launch, values

pytestmark = pytest.mark.race

SAVES = 4
MOST_REQUESTS = 10
"""For one save, of one rank, once the ranks have met and planned."""


def _count_requests(folder: Path, leaves: int) -> dict[str, list[int]]:
    """How many requests to the store each save of this rank takes: those of a Checkpointer, and others."""
    import torch.distributed as dist

    from everystep.store.ranks.message_store import MessageStore

    calls: list[str] = []
    ask = MessageStore._call

    def counted(self: MessageStore, *arguments: Any) -> Any:
        calls.append("")
        return ask(self, *arguments)

    MessageStore._call = counted  # type: ignore[method-assign]
    state = {f"leaf{number}": np.arange(8.0) + number for number in range(leaves)}
    found: dict[str, list[int]] = {"save": [], "Checkpointer": []}

    def note(kind: str, save: Callable[[], object]) -> None:
        dist.barrier()
        before = len(calls)
        save()
        found[kind].append(len(calls) - before)

    for number in range(SAVES):
        note("save", partial(everystep.save, folder / f"one-{number}", state, step=number, timeout=60.0))
    with everystep.Checkpointer(folder / "run", state, mode="sync", timeout=60.0) as checkpointer:
        for step in range(1, SAVES + 1):
            note("Checkpointer", partial(checkpointer.save, step))
    return found


def test_requests_do_not_grow_with_the_state_or_the_world(tmp_path: Path) -> None:
    counts = {
        (world, leaves): values(launch(world, _count_requests, tmp_path / f"{world}-{leaves}", leaves))
        for world, leaves in ((2, 3), (4, 3), (2, 300))
    }
    for kind in ("save", "Checkpointer"):
        for ranks in counts.values():
            for found in ranks:
                assert max(found[kind][1:]) <= MOST_REQUESTS < found[kind][0], (kind, found)
        coordinators = {tuple(ranks[0][kind][1:]) for ranks in counts.values()}
        assert len(coordinators) == 1, coordinators


def _plan_again(folder: Path) -> list[int]:
    """How often this rank plans: saves in which leaves, options or nothing differ, and one that fails."""
    import torch.distributed as dist

    from everystep.store.ranks.write_shares import WriteShares

    plans: list[int] = []
    plan = WriteShares.plan

    def counted(self: WriteShares, *arguments: Any) -> None:
        plans[-1] += 1
        plan(self, *arguments)

    WriteShares.plan = counted  # type: ignore[method-assign]
    state: dict[str, Any] = {"w": np.arange(8.0), "epoch": 1}

    def save(name: str, **options: Any) -> None:
        plans.append(0)
        everystep.save(folder / name, state, options=everystep.Options(**options), timeout=60.0)

    save("first")
    state["epoch"] = 2
    save("other value")
    if dist.get_rank() == 1:
        state["late"] = np.ones(3)
    save("other leaf on one rank")
    save("as before")
    save("other options", writers="node")
    state["w"] += float(dist.get_rank())
    with pytest.raises(everystep.SaveFailed, match="different values of replicated arrays"):
        save("different copies", writers="node")
    state["w"] -= float(dist.get_rank())
    save("after a failure", writers="node")
    return plans


def test_a_save_uses_the_plan_of_the_one_before_as_long_as_it_fits(tmp_path: Path) -> None:
    assert values(launch(2, _plan_again, tmp_path)) == [[1, 0, 1, 0, 1, 0, 1]] * 2
    late = everystep.load(tmp_path / "as before", process_group="none")
    assert (late["epoch"], late["late"].tolist()) == (2, [1.0, 1.0, 1.0])


def _save_and_load_many(folder: Path) -> tuple[list[int], int]:
    """How many keys the store has after each save and load, at a path of its own; how often this connects."""
    import torch.distributed as dist

    from everystep.store.ranks import message_store

    connect, connected = message_store._connect, []

    def counted(store: Any) -> Any:
        connected.append(store)
        return connect(store)

    message_store._connect = counted
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
