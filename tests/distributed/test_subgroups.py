"""Some ranks of the world save and load by themselves: `process_group=`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import everystep
from support.worlds.launcher import launch, values

MEMBERS = [1, 3]
WHOLE = torch.arange(24.0).reshape(6, 4)


def _spread(mesh_ranks: list[int]) -> DTensor:
    return distribute_tensor(WHOLE.clone(), DeviceMesh("cpu", mesh_ranks), [Shard(0)])


def _two_of_four(folder: Path) -> Any:
    """Ranks 1 and 3 save one checkpoint and a run of their own; the others never take part."""
    members = dist.new_group(MEMBERS)
    mesh = DeviceMesh.from_group(members, "cpu") if dist.get_rank() in MEMBERS else None
    if mesh is None:
        with pytest.raises(ValueError, match="is not in the given process_group"):
            everystep.save(
                folder / "one", {}, process_group=dist.distributed_c10d.GroupMember.NON_GROUP_MEMBER
            )
        return None
    state = {"w": distribute_tensor(WHOLE.clone(), mesh, [Shard(0)]), "same": torch.ones(1000), "n": 7}
    everystep.save(folder / "one", state, process_group=members)
    with everystep.Checkpointer(folder / "run", state, process_group=members, mode="sync") as ckpt:
        assert ckpt.restore() == 0
        ckpt.save(1)
        state["same"].add_(1)
        ckpt.save(2)
        ckpt.check_replicas()
    target = {"w": torch.zeros(6, 4), "same": torch.zeros(1000), "n": 0}
    local = {**target, "w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])}
    everystep.load(folder / "one", local, process_group=members)
    with everystep.Checkpointer(folder / "run", target, process_group=members) as ckpt:
        assert ckpt.restore() == 2
    return torch.equal(local["w"].full_tensor(), WHOLE), target["same"][0].item(), state["w"].shape


def test_some_ranks_of_the_world_save_and_load_by_themselves(tmp_path: Path) -> None:
    found = values(launch(4, _two_of_four, tmp_path))
    assert found[0] is found[2] is None
    assert found[1] == found[3] == (True, 2.0, WHOLE.shape)
    with everystep.open(tmp_path / "one") as checkpoint:
        assert checkpoint.world == 2
        assert torch.equal(checkpoint["w"][...], WHOLE)


def _mesh_beyond_the_group(folder: Path) -> str | None:
    members = dist.new_group(MEMBERS)
    everywhere = _spread([0, 1, 2, 3])
    if dist.get_rank() not in MEMBERS:
        return None
    # A rank that comes late may hear of rank 0's failure before it sees the same in its own state.
    late = () if dist.get_rank() == MEMBERS[0] else (everystep.errors.SaveFailedOnRank,)
    with pytest.raises((everystep.UnsupportedState, *late)) as caught:
        everystep.save(folder / "one", {"w": everywhere}, process_group=members)
    return str(caught.value)


def test_an_array_that_reaches_beyond_the_group_is_refused_by_name(tmp_path: Path) -> None:
    found = values(launch(4, _mesh_beyond_the_group, tmp_path))
    assert found[1] is not None
    assert found[1].startswith("w: its device mesh includes ranks [0, 2] of the world")
    assert found[3] is not None
    assert "w: its device mesh includes ranks [0, 2] of the world" in found[3]
    assert not (tmp_path / "one").exists()
