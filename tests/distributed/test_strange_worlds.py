"""Worlds that meet others, or change under an open Checkpointer: nothing is lost, mixed up or waited for.

Ranks that are stopped and go on later, two worlds on one run, worlds of other sizes one after the other,
new process groups, Checkpointers side by side, and nodes whose link is cut.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import everystep
from support.worlds.disturbed_trainings import (
    advance,
    bits,
    check_alone,
    error_of,
    leftovers,
    make_state,
    set_patience,
)
from support.worlds.launcher import HOST, launch, started, values
from support.worlds.nodes import DEVICE, missing, two_nodes
from support.worlds.patience import PATIENCE_SECONDS, outlive, stop_here, wait_for, wait_until_stopped

pytestmark = pytest.mark.race

SILENCE_SECONDS = 2.0


def _checkpointer(run: Path, state: Any, mode: Any = "sync", **more: Any) -> everystep.Checkpointer:
    keep = more.pop("keep", everystep.Keep(last=2))
    return everystep.Checkpointer(run, state, mode=mode, keep=keep, timeout=PATIENCE_SECONDS, **more)


def _steps(checkpointer: everystep.Checkpointer, state: dict[str, Any], last: int) -> None:
    """Trains up to a step, and saves each."""
    for step in range(state["step"] + 1, last + 1):
        advance(state)
        checkpointer.save(step)


# --- stopped and continued


def _stopped(run: Path, victim: int) -> tuple[Any, int | None]:
    """In the save of step 4 one rank is stopped: rank 0 before it commits, another before it writes."""
    import torch.distributed as dist

    from everystep.store.commit import driver
    from everystep.store.commit.transaction import Transaction

    state = make_state()
    with _checkpointer(run, state) as checkpointer:
        _steps(checkpointer, state, 3)
        advance(state)
        dist.barrier()
        meeting = checkpointer._group.meeting
        assert meeting is not None
        if dist.get_rank() == victim:
            where, name = (Transaction, "publish") if victim == 0 else (driver, "open_partial")
            real = getattr(where, name)

            def stop(*arguments: Any, **more: Any) -> Any:
                held = real(*arguments, **more) if victim else None
                stop_here()
                return held if victim else real(*arguments, **more)

            setattr(where, name, stop)
        else:
            set_patience(checkpointer, SILENCE_SECONDS)
            outlive(victim, meeting.membership.members[victim].pid)
        return error_of(lambda: checkpointer.save(4)), checkpointer.last_durable


def _go_on(run: Path, marks: Path) -> tuple[int, bool]:
    """Another training, in the midst of whose save of step 4 the stopped rank of the first one goes on."""
    import torch.distributed as dist

    from everystep.store.ranks.save_round import SaveRound

    state = make_state()
    with _checkpointer(run, state) as checkpointer:
        resumed = checkpointer.restore()
        exact = bits(state) == bits(make_state(resumed))
        if dist.get_rank() == 0:
            open_save = SaveRound.open

            def pause(self: SaveRound, opened: Any) -> Any:
                found = open_save(self, opened)
                if not (marks / "opened").exists():
                    (marks / "opened").touch()
                    wait_for(marks / "go on")
                return found

            SaveRound.open = pause  # type: ignore[method-assign]
        _steps(checkpointer, state, 6)
    return resumed, exact


def test_a_rank_that_was_stopped_and_given_up_goes_on_beside_another_world(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(3, _stopped, run, 1) as first:
        wait_until_stopped(first.pids[1])
        first.await_ended([0, 2])
        with started(2, _go_on, run, tmp_path) as second:
            wait_for(tmp_path / "opened")
            os.kill(first.pids[1], signal.SIGCONT)
            first.await_ended([1])
            (tmp_path / "go on").touch()
            assert values(second.join()) == [(3, True)] * 2
        for (kind, message, ranks), durable in values(first.join()):
            assert (kind, durable) == ("RankFailed", 3)
            assert ranks in ((1,), (0,))
            assert "whether the save was committed" not in message
    assert check_alone(run, 6) == 6


def _refused(run: Path) -> str:
    return error_of(lambda: _checkpointer(run, make_state()))[0]


def test_a_coordinator_that_was_stopped_keeps_its_run_and_commits_when_it_goes_on(tmp_path: Path) -> None:
    """All had written their shares: the checkpoint is whole, and others were told that it may be."""
    run = tmp_path / "run"
    with started(3, _stopped, run, 0) as first:
        wait_until_stopped(first.pids[0])
        first.await_ended([1, 2])
        assert values(launch(2, _refused, run)) == ["Locked"] * 2
        os.kill(first.pids[0], signal.SIGCONT)
        (leading, durable), *others = values(first.join())
    assert (leading[0], durable) == ("", 4)
    for (kind, message, ranks), known in others:
        assert (kind, ranks, known) == ("RankFailed", (0,), 3)
        assert "not known whether the save was committed" in message
    assert check_alone(run, 4) == 4


# --- two worlds


def _hold(run: Path, marks: Path) -> None:
    state = make_state()
    with _checkpointer(run, state, "overlap") as checkpointer:
        _steps(checkpointer, state, 2)
        checkpointer.wait()
        (marks / "held").touch()
        wait_for(marks / "refused")
        _steps(checkpointer, state, 4)


def _come_second(run: Path) -> tuple[str, float]:
    began = time.monotonic()
    kind, message, _ = error_of(lambda: _checkpointer(run, make_state()))
    assert "being written by process" in message
    return kind, time.monotonic() - began


def test_a_second_world_on_a_run_is_refused_on_all_its_ranks_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(2, _hold, run, tmp_path) as first:
        wait_for(tmp_path / "held")
        for kind, seconds in values(launch(3, _come_second, run)):
            assert kind == "Locked"
            assert seconds < PATIENCE_SECONDS / 2
        (tmp_path / "refused").touch()
        values(first.join())
    assert check_alone(run, 4) == 4


# --- other sizes


def _as_many_as_there_are(run: Path, last: int) -> list[Any]:
    """Goes on to a step; the files that each checkpoint then has, of other ranks than there are."""
    import torch
    import torch.distributed as dist

    state = make_state()
    state["wide"] = torch.zeros(1 << 18)  # large enough for each rank to have a share of it
    strangers: list[str] = []
    with _checkpointer(run, state) as checkpointer:
        resumed = checkpointer.restore()
        exact = bits(state) == bits(make_state(resumed)) and bool((state["wide"] == resumed).all())
        for step in range(resumed + 1, last + 1):
            state["wide"] += 1
            _steps(checkpointer, state, step)
            if dist.get_rank() == 0:
                names = os.listdir(run / f"step-{step:012d}")
                strangers += [
                    name for name in names if name[0] == "r" and int(name[1:6]) >= dist.get_world_size()
                ]
        dist.barrier()
        recycled = checkpointer._run._spare is not None if dist.get_rank() == 0 else True  # type: ignore[union-attr]
    return [resumed, exact, strangers, recycled]


def test_worlds_of_other_sizes_go_on_in_one_run_and_write_over_what_the_last_one_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number, world in enumerate((4, 2)):
        found = values(launch(world, _as_many_as_there_are, run, 5 * (number + 1)))
        assert found == [[5 * number, True, [], True]] * world
    assert leftovers(run) == []
    with everystep.open(run) as checkpoint:
        assert (checkpoint.step, checkpoint.world) == (10, 2)


# --- the process group


def _made_anew(run: Path) -> list[Any]:
    """The ranks change places, and with them the shards of a DTensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(8.0)

    def state() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        return {"w": distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)}

    live = state()
    checkpointer = _checkpointer(run, live)
    checkpointer.save(1)
    other = 1 - dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore(HOST, int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=other, world_size=2)
    live.update(state())
    refused = [
        error_of(lambda: checkpointer.save(2)),
        error_of(checkpointer.restore),
        error_of(checkpointer.check_replicas),
    ]
    found: list[Any] = [kind for kind, message, _ in refused if "created again" in message]
    checkpointer.close()
    dist.barrier()
    with _checkpointer(run, live) as checkpointer:
        found.append(checkpointer.restore())
        checkpointer.save(2)
        stored = [everystep.load(run / f"step-{step:012d}", process_group="none")["w"] for step in (1, 2)]
    return [*found, all(torch.equal(one, whole) for one in stored)]


def test_a_new_process_group_under_an_open_checkpointer_is_refused(tmp_path: Path) -> None:
    found = values(launch(2, _made_anew, tmp_path / "run"))
    assert found == [["RankFailed", "RankFailed", "RankFailed", 1, True]] * 2


# --- side by side


def _side_by_side(folder: Path) -> list[Any]:
    """Two Checkpointers in overlap and single saves, in turns; what of all that is not what was saved."""
    state, average = make_state(), make_state(3)
    wrong: list[str] = []
    first = _checkpointer(folder / "first", state, "overlap")
    second = _checkpointer(folder / "second", average, "overlap", every=2)
    for step in range(1, 7):
        advance(state)
        for checkpointer in (first, second) if step % 2 else (second, first):
            checkpointer.save(step)
        everystep.save(folder / f"single-{step}", state)
        advance(average)
    first.close()
    second.save(8)
    second.close()
    for name, steps, ahead in (("first", 6, 0), ("second", 8, 1)):
        restored = make_state()
        with _checkpointer(folder / name, restored) as checkpointer:
            resumed = checkpointer.restore()
        expected = make_state(steps if ahead == 0 else 9)
        if resumed != steps or bits(restored) != bits(expected):
            wrong.append(f"{name}: {resumed}, {restored['step']}")
    for step in range(1, 7):
        restored = make_state()
        everystep.load(folder / f"single-{step}", restored)
        if bits(restored) != bits(make_state(step)):
            wrong.append(f"single {step}")
    return wrong


def test_checkpointers_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    assert values(launch(3, _side_by_side, tmp_path)) == [[]] * 3
    assert leftovers(tmp_path / "first") == leftovers(tmp_path / "second") == []


# --- two nodes


def _cut_off(run: Path, marks: Path, before: str) -> tuple[Any, int | None]:
    """In the save of step 3 the link between the nodes is cut, before rank 0 says a certain thing."""
    import torch.distributed as dist

    from everystep.store.ranks import message_store as mail
    from everystep.store.ranks.save_round import SaveRound

    state = make_state()
    checkpointer = _checkpointer(run, state)
    _steps(checkpointer, state, 2)
    advance(state)
    dist.barrier()
    say, read = getattr(SaveRound, before), mail.MessageStore.read

    def cut(self: SaveRound, message: Any) -> Any:
        (marks / "cut").touch()
        wait_for(marks / "is cut")
        set_patience(checkpointer, SILENCE_SECONDS)
        self.meeting.timeout = SILENCE_SECONDS
        return say(self, message)

    def patient_read(self: mail.MessageStore, key: str, timeout: float) -> bytes:
        """The time of the silence begins with the cut."""
        while timeout > 0 and not (marks / "is cut").exists():
            with suppress(mail.MessageTimeout):
                return read(self, key, 0.2)
        return read(self, key, min(timeout, SILENCE_SECONDS))

    if dist.get_rank() == 0:
        setattr(SaveRound, before, cut)
    else:
        mail.MessageStore.read = patient_read  # type: ignore[method-assign]
        mail.ANSWER_SECONDS = 3.0  # type: ignore[misc] # in which a store that can be reached answers
    found = error_of(lambda: checkpointer.save(3)), checkpointer.last_durable
    (marks / f"told {dist.get_rank()}").touch()
    wait_for(marks / "mended")
    checkpointer.close()
    return found


@pytest.mark.parametrize("before", [pytest.param("open", marks=pytest.mark.slow), "end"])
def test_a_cut_link_between_two_nodes(tmp_path: Path, before: str) -> None:
    why = missing()
    if why:
        pytest.skip(f"two nodes cannot be made here: {why}")
    run = tmp_path / "run"
    with two_nodes() as nodes, started(2, _cut_off, run, tmp_path, before, nodes=nodes) as ranks:
        wait_for(tmp_path / "cut")
        nodes[1].run("ip", "link", "set", DEVICE, "down")
        (tmp_path / "is cut").touch()
        for rank in range(2):
            wait_for(tmp_path / f"told {rank}")
        nodes[1].run("ip", "link", "set", DEVICE, "up")
        (tmp_path / "mended").touch()
        (here, durable), (there, known) = values(ranks.join())
    assert (there[0], known) == ("RankFailed", 2)
    if before == "end":
        assert (here[0], durable) == ("", 3)
    else:
        assert (here[0], here[2], durable) == ("RankFailed", (1,), 2)
    assert check_alone(run, 3) == durable
