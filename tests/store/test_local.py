"""What belongs to one rank alone, saved and restored by a process without others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import everystep


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["one file", "manifest apart"])
def test_rank_local_state_comes_back_to_a_process_by_itself(tmp_path: Path, size: int) -> None:
    shared = np.arange(5.0)
    state = {"w": np.arange(size), "own": everystep.per_rank({"a": shared, "b": shared, "k": 7})}
    everystep.save(tmp_path / "one", state)
    found = everystep.load(tmp_path / "one")
    assert found["own"]["k"] == 7
    assert found["own"]["a"].tolist() == shared.tolist()
    assert found["own"]["a"] is found["own"]["b"]
    target = {
        "w": np.zeros(size, np.int64),
        "own": everystep.per_rank({"a": np.zeros(5), "b": np.zeros(5), "k": 0}),
    }
    place = target["own"].value["a"]
    everystep.load(tmp_path / "one", into=target)
    assert place.tolist() == shared.tolist() == target["own"].value["b"].tolist()
    assert target["own"].value["k"] == 7
    assert np.array_equal(target["w"], np.arange(size))
    assert everystep.verify(tmp_path / "one").intact


@pytest.mark.parametrize("mode", ["sync", "snapshot"])
def test_a_checkpointer_keeps_rank_local_state(tmp_path: Path, mode: str) -> None:
    state = {"own": everystep.per_rank({"a": np.arange(5.0)})}
    with everystep.Checkpointer(tmp_path / "run", state, mode=mode) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        state["own"].value["a"][:] = 0
        assert checkpointer.restore() == 1
    assert state["own"].value["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of which the other three are only pretended."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_part_of_an_array_is_not_saved_as_if_it_were_all(tmp_path: Path) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    spread = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with pytest.raises(everystep.UnsupportedState, match=r"w: this process holds only \[2\] .* shape \[8\]"):
        everystep.save(tmp_path / "one", {"w": spread}, process_group="none")
    assert not list(tmp_path.iterdir())
    everywhere = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
    everystep.save(tmp_path / "one", {"w": everywhere}, process_group="none")
    assert everystep.load(tmp_path / "one")["w"].tolist() == list(range(8))
