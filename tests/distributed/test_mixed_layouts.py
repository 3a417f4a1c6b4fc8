"""One leaf in several layouts is one leaf: its values are compared, whichever way the ranks hold them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from distributed.test_replicas import _KINDS, _index, _source
from everystep.format.geometry import Box, boxes_of_range
from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split, holding
from everystep.state import LeafSource
from everystep.store.ranks.checks import layouts
from everystep.store.ranks.checks.layouts import box_sums
from support.worlds.launcher import launch, values
from support.worlds.patience import PATIENCE_SECONDS

# --- sums ---------------------------------------------------------------------------------------------------

_SPREADS = (
    MeshPlacement(Mesh.grid(1)),
    MeshPlacement(Mesh.grid(3), (Split(0, 0),)),
    MeshPlacement(Mesh.grid(2), (Split(1, 0),)),
    MeshPlacement(Mesh.grid(2), (Split(0, 0, 3),)),  # several intervals on one rank
    MeshPlacement(Mesh.grid(2, 3), (Split(2, 1), Split(0, 0))),
)
_TYPES = {"U8": np.uint8, "F16": np.float16, "F32": np.float32, "F64": np.float64, "C128": np.complex128}


def _total(whole: np.ndarray[Any, Any], dtype: str, spread: MeshPlacement, boxes: list[Box]) -> int:
    """The sum over some boxes of an array, made of the sums of its shards, in different kinds of memory."""
    layout = LeafLayout("x", dtype, whole.shape, (spread,))
    buffer = np.empty(layouts._ELEMENTS * 16, np.uint8)
    total = 0
    for number, rank in enumerate(spread.mesh.ranks().flat):
        held = holding(layout, spread, spread.mesh.coordinate(int(rank)) or ())
        array = np.empty(held.shape, whole.dtype)
        for piece in held.pieces():
            array[_index(piece.local)] = whole[_index(piece.box)]
        leaf = LeafSource("x", dtype, array.shape, "numpy", _source(array, _KINDS[number % 3]))
        (found,) = box_sums(leaf, layout, held, [boxes], buffer)
        total += found
    return total % (1 << 64)


@pytest.mark.parametrize("dtype", _TYPES)
def test_a_sum_depends_on_bits_and_places_and_not_on_how_the_array_was_cut(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(layouts, "_ELEMENTS", 16)
    rng = np.random.default_rng(3)
    kind = _TYPES[dtype]
    shape = (7, 4, 5)
    array = np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(kind).itemsize), kind).reshape(shape).copy()
    whole = [Box((0, 0, 0), shape)]
    parts = boxes_of_range(shape, 23, 101)
    for boxes in (whole, parts):
        sums = {_total(array, dtype, spread, boxes) for spread in _SPREADS}
        assert len(sums) == 1
        for element in (23, 50, 100):
            changed = array.copy()
            changed.reshape(-1)[element : element + 1].view(np.uint8)[-1] ^= 1
            assert _total(changed, dtype, _SPREADS[1], boxes) not in sums
        swapped = array.copy()
        swapped.reshape(-1)[[30, 90]] = array.reshape(-1)[[90, 30]]
        assert _total(swapped, dtype, _SPREADS[0], boxes) not in sums
    outside = array.copy()
    outside.reshape(-1)[:23] = outside.reshape(-1)[23:46]
    assert _total(outside, dtype, _SPREADS[2], parts) == _total(array, dtype, _SPREADS[0], parts)


# --- ranks --------------------------------------------------------------------------------------------------

_SHAPE = (12, 10)


def _spread(mesh: Any, placements: list[Any], whole: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def _layouts() -> dict[str, Callable[[Any], Any]]:
    """How each rank holds the leaf; all make all meshes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    rank = dist.get_rank()
    low, high = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    all_four, last = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [1, 2, 3])
    plain: Callable[[Any], Any] = lambda whole: whole.clone()  # noqa: E731

    def on(mesh: Any, *placements: Any) -> Callable[[Any], Any]:
        return lambda whole: _spread(mesh, list(placements), whole)

    return {
        "plain on 0, shards on others": plain if rank == 0 else on(last, Shard(0)),
        "plain on 0, shards of all on others": plain if rank == 0 else on(all_four, Shard(1)),
        "plain on 0, replicated on others": plain if rank == 0 else on(all_four, Replicate()),
        "rows and columns": on(low, Shard(0)) if rank < 2 else on(high, Shard(1)),
        "columns and plain": on(low, Shard(1)) if rank < 2 else plain,
        "replicated and shards": on(low, Replicate()) if rank < 2 else on(high, Shard(0)),
    }


def _compare(folder: Path) -> dict[str, list[str]]:
    import torch

    whole = torch.arange(120, dtype=torch.float32).reshape(_SHAPE)
    return {name: _attempts(folder / name, whole, make(whole)) for name, make in _layouts().items()}


def _attempts(folder: Path, whole: Any, held: Any) -> list[str]:
    """Equal values are saved, others are not: at the first save, and in one for which nothing is planned."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    folder.mkdir(exist_ok=True)
    state = {"w": held, "b": torch.ones(3)}
    local = held.to_local() if hasattr(held, "to_local") else held
    got: list[str] = []

    def attempt(act: Callable[[], Any]) -> None:
        try:
            act()
            got.append("")
        except everystep.errors.RanksDisagree as error:
            got.append(
                "sample" if "replicated arrays; the save was rejected" in str(error) else str(error.leaf)
            )

    if rank == 3:
        local.view(-1)[0] += 1  # one element
    attempt(lambda: everystep.save(folder / "first", state, timeout=PATIENCE_SECONDS))
    if rank == 3:
        local.view(-1)[0] -= 1
    with everystep.Checkpointer(folder / "run", state, mode="sync", timeout=PATIENCE_SECONDS) as checkpointer:
        attempt(lambda: checkpointer.save(1))
        assert torch.equal(everystep.load(folder / "run", process_group="none")["w"], whole)
        dist.barrier()
        local += 1
        attempt(lambda: checkpointer.save(2))
        local += float(rank == 3)
        attempt(lambda: checkpointer.save(3))
        attempt(lambda: checkpointer.save(3))
        attempt(checkpointer.check_replicas)
        local -= float(rank == 3)
        attempt(lambda: checkpointer.save(3))
    return got


def test_a_leaf_in_several_layouts_is_compared_at_the_first_save_and_later(tmp_path: Path) -> None:
    for found in values(launch(4, _compare, tmp_path)):
        assert len(found) == 6
        for name, got in found.items():
            assert got == ["w", "", "", "sample", "w", "w", ""], name


def _layouts_in_memory(folder: Path) -> list[Any]:
    """Copies that are not contiguous, or not in the same way on all ranks, and part after the first save."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    image = torch.arange(2 * 16 * 24 * 24, dtype=torch.float32).reshape(2, 16, 24, 24)
    square = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    waves = torch.complex(square, -square)
    kinds: dict[str, Any] = {
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "channels_last on one": image.contiguous(memory_format=torch.channels_last)
        if rank
        else image.clone(),
        "transposed": square.T.contiguous().T,
        "every other": torch.stack([square, square], dim=-1)[..., 0],
        "conjugate": waves.conj().contiguous().conj(),
        "negated": torch._neg_view(-square),
        "expanded": torch.zeros(1, 4096).expand(3, 4096),
        "reversed": np.ascontiguousarray(square.numpy()[::-1])[::-1],
    }
    found: list[Any] = []
    for name, array in kinds.items():
        state = {"x": array}
        with everystep.Checkpointer(
            folder / name, state, mode="sync", timeout=PATIENCE_SECONDS
        ) as checkpointer:
            checkpointer.save(1)
            own = array[:1] if name == "expanded" else array
            own += float(rank)
            try:
                checkpointer.save(2)
                found.append((name, "stored as a mixture"))
            except everystep.errors.RanksDisagree as error:
                found.append((name, error.ranks))
            own -= float(rank)
            checkpointer.save(2)
    return found


def test_copies_that_part_are_found_however_they_lie_in_memory(tmp_path: Path) -> None:
    for found in values(launch(2, _layouts_in_memory, tmp_path)):
        assert len(found) == 8
        assert {got for _, got in found} == {(0, 1)}, found
