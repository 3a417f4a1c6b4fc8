"""Resume on any layout with no conversion: saved in each, restored in each, every element bit for bit.

The table of all pairs is printed at the end of the test run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import everystep
from support.processes.command import command
from support.worlds.launcher import launch, values
from support.worlds.layout_jobs import TIMEOUT, large_nbytes, load_layouts, save_and_load_large, save_layouts
from support.worlds.layout_truth import MOMENTS, STEPS, bits, groups_truth, scheduler_truth, true_model
from support.worlds.torch_layouts import LAYOUTS

Cells = dict[tuple[int, int], list[str]]

USUAL = [number for number, layout in enumerate(LAYOUTS) if layout.usual]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(USUAL, id="usual"),
        pytest.param(range(len(LAYOUTS)), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_any_layout_is_restored_in_any_layout(
    numbers: Sequence[int], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    worlds = sorted({LAYOUTS[number].world for number in numbers})
    mine = {world: [n for n in numbers if LAYOUTS[n].world == world] for world in worlds}
    traits: set[str] = set()
    for world in worlds:
        traits |= _save(tmp_path, world, mine[world])
    assert traits >= TRAITS
    for number in numbers:
        _check_in_one_process(tmp_path / str(number))
    cells: Cells = {}
    for world in worlds:
        for found in values(
            launch(world, load_layouts, str(tmp_path), list(numbers), mine[world], timeout=400.0)
        ):
            for cell, differences in found.items():
                cells.setdefault(cell, []).extend(differences)
    assert set(cells) == {(source, target) for source in numbers for target in numbers}
    record_property("layouts", _table(cells, numbers))
    wrong = {
        f"{LAYOUTS[source].name} -> {LAYOUTS[target].name}": differences[:5]
        for (source, target), differences in cells.items()
        if differences
    }
    assert not wrong, f"{len(wrong)} of {len(cells)} restored states differ from what was saved"


TRAITS = {
    "whole",
    "part",
    "empty",
    "uneven",
    "axis 0",
    "axis 1",
    "strided",
    "replicated",
    "mesh of some ranks",
    "some layers",
    "some moments",
}


def _save(folder: Path, world: int, numbers: Sequence[int]) -> set[str]:
    """All the traits that these layouts have."""
    found = values(launch(world, save_layouts, str(folder), list(numbers), timeout=240.0))
    one_copy = _nbytes(true_model().state_dict()) + sum(
        4 + 2 * parameter.nbytes for parameter in true_model().parameters()
    )
    assert all(nbytes == one_copy for rank in found for nbytes, _ in rank)
    return {trait for rank in found for _, traits in rank for trait in traits}


def _nbytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for name, tensor in state.items() if name != "head.weight")


def _table(cells: Cells, numbers: Sequence[int]) -> list[str]:
    good = sum(not differences for differences in cells.values())
    width = max(len(LAYOUTS[number].name) for number in numbers)
    lines = [
        f"layouts: {good} of {len(cells)} restored bit for bit; saved as (rows), restored as (columns):",
        " " * (width + 3) + "".join(f"{column + 1:3d}" for column in range(len(numbers))),
    ]
    for row, source in enumerate(numbers):
        marks = "".join(f"  {'✗' if cells[source, target] else '✓'}" for target in numbers)
        lines.append(f"{row + 1:2d} {LAYOUTS[source].name:<{width}}{marks}")
    return lines


def _check_in_one_process(path: Path) -> None:
    """Without any process group: the whole tree, `everystep verify`, and the safetensors package."""
    tree = everystep.load(path)
    assert tree["epoch"] == 3
    assert tree["scheduler"] == scheduler_truth()
    model = true_model()
    expected = model.state_dict()
    assert {name: bits(tensor) for name, tensor in tree["model"].items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }
    _check_optimizer(tree["optimizer"])
    verified = command("verify", path)
    assert verified.code == 0, verified.out
    shards = [
        Path(top, name) for top, _, names in os.walk(path) for name in names if name.endswith(".safetensors")
    ]
    assert shards
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            assert sum(opened.get_tensor(name).nbytes for name in opened.keys()) > 0  # noqa: SIM118


def _check_optimizer(tree: Any) -> None:
    names = [name for name, _ in true_model().named_parameters()]
    assert set(tree["state"]) == set(names)
    for key in MOMENTS:
        for name, parameter in true_model(key).named_parameters():
            assert bits(tree["state"][name][key]) == bits(parameter), f"{name} {key}"
    assert {entry["step"].item() for entry in tree["state"].values()} == {float(STEPS)}
    assert sorted(name for group in tree["param_groups"] for name in group["params"]) == sorted(names)
    for group, expected in zip(tree["param_groups"], groups_truth(), strict=True):
        assert {key: group[key] for key in expected} == expected


READ_BUDGET_NBYTES = 96 << 20
"""What the engine may take for reading, whatever the size of the state."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("side", [300, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_restore_on_another_layout_reads_one_copy_and_takes_little_memory(
    side: int, tmp_path: Path
) -> None:
    found = values(launch(2, save_and_load_large, str(tmp_path), side, timeout=240.0))
    assert all(loaded.differences == 0 for rank in found for loaded in rank.values())
    one_copy = large_nbytes(side)
    assert one_copy <= sum(rank["ddp"].read_nbytes for rank in found) < 1.1 * one_copy
    # Checksums are of whole rows, of which a rank that has columns wants half.
    assert sum(rank["tp"].read_nbytes for rank in found) < 1.6 * one_copy
    for rank in found:
        for loaded in rank.values():
            assert loaded.peak_nbytes < READ_BUDGET_NBYTES + (16 << 20)
    if side > 1000:
        assert one_copy > 1.5 * (READ_BUDGET_NBYTES + (16 << 20)), "too small to tell"


def _save_what_counts(folder: str) -> tuple[list[float], list[float]]:
    """As they are loaded: summands that were added before the save, and the mean of rank 0's BatchNorm."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    summands = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
    state = {"gradient": summands}
    # A rank that comes when rank 0 has failed already does not get to its own state: it learns of rank 0's.
    kinds = everystep.UnsupportedState if rank == 0 else (everystep.UnsupportedState, everystep.RankFailed)
    with pytest.raises(kinds, match=r"'gradient'.*Redistribute it to Replicate or Shard"):
        everystep.save(f"{folder}/sum", state, timeout=TIMEOUT)
    with everystep.Checkpointer(f"{folder}/run", state, timeout=TIMEOUT, preemption=False) as checkpointer:
        with pytest.raises(kinds, match=r"'gradient'.*Redistribute it to Replicate or Shard"):
            checkpointer.save(1)
        state["gradient"] = summands.redistribute(placements=[Replicate()])
        checkpointer.save(2)
    added = everystep.load(f"{folder}/run")["gradient"].tolist()

    model = nn.BatchNorm1d(2)
    state = {"model": DistributedDataParallel(model)}
    model.running_mean.fill_(rank + 1.0)  # as a batch of its own makes it
    everystep.save(f"{folder}/all", state, timeout=TIMEOUT)
    everystep.save(f"{folder}/{rank}", state, process_group="none")
    assert everystep.load(f"{folder}/{rank}")["model"]["running_mean"].tolist() == [rank + 1.0] * 2
    everystep.load(f"{folder}/all", state, timeout=TIMEOUT)
    return added, model.running_mean.tolist()


def test_sums_not_yet_computed_are_refused_and_buffers_of_ddp_are_rank_0s(tmp_path: Path) -> None:
    assert values(launch(2, _save_what_counts, str(tmp_path))) == [([3.0] * 3, [1.0] * 2)] * 2
