"""Directories that torch's own DCP wrote are read with any sharding."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from everystep import universal
from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.dcp import source as source_dcp
from support.foreign.source_leaves import assert_same, by_name
from support.worlds.launcher import launch, values


def save_alone(path: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": states, "step": 12, "extra": {"note": "hi"}},
        checkpoint_id=path,
        no_dist=True,
    )
    return model, optimizer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_directory_of_one_process(tmp_path: Path) -> None:
    model, optimizer = save_alone(tmp_path / "d")
    assert "torch.distributed.checkpoint" in str(source_dcp.looks_like(tmp_path / "d"))
    source = source_dcp.describe(tmp_path / "d")
    found = by_name(source)
    for name, parameter in model.named_parameters():
        assert_same(found[f"model.{name}"], parameter, name)
        for key, value in optimizer.state[parameter].items():
            assert_same(found[f"optimizer.{name}.{key}"], value, name)
    assert source.step == 12
    assert source.values["extra.note"] == "hi"


def full(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def save_sharded(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    state: dict[str, Any] = {
        "rows": distribute_tensor(full((7, 4)), mesh, [Shard(0)]),
        "columns": distribute_tensor(full((4, 8)), mesh, [Shard(1)]),
        "few": distribute_tensor(full((2, 3)), mesh, [Shard(0)]),
        "same": distribute_tensor(full((3, 3)).bfloat16(), mesh, [Replicate()]),
        "plain": full((5,)),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=path)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for consolidated in (False, True):
        writer = dcp.HuggingFaceStorageWriter(
            f"{path}-{consolidated}", save_distributed=True, enable_consolidation=consolidated
        )
        dcp.save(tensors, storage_writer=writer)


def test_shards_of_three_ranks(tmp_path: Path) -> None:
    values(launch(3, save_sharded, str(tmp_path / "d")))
    check_hugging_face(tmp_path)
    source = source_dcp.describe(tmp_path / "d")
    found = by_name(source)
    assert_same(found["rows"], full((7, 4)))
    assert_same(found["columns"], full((4, 8)))
    assert_same(found["few"], full((2, 3)))
    assert_same(found["same"], full((3, 3)).bfloat16())
    assert_same(found["plain"], full((5,)))
    assert source.step == 3


def check_hugging_face(tmp_path: Path) -> None:
    """What torch's writer for Hugging Face left: shards without an index, or consolidated files."""
    for folder, kind in (("d-False", "dcp-hf"), ("d-True/sharded", "dcp-hf"), ("d-True", "hf")):
        source = universal.describe(tmp_path / folder)
        assert source.kind == kind
        found = by_name(source)
        assert set(found) == {"model.rows", "model.columns", "model.few", "model.same", "model.plain"}
        assert_same(found["model.rows"], full((7, 4)))
        assert_same(found["model.columns"], full((4, 8)))
        assert_same(found["model.few"], full((2, 3)))
        assert_same(found["model.same"], full((3, 3)).bfloat16())
    shards = sorted((tmp_path / "d-False").iterdir())
    data = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(IncompleteCheckpoint, match="shard-00002"):
        universal.describe(tmp_path / "d-False")
    shards[1].write_bytes(data.replace(b"saved_offsets", b"saved_0ffsets"))
    with pytest.raises(CorruptCheckpoint, match="where the piece belongs"):
        universal.describe(tmp_path / "d-False")
    shards[1].write_bytes(data.replace(b"[3, 0]", b"[2, 0]"))
    with pytest.raises(CorruptCheckpoint, match="do not make up"):
        universal.describe(tmp_path / "d-False")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_missing_cut_and_hostile_files(tmp_path: Path) -> None:
    path = tmp_path / "d"
    save_alone(path)
    metadata = (path / ".metadata").read_bytes()
    for length in range(0, len(metadata), 37):
        (path / ".metadata").write_bytes(metadata[:length])
        with pytest.raises((CorruptCheckpoint, UnsupportedSource)):
            source_dcp.describe(path)
    (path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(UnsupportedSource, match=r"builtins\.print"):
        source_dcp.describe(path)
    (path / ".metadata").write_bytes(metadata)
    file = next(path.glob("*.distcp"))
    data = file.read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(CorruptCheckpoint) as error:
            source_dcp.describe(path)
        assert file.name in str(error.value)
    file.unlink()
    with pytest.raises(IncompleteCheckpoint, match="missing"):
        source_dcp.describe(path)
    (path / ".metadata").unlink()
    with pytest.raises(IncompleteCheckpoint):
        source_dcp.describe(path)
    assert source_dcp.looks_like(path) is None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_path_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "d"
    save_alone(path)
    metadata = (path / ".metadata").read_bytes()
    assert b"__0_0.distcp" in metadata
    (path / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../0.disc"))
    with pytest.raises(CorruptCheckpoint, match="outside of the directory"):
        source_dcp.describe(path)
