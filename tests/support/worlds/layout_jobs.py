"""What the ranks of a world do for the table of layouts: save in each of its layouts, restore in each."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everystep
from everystep.checkpointer.checkpointer import Mode
from support.processes.counted_reads import counted_reads
from support.worlds.layout_truth import MOMENTS, STEPS, Truth, fresh_training, local, saved_training, traits
from support.worlds.torch_layouts import LAYOUTS

TIMEOUT = 120.0


def is_run(number: int) -> bool:
    """Every other layout saves with a Checkpointer into a run, the others with `everystep.save`."""
    return number % 2 == 1


def save_layouts(folder: str, numbers: Sequence[int]) -> list[tuple[int, set[str]]]:
    """Save the truth in each of these layouts; how many bytes each took, and its traits here."""
    found = []
    for number in numbers:
        path, training = os.path.join(folder, str(number)), saved_training(LAYOUTS[number])
        if is_run(number):
            mode: Mode = "overlap" if number % 4 == 1 else "snapshot"
            with everystep.Checkpointer(
                path, training.state, timeout=TIMEOUT, preemption=False, mode=mode
            ) as checkpointer:
                saving = checkpointer.save(STEPS)
                assert saving is not None
                info = saving.result()
        else:
            info = everystep.save(path, training.state, step=STEPS, timeout=TIMEOUT)
        found.append((info.nbytes, traits(training)))
    return found


def load_layouts(
    folder: str, sources: Sequence[int], targets: Sequence[int]
) -> dict[tuple[int, int], list[str]]:
    """Restore each source in each target layout; what differs from the truth on this rank, cell by cell."""
    gc.freeze()  # all that was loaded before the fork: nothing to search again and again
    found: dict[tuple[int, int], list[str]] = {}
    for target in targets:
        expected = Truth.of(LAYOUTS[target])
        for source in sources:
            training = fresh_training(LAYOUTS[target], stepped=(source // 2) % 2 == 0)
            assert expected.differences(training), "what is compared is not what was restored"
            try:
                restore(os.path.join(folder, str(source)), training.state, run=is_run(source))
                found[source, target] = expected.differences(training)
            except (
                everystep.EverystepError
            ) as error:  # all ranks raise, and the other cells can still be tried
                found[source, target] = [f"{type(error).__name__}: {error}"]
        gc.collect()  # reducers of DDP hold on to groups
    return found


def restore(path: str, state: Any, *, run: bool) -> None:
    if not run:
        everystep.load(path, state, timeout=TIMEOUT)
        return
    with everystep.Checkpointer(path, state, timeout=TIMEOUT, preemption=False) as checkpointer:
        assert checkpointer.restore() == STEPS


# --- one large state ----------------------------------------------------------------------------------------

_LAYERS = 4


def large_nbytes(side: int) -> int:
    """Weights and two moments each, of square matrices."""
    return 3 * _LAYERS * side * side * 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a restore of the large state took on one rank."""

    differences: int
    """Elements that are not what was saved."""
    peak_nbytes: int
    """How much memory it took beyond what was there before."""
    read_nbytes: int
    """Read from storage."""


def save_and_load_large(folder: str, side: int) -> dict[str, Loaded]:
    """Save as FSDP2 does, restore as tensor parallel and as DDP do, all on the same ranks."""
    path = os.path.join(folder, "run")
    with _large("fsdp2", side, filled=True) as state, _checkpointer(path, state) as checkpointer:
        checkpointer.save(1)
    return {kind: _load_large(path, kind, side) for kind in ("tp", "ddp")}


def _checkpointer(path: str, state: Any) -> everystep.Checkpointer:
    return everystep.Checkpointer(path, state, mode="sync", timeout=TIMEOUT, preemption=False)


@contextmanager
def _large(kind: str, side: int, *, filled: bool) -> Iterator[dict[str, Any]]:
    """Four matrices and an optimizer that has made a step: all memory is there."""
    model: Any = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(_LAYERS)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(_large_truth(number, side) if filled else torch.zeros(()))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        plan: dict[str, Any] = {
            str(number): ColwiseParallel() if number % 2 == 0 else RowwiseParallel()
            for number in range(_LAYERS)
        }
        parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if filled:
        for parameter in model.parameters():
            for factor, key in enumerate(MOMENTS, start=2):
                local(optimizer.state[parameter][key]).copy_(local(parameter) * factor)
    yield {"model": model, "optimizer": optimizer}


def _large_truth(number: int, side: int) -> torch.Tensor:
    return torch.arange(side * side, dtype=torch.float32).reshape(side, side) + number


def _load_large(path: str, kind: str, side: int) -> Loaded:
    with _large(kind, side, filled=False) as state:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        with counted_reads() as sizes, _checkpointer(path, state) as checkpointer:
            assert checkpointer.restore() == 1
        peak = _status("VmHWM") - before
        differences = 0
        for number, parameter in enumerate(state["model"].parameters()):
            whole = _large_truth(number, side)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                ).to_local()
            moments = [state["optimizer"].state[parameter][key] for key in MOMENTS]
            for factor, tensor in enumerate([parameter, *moments], start=1):
                differences += int((local(tensor) != whole * factor).sum())
        return Loaded(differences, peak, sum(sizes))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
