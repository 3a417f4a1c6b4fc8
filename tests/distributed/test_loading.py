"""Loading together: every rank gets its state bit by bit, each byte is read once per node, and all raise
if one does.

Many checks share a launch: starting a world takes longer than most of them.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import everystep
from everystep.engine import Tuning
from everystep.errors import CorruptCheckpoint, RankFailed, ReadFailed, StateMismatch, UnsupportedState
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from everystep.store import step_name
from everystep.store.ranks import open_together as opening_module
from everystep.store.ranks import shared_load
from everystep.store.ranks.channel import Channel
from everystep.store.ranks.exchange import hand_out
from everystep.store.ranks.shared_load import load_together
from everystep.store.read.checkpoint import Checkpoint, open_checkpoint, open_newest
from everystep.store.read.leaf_reader import LeafReader
from support.crashes.error_kinds import kind_of
from support.processes.counted_reads import counted_reads
from support.worlds.launcher import launch, values
from support.worlds.meetings import meet
from support.worlds.patience import PATIENCE_SECONDS, outlive
from support.worlds.several_ranks import Own, write_several

TIMEOUT = PATIENCE_SECONDS


def _state(seed: int = 3) -> dict[str, Any]:
    """About 6 MiB: enough for several readers."""
    g = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "big": torch.randn(1024, 1000, generator=g),
            "odd": torch.randn(7, 333, 3, generator=g),
            "half": torch.randn(513, 1001, generator=g).to(torch.bfloat16),
            "few": torch.arange(3, dtype=torch.int64),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(2.5),
            **{f"bias{n}": torch.randn(n + 1, generator=g) for n in range(50)},
        },
        "step": 5,
        "names": {"a", "b"},
        "loader": {"position": 17, "seen": [1, 2, 3]},
    }


def _zeros(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: _zeros(value) for key, value in state.items()}
    return type(state)()


def _nbytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state["model"].values())


def _same(found: Any, wanted: torch.Tensor) -> bool:
    if isinstance(found, DTensor):
        held = distribute_tensor(wanted, found.device_mesh, found.placements, src_data_rank=None)
        found, wanted = found.to_local(), held.to_local()
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def _check(loaded: dict[str, Any], state: dict[str, Any], names: Any = None) -> None:
    for name in state["model"] if names is None else names:
        assert _same(loaded["model"][name], state["model"][name]), name
    for place in ("step", "names", "loader"):
        assert loaded[place] == state[place]


class _Rank:
    """What a rank needs for one load after the other."""

    def __init__(self, path: str, seed: int = 3) -> None:
        self.meeting = meet("loading", TIMEOUT)
        self.channel = Channel.open()
        self.path = path
        self.state = _state(seed)

    def load(self, into: Any, **options: Any) -> Any:
        with open_checkpoint(self.path) as checkpoint:
            return load_together(self.meeting, checkpoint, into, **{"channel": self.channel, **options})

    def counted(self, into: Any, **options: Any) -> int:
        """Load and compare; how much was read here. Unverified: checksums are of more than what is wanted."""
        with counted_reads() as sizes:
            _check(self.load(into, verify=False, **options), self.state)
        return sum(sizes)


def _spread(
    state: dict[str, Any], mesh: DeviceMesh, placements: Callable[[torch.Tensor], Any]
) -> dict[str, Any]:
    """Zeros of the same shapes, spread over a mesh."""
    model = {
        name: DTensor.from_local(
            torch.zeros_like(
                distribute_tensor(tensor, mesh, placements(tensor), src_data_rank=None).to_local()
            ),
            mesh,
            placements(tensor),
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in state["model"].items()
    }
    return {**_zeros({**state, "model": {}}), "model": model}


def _rows(dims: int, at: int) -> Callable[[torch.Tensor], Any]:
    """Split by rows along one dimension of the mesh; what has no rows is replicated."""
    return lambda tensor: [Shard(0) if dim == at and tensor.dim() else Replicate() for dim in range(dims)]


# --- layouts ------------------------------------------------------------------------------------------------


def _layouts(path: str) -> dict[str, int]:
    rank = _Rank(path)
    state, number = rank.state, rank.meeting.rank
    found: dict[str, int] = {}

    found["ddp"] = rank.counted(_zeros(state))
    _check(rank.load(_zeros(state)), state)  # verified
    _check(rank.load(_zeros(state), channel=None), state)

    flat = DeviceMesh("cpu", list(range(4)))
    found["fsdp"] = rank.counted(_spread(state, flat, _rows(1, 0)))
    _check(rank.load(_spread(state, flat, _rows(1, 0))), state)

    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    found["hsdp"] = rank.counted(_spread(state, grid, _rows(2, 1)))
    _check(rank.load(_spread(state, grid, _rows(2, 0))), state)

    by_columns = _spread(
        state, grid, lambda tensor: [Replicate(), Shard(1) if tensor.dim() > 1 else Replicate()]
    )
    found["columns"] = rank.counted(by_columns)

    some = DeviceMesh("cpu", [1, 2, 3])
    mixed = _spread(state, some, _rows(1, 0)) if number else _zeros(state)
    _check(rank.load(mixed), state)

    # Memory with steps between its elements, and arrays of numpy; one rank has an empty place.
    odd = _zeros(state)
    if number == 1:
        odd["model"] = {name: torch.stack([value, value], -1)[..., 0] for name, value in odd["model"].items()}
    if number == 2:
        odd["model"] = {}
    found["odd"] = rank.counted(odd)

    rank.meeting.membership.topology = Topology.regular(4, 2)
    found["two nodes"] = rank.counted(_zeros(state))
    return found


def _tied(path: str) -> int:
    """One array under two names in the checkpoint; in the targets it lies in two ways, or in one."""
    rank = _Rank(path)
    wanted = _embedding()
    mesh = DeviceMesh("cpu", list(range(4)))

    def spread(placement: Any) -> Any:
        local = distribute_tensor(wanted, mesh, [placement], src_data_rank=None).to_local()
        zeros = torch.zeros_like(local)
        return DTensor.from_local(
            zeros, mesh, [placement], run_check=False, shape=wanted.shape, stride=(64, 1)
        )

    def load(first: Any, second: Any) -> None:
        loaded = rank.load({"in": {"w": first}, "out": {"w": second}}, verify=False)
        assert _same(loaded["in"]["w"], wanted)
        assert _same(loaded["out"]["w"], wanted)

    load(spread(Shard(0)), spread(Shard(1)))
    load(spread(Replicate()), spread(Shard(0)))
    load(spread(Shard(0)), torch.zeros_like(wanted))
    load(torch.zeros_like(wanted), spread(Shard(1)))
    one = spread(Shard(0))
    with counted_reads() as sizes:
        load(one, one)
    return sum(sizes)


def _embedding() -> torch.Tensor:
    return torch.arange(37 * 64, dtype=torch.float32).reshape(37, 64)


def _names(rank: int) -> list[str]:
    return [name for n, name in enumerate(_state()["model"]) if n % 2 == rank // 2 or name == "big"]


def _stages(path: str) -> dict[str, Any]:
    """Every rank has other leaves, as the stages of a pipeline."""
    rank = _Rank(path)
    state, number = rank.state, rank.meeting.rank
    found: dict[str, Any] = {}
    into = _zeros(state)
    into["model"] = {name: into["model"][name] for name in _names(number)}
    with counted_reads() as sizes:
        _check(rank.load(into, verify=False), state, _names(number))
    found["stages"] = sum(sizes)

    # A leaf that no rank has a place for.
    into = _zeros(state)
    del into["model"]["odd"]
    with pytest.raises(StateMismatch) as caught:
        rank.load(into)
    assert caught.value.extra == ("model.odd",)
    assert not into["model"]["big"].any()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _check(rank.load(into, strict=False), state, [name for name in state["model"] if name != "odd"])
    found["extra"] = [str(item.message) for item in told]
    if number == 1:  # another rank has it: nothing is wrong
        into["model"]["odd"] = torch.zeros(7, 333, 3)
    rank.load(into)

    into = _zeros(state)
    with counted_reads() as sizes:
        rank.load(into, select="model.bias*", verify=False)
    assert all(_same(into["model"][f"bias{n}"], state["model"][f"bias{n}"]) for n in range(50))
    assert not into["model"]["big"].any()
    found["select"] = sum(sizes)
    return found


def _mismatches(path: str) -> list[tuple[str, tuple[int, ...]]]:
    """What each rank raises when one does not fit."""
    rank = _Rank(path)
    found: list[tuple[str, tuple[int, ...]]] = []

    def attempt(change: Callable[[dict[str, Any]], object], **options: Any) -> None:
        into = _zeros(rank.state)
        if rank.meeting.rank == 2:
            change(into)
        try:
            rank.load(into, **options)
        except (StateMismatch, UnsupportedState, RankFailed) as error:
            tensors = into["model"].values() if isinstance(into["model"], dict) else into["model"]
            assert not any(tensor.any() for tensor in tensors if not tensor.is_meta)
            found.append((kind_of(error), getattr(error, "ranks", ())))
        else:
            found.append(("", ()))

    attempt(lambda into: into["model"].update(big=torch.zeros(3)))
    attempt(lambda into: into["model"].update(more=torch.zeros(3)))
    attempt(lambda into: into["model"].update(big=torch.zeros(1024, 1000, device="meta")))
    attempt(lambda into: into.update(model=[torch.zeros(1)]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attempt(lambda into: into["model"].update(big=torch.zeros(3)), strict=False)
    found.append(("warned" if told else "", ()))

    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("not mine")

    into = _zeros(rank.state)
    into["loader"] = Refusing() if rank.meeting.rank == 2 else into["loader"]
    try:
        rank.load(into)
    except (StateMismatch, RankFailed) as error:
        found.append((kind_of(error), getattr(error, "ranks", ())))
    _check(rank.load(_zeros(rank.state)), rank.state)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("loading") / "one"
    everystep.save(path, _state())
    return str(path)


def test_layouts_are_bit_exact_and_read_once_per_node(saved: str) -> None:
    found = values(launch(4, _layouts, saved))
    total = _nbytes(_state())
    for layout in ("ddp", "fsdp", "hsdp", "odd"):
        assert sum(item[layout] for item in found) == total, layout
    # Columns are read in the rows that they are in; by half of the ranks.
    assert total <= sum(item["columns"] for item in found) <= 2 * total
    assert sum(item["two nodes"] for item in found[:2]) == total
    assert sum(item["two nodes"] for item in found[2:]) == total
    # No rank reads it all for the others.
    assert max(item["ddp"] for item in found) < 0.4 * total


def test_tied_arrays_may_lie_differently_in_the_target(tmp_path: Path) -> None:
    embedding = _embedding()
    everystep.save(tmp_path / "tied", {"in": {"w": embedding}, "out": {"w": embedding}})
    assert sum(values(launch(4, _tied, str(tmp_path / "tied")))) == embedding.nbytes


def test_leaves_of_some_ranks_only(saved: str) -> None:
    found = values(launch(4, _stages, saved))
    state = _state()["model"]
    assert sum(item["stages"] for item in found) == _nbytes(_state())
    assert [len(item["extra"]) for item in found] == [1, 0, 0, 0]
    assert "model.odd" in found[0]["extra"][0]
    assert sum(item["select"] for item in found) == sum(state[f"bias{n}"].nbytes for n in range(50))


def test_when_one_rank_does_not_fit_all_raise_and_the_others_know_which(saved: str) -> None:
    found = values(launch(3, _mismatches, saved))
    mine = [
        "StateMismatch",
        "StateMismatch",
        "UnsupportedState",
        "StateMismatch",
        "",
        "warned",
        "StateMismatch",
    ]
    assert [kind for kind, _ in found[2]] == mine
    for other in found[:2]:
        failed = ("RankFailed", (2,))
        assert other == [failed, failed, failed, failed, ("", ()), ("", ()), failed]


# --- damage and death ---------------------------------------------------------------------------------------


def _damaged(good: str, bad: str) -> list[tuple[str, str, str | None, str | None]]:
    rank = _Rank(bad)
    found: list[tuple[str, str, str | None, str | None]] = []

    def attempt() -> None:
        into = _zeros(rank.state)
        with pytest.raises((CorruptCheckpoint, ReadFailed)) as caught:
            rank.load(into)
        error = caught.value
        found.append((kind_of(error), str(error), getattr(error, "path", None), getattr(error, "leaf", None)))

    attempt()
    real = LeafReader.fetch

    def unreadable(self: LeafReader, wanted: Any, **options: Any) -> None:
        if rank.meeting.rank == 1:
            error = ReadFailed("the device said no")
            error.errno, error.filename = errno.EIO, "r00001"
            raise error
        real(self, wanted, **options)

    LeafReader.fetch = unreadable  # type: ignore[method-assign]
    attempt()  # damage counts for all, also on the rank that could not read
    rank.path = good
    attempt()
    LeafReader.fetch = real  # type: ignore[method-assign]
    _check(rank.load(_zeros(rank.state)), rank.state)  # an older checkpoint, with the same team and link
    return found


def test_damage_seen_by_one_reader_is_raised_by_all(saved: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    everystep.save(bad, _state())
    with open_newest(bad) as checkpoint:
        leaf = next(leaf for leaf in checkpoint._parts[0].leaves if leaf.name == "model.big")
        (fragment,) = leaf.fragments
        (file,) = checkpoint._parts[0].files
    with open(bad / file.name, "r+b") as shard:
        shard.seek(fragment.offset + 100)  # in a chunk that only one rank reads
        byte = shard.read(1)
        shard.seek(-1, os.SEEK_CUR)
        shard.write(bytes([byte[0] ^ 1]))
    found = values(launch(3, _damaged, saved, str(bad)))
    for damaged, both, unread in found:
        for kind, text, path, leaf_name in (damaged, both):
            assert kind == "CorruptCheckpoint", text
            assert leaf_name == "model.big"
            assert path is not None
            assert Path(path).name == file.name
        assert unread[0] == "ReadFailed"
        assert "the device said no" in unread[1]
    # One has seen it; the others say who has.
    assert sum("found by rank" in item[0][1] for item in found) == 2
    assert ["found by rank 1" in item[2][1] for item in found] == [True, False, True]


def _killed(path: str, when: str) -> tuple[str, tuple[int, ...]]:
    rank = _Rank(path)
    if rank.meeting.rank == 1:
        if when == "reading":
            LeafReader.fetch = _die  # type: ignore[method-assign]
        elif when == "handing":
            rank.channel.send = _die  # type: ignore[method-assign]
        else:
            rank.meeting.exchange = _die  # type: ignore[method-assign]
        rank.load(_zeros(rank.state))
    outlive(1, rank.meeting.membership.members[1].pid)
    # Where bytes are handed around the dead are seen at once: only the living could need the time.
    shared_load.hand_out = lambda *rest: hand_out(*rest[:-1], TIMEOUT)
    rank.meeting.timeout = 2.0
    with pytest.raises(RankFailed) as caught:
        rank.load(_zeros(rank.state))
    return str(caught.value), caught.value.ranks


def _die(*args: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["planning", "reading", "handing"])
@pytest.mark.race
def test_survivors_of_a_killed_rank_fail_in_time(saved: str, when: str) -> None:
    outcomes = launch(3, _killed, saved, when)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.describe()
        text, ranks = outcome.value
        assert 1 in ranks, text


# --- state of single ranks ----------------------------------------------------------------------------------


def _own(path: str) -> dict[str, Any]:
    meeting = meet("loading", TIMEOUT)
    into = {
        "model": {"w": np.zeros((300, 7), np.float32)},
        "noise": everystep.per_rank({"array": np.full(5, -1.0, np.float32), "count": -1}),
    }
    with warnings.catch_warnings(record=True) as told, open_checkpoint(path) as checkpoint:
        warnings.simplefilter("always")
        loaded: Any = load_together(meeting, checkpoint, into, channel=Channel.open())
    assert np.array_equal(loaded["model"]["w"], _weights())
    noise = loaded["noise"].value
    return {
        "array": noise["array"].tolist(),
        "count": noise["count"],
        "told": [str(item.message) for item in told if item.category is RuntimeWarning],
    }


def _weights() -> Any:
    return np.arange(2100, dtype=np.float32).reshape(300, 7)


def _write_with_own(path: Path, world: int) -> None:
    layout = LeafLayout("model.w", "F32", (300, 7), (MeshPlacement(Mesh.grid(world)),), "numpy")
    own = {
        rank: Own(
            local={"noise": {"array": {"$leaf": f"@{rank}.noise.array"}, "count": rank}},
            arrays={f"@{rank}.noise.array": np.full(5, rank, np.float32)},
        )
        for rank in range(world)
    }
    tree = {"model": {"w": {"$leaf": "model.w"}}, "noise": {"$per_rank": "noise"}}
    plan = WritePlan([layout], Topology.regular(world), block_nbytes=64)
    write_several(path, plan, {"model.w": _weights()}, tree=tree, own=own)


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (3, 2), (2, 3)])
def test_what_belongs_to_a_rank_goes_back_to_it(tmp_path: Path, saving: int, loading: int) -> None:
    _write_with_own(tmp_path / "own", saving)
    found = values(launch(loading, _own, str(tmp_path / "own")))
    for rank, item in enumerate(found):
        known = rank < saving
        assert item["array"] == [float(rank) if known else -1.0] * 5
        assert item["count"] == (rank if known else -1)
        if not known:
            (text,) = item["told"]
            assert f"noise of rank {rank} stays as it is" in text
        elif rank == 0 and saving > loading:
            (text,) = item["told"]
            assert "the per_rank state of rank 2 was not restored" in text
        else:
            assert item["told"] == []


def _overtaken(folder: str) -> list[list[int]]:
    """Loads of a path, and of a run, that hold another checkpoint when the last rank opens it."""
    import torch.distributed as dist

    first = dist.get_rank() == 0
    found = []
    for path, meanwhile in ((f"{folder}/model", _replace_model), (f"{folder}/run", _go_on_with_run)):
        opened: list[str] = []

        def open_late(
            path: str,
            tuning: Tuning,
            opened: list[str] = opened,
            meanwhile: Callable[[str], None] = meanwhile,
        ) -> Checkpoint:
            opened.append(path)
            if len(opened) > 1:
                return open_checkpoint(path)
            if first:
                checkpoint = open_checkpoint(path)
                dist.barrier()
                return checkpoint
            dist.barrier()
            meanwhile(folder)
            return open_checkpoint(path)

        opening_module.open_any = open_late  # type: ignore[misc, assignment]
        target = {"w": torch.zeros(3, dtype=torch.int64)}
        everystep.load(path, target, timeout=TIMEOUT)
        assert len(opened) == 2
        found.append(target["w"].tolist())
    return found


def _replace_model(folder: str) -> None:
    everystep.save(f"{folder}/model", {"w": torch.full((3,), 2)}, overwrite=True, process_group="none")


def _go_on_with_run(folder: str) -> None:
    everystep.save(f"{folder}/run/{step_name(2)}", {"w": torch.full((3,), 2)}, step=2, process_group="none")
    shutil.rmtree(f"{folder}/run/{step_name(1)}")


def test_what_was_replaced_or_retired_before_all_had_opened_it_is_looked_for_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    everystep.save(tmp_path / "model", {"w": torch.full((3,), 1)})
    everystep.save(tmp_path / "run" / step_name(1), {"w": torch.full((3,), 1)}, step=1)
    assert values(launch(2, _overtaken, str(tmp_path))) == [[[2, 2, 2], [2, 2, 2]]] * 2
