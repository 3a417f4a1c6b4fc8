"""DCP on several ranks: one checkpoint, resharded on the way back, or none at all."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everystep
from everystep.integrations.dcp import Reader, Writer
from everystep.store.read.checkpoint import open_newest
from support.foreign.dcp_states import Odd, assert_same, failures, flip_in, load, model, save
from support.worlds.launcher import launch, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

SHAPE = (37, 24)
"""Uneven for two ranks and for three."""


def whole_state() -> dict[str, Any]:
    """What is saved, as one process has it."""
    rows = torch.arange(float(SHAPE[0] * SHAPE[1])).reshape(SHAPE)
    return {
        "rows": rows,
        "columns": rows + 0.5,
        "few": torch.arange(1.0, 2.0),  # the second rank has nothing of it
        "copy": rows[:5] - 1,
        "plain": torch.full((100, 7), 3.25),
        "epoch": 9,
        "odd": Odd(5),
        "list": [torch.ones(3), {"x": 1.5}],
    }


def spread(state: dict[str, Any]) -> dict[str, Any]:
    """The same, as DTensors over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = {"rows": [Shard(0)], "columns": [Shard(1)], "few": [Shard(0)], "copy": [Replicate()]}
    return {
        name: distribute_tensor(item, mesh, ways[name]) if name in ways else item
        for name, item in state.items()
    }


def cleared(state: dict[str, Any]) -> dict[str, Any]:
    def clear(item: Any) -> Any:
        return torch.zeros_like(item) if isinstance(item, torch.Tensor) else item

    made = {name: clear(item) for name, item in state.items()}
    return {**made, "epoch": None, "odd": None, "list": [torch.zeros(3), {"x": None}]}


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    return {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in state.items()}


def restored(path: str) -> None:
    """The checkpoint fills the layout of this world, and nothing differs."""
    target = cleared(spread(whole_state()))
    dcp.load(target, storage_reader=Reader(path))
    assert_same(gathered(target), whole_state())


def raised(call: Any) -> dict[int, BaseException]:
    """What ranks raised, as told to this one."""
    try:
        call()
    except dcp.api.CheckpointException as error:
        return failures(error)
    raise AssertionError("nothing was raised")


class FailsOnRank1(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on rank 1")
        return super().resolve_data(write_item)


class DropsOnRank1(DefaultSavePlanner):
    """Leaves out what its metadata say will be written."""

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        kept = [item for item in plan.items if dist.get_rank() == 0 or item.index.fqn != "rows"]
        return replace(plan, items=kept)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2, after a step."""
    made, _ = model()
    for layer in made:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    torch.manual_seed(3)
    made(torch.randn(5, 20)).square().sum().backward()
    optimizer.step()
    return made, optimizer


def two_ranks(folder: str) -> None:
    restored(f"{folder}/one")  # saved by one process

    dcp.save(spread(whole_state()), storage_writer=Writer(f"{folder}/two"))
    restored(f"{folder}/two")

    fsdp(folder)
    in_the_background(folder)
    cached_plans(folder)
    one_rank_fails(folder)
    no_whole_arrays(folder)
    damaged(folder)


def fsdp(folder: str) -> None:
    made, optimizer = trained()
    weights, moments = get_state_dict(made, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=Writer(f"{folder}/fsdp"))
    wanted = {name: item.full_tensor() for name, item in made.named_parameters()}
    other, fresh = trained()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(other, fresh)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=Reader(f"{folder}/fsdp"))
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same({name: item.full_tensor() for name, item in other.named_parameters()}, wanted)
    for one, another in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(
            optimizer.state[one]["exp_avg"].to_local(), fresh.state[another]["exp_avg"].to_local()
        )


def in_the_background(folder: str) -> None:
    state = spread(whole_state())
    saving: Any = dcp.async_save(state, storage_writer=Writer(f"{folder}/async"))
    state["plain"].zero_()  # staged: what is saved is what was there
    saving.result(timeout=60)
    restored(f"{folder}/async")


def cached_plans(folder: str) -> None:
    """Ranks hear of the plan in the first save only; the second goes to another path all the same."""
    state = spread(whole_state())
    for number in range(2):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(f"{folder}/cached{number}"), planner=planner)
        restored(f"{folder}/cached{number}")


def one_rank_fails(folder: str) -> None:
    path = f"{folder}/failing"
    state = spread(whole_state())
    writer = Writer(path)
    failed = raised(lambda: dcp.save(state, storage_writer=writer, planner=FailsOnRank1()))
    assert {rank: type(error) for rank, error in failed.items()} == {1: ZeroDivisionError}
    assert not os.path.exists(path)
    # A rank that was given another path.
    elsewhere = Writer(f"{path}{dist.get_rank() or ''}")
    failed = raised(lambda: dcp.save(state, storage_writer=elsewhere))
    assert {rank: type(error) for rank, error in failed.items()} == {1: everystep.SaveFailed}
    assert "the same path" in str(failed[1])
    assert not os.path.exists(path)
    # The same writer goes on, and what failed before is not in its way.
    dcp.save(state, storage_writer=writer)
    restored(path)
    failed = raised(lambda: dcp.save(state, storage_writer=writer))
    assert {rank: type(error) for rank, error in failed.items()} == {0: everystep.CheckpointExists}
    dcp.save(state, storage_writer=Writer(path, overwrite=True))
    restored(path)


def no_whole_arrays(folder: str) -> None:
    """What no reader would take for an array is not reported as saved."""
    path = f"{folder}/apart"
    state = {"rows": spread(whole_state())["rows"]}
    if dist.get_rank() == 1:
        state["rows"] = state["rows"].double()
    failed = raised(lambda: dcp.save(state, storage_writer=Writer(path)))
    assert {rank: type(error) for rank, error in failed.items()} == {0: everystep.errors.SaveRejected}
    assert "leaf 'rows'" in str(failed[0])
    assert "rank 1 a part of F64[37, 24]" in str(failed[0])
    state = spread(whole_state())
    failed = raised(lambda: dcp.save(state, storage_writer=Writer(path), planner=DropsOnRank1()))
    assert {rank: type(error) for rank, error in failed.items()} == {0: everystep.UnsupportedState}
    assert "rows: the ranks save 456 of its 888 elements" in str(failed[0])
    assert not os.path.exists(path)


def damaged(folder: str) -> None:
    path = Path(folder, "damaged")
    dcp.save(spread(whole_state()), storage_writer=Writer(path))
    if dist.get_rank() == 0:
        flip_in(path / "r00001.v0.safetensors", "rows")
    dist.barrier()
    target = cleared(spread(whole_state()))
    for error in raised(lambda: dcp.load(target, storage_reader=Reader(path))).values():
        assert isinstance(error, everystep.CorruptCheckpoint)
        assert (error.path, error.leaf) == (str(path / "r00001.v0.safetensors"), "rows")
        assert str(error).count("corrupt checkpoint") == 1
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "r00001.json").unlink()
    dist.barrier()
    found = raised(lambda: dcp.load(target, storage_reader=Reader(path)))
    assert {type(error) for error in found.values()} == {everystep.errors.IncompleteCheckpoint}
    assert "r00001.json" in str(found[0])


def three_ranks(folder: str) -> None:
    for name in ("one", "two"):
        restored(f"{folder}/{name}")
    dcp.save(spread(whole_state()), storage_writer=Writer(f"{folder}/three"))
    restored(f"{folder}/three")


def four_ranks(folder: str) -> None:
    """Two dimensions of parallelism, replicas, and groups of some ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(13, 30), torch.nn.Linear(30, 9))
    parallelize_module(made, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(made, mesh=mesh["data"])
    wanted = {name: item.full_tensor().clone() for name, item in made.named_parameters()}
    dcp.save({"model": get_model_state_dict(made)}, storage_writer=Writer(f"{folder}/grid"))
    state = {"model": {name: torch.zeros_like(item) for name, item in get_model_state_dict(made).items()}}
    dcp.load(state, storage_reader=Reader(f"{folder}/grid"))
    assert_same(gathered(state["model"]), wanted)

    replicated = torch.nn.Linear(13, 30)
    fully_shard(replicated, mesh=mesh)
    dcp.save({"model": replicated.state_dict()}, storage_writer=Writer(f"{folder}/replicated"))

    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        numbers = {"numbers": torch.arange(5), "more": torch.ones(7)}
        dcp.save(numbers, storage_writer=Writer(f"{folder}/group"), process_group=group)
        target = {name: torch.zeros_like(item) for name, item in numbers.items()}
        dcp.load(target, storage_reader=Reader(f"{folder}/group"), process_group=group)
        assert_same(target, numbers)

    # A part of what others have cannot be a checkpoint.
    mine = Writer(f"{folder}/alone{dist.get_rank()}")
    failed = raised(lambda: dcp.save(spread(whole_state()), storage_writer=mine, no_dist=True))
    assert "rows: the ranks save" in str(failed[0])
    assert isinstance(failed[0], everystep.UnsupportedState)

    # Directories that ranks do not share, with a checkpoint in each.
    path = f"{folder}/apart{dist.get_rank()}"
    save({"x": torch.ones(2)}, path)
    found = raised(lambda: dcp.load({"x": torch.zeros(2)}, storage_reader=Reader(path)))
    assert "different checkpoints" in str(found[0])


def test_ranks_of_a_mesh_and_of_groups(tmp_path: Path) -> None:
    values(launch(4, four_ranks, str(tmp_path)))
    for name in ("grid", "replicated", "group"):
        assert everystep.verify(tmp_path / name).problems == ()
    assert everystep.open(tmp_path / "group").world == 2
    with open_newest(tmp_path / "replicated") as checkpoint:
        stored = sum(
            fragment.nbytes
            for rank in range(4)
            for leaf in checkpoint._parts[rank].leaves
            for fragment in leaf.fragments
        )
        assert stored == checkpoint.nbytes == 4 * (13 * 30 + 30)
    assert not list(tmp_path.glob("alone*"))


def test_ranks_save_and_load_together(tmp_path: Path) -> None:
    save(whole_state(), tmp_path / "one")
    values(launch(2, two_ranks, str(tmp_path)))
    values(launch(3, three_ranks, str(tmp_path)))
    # And one process has all of it again.
    for name in ("two", "three", "async", "failing"):
        path = tmp_path / name
        assert_same(load(whole_state(), path), whole_state())
        assert everystep.verify(path).problems == ()
        loaded = {**everystep.load(path)}
        assert loaded.pop("odd").dtype == "uint8"
        assert_same(loaded, {key: item for key, item in whole_state().items() if key != "odd"})
    two = tmp_path / "two"
    assert sorted(item.name for item in two.iterdir()) == [
        "manifest.json",
        "r00000.v0.safetensors",
        "r00001.json",
        "r00001.v0.safetensors",
    ]
    # Copies are written once, by one rank.
    shards = [safetensors.torch.load_file(two / f"r0000{rank}.v0.safetensors") for rank in range(2)]
    assert sum(name.startswith(("copy", "plain")) for shard in shards for name in shard) == 2
    assert not list(tmp_path.glob("*.partial"))


# --- killed ranks


Victim = Literal["writer", "coordinator"]


class KilledWhileWriting(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


class KilledAtTheEnd(Writer):
    """Its coordinator dies when everything is written and nothing is committed."""

    def finish(self, metadata: Any, results: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(path: str, victim: Victim) -> None:
    state = spread(whole_state())
    if victim == "writer":
        dcp.save(state, storage_writer=Writer(path), planner=KilledWhileWriting())
    else:
        dcp.save(state, storage_writer=KilledAtTheEnd(path))


@pytest.mark.parametrize("victim", ["writer", "coordinator"])
def test_a_killed_rank_leaves_no_checkpoint_and_the_next_save_works(tmp_path: Path, victim: Victim) -> None:
    path = tmp_path / "first"
    outcomes = launch(2, killed, str(path), victim)
    dead = 1 if victim == "writer" else 0
    assert outcomes[dead].exitcode == -signal.SIGKILL
    assert not outcomes[1 - dead].ok
    assert not path.exists()
    if victim == "coordinator":
        assert (tmp_path / "first.partial").is_dir()
    save(whole_state(), path)
    assert_same(load(whole_state(), path), whole_state())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["first"]


# --- saves by another process


def by_processes(folder: str) -> None:
    for number in range(2):
        saving: Any = dcp.async_save(
            spread(whole_state()),
            storage_writer=Writer(f"{folder}/{number}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        saving.result(timeout=90)
        restored(f"{folder}/{number}")


@pytest.mark.slow
def test_saves_in_the_background_by_processes(tmp_path: Path) -> None:
    values(launch(2, by_processes, str(tmp_path), timeout=110))
    assert everystep.verify(tmp_path / "1").problems == ()
