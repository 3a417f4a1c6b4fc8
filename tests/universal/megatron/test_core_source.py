"""Distributed checkpoints of Megatron-Core. The fixture was written by Megatron-Core 0.16.1 on two ranks."""

from __future__ import annotations

import json
import pickle
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import everystep
from everystep import universal
from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.universal.megatron import core_source as megatron_core
from support.foreign.dcp_directories import load_all
from support.foreign.megatron_core_names import our_names
from support.foreign.source_leaves import assert_same, by_name

FIXTURE = Path(__file__).parents[1] / "fixtures" / "megatron_core" / "tp2.tar.xz"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_real_checkpoint_equals_what_torch_reads(real: Path) -> None:
    truth: dict[str, torch.Tensor] = {}
    for name, value in load_all(real / "iter_0000007").items():
        if isinstance(value, torch.Tensor):
            truth |= our_names(name, value)
    assert len(truth) == 80
    assert universal.recognise(real) == "megatron-core"
    source = megatron_core.describe(real / "iter_0000007")
    found = by_name(source)
    assert set(found) == set(truth)
    for name, tensor in truth.items():
        assert_same(found[name], tensor, name)
    assert source.step == 7
    assert source.facts["optimizer state"] == "exp_avg, exp_avg_sq, fp32"
    assert source.values["iteration"] == 7
    state = everystep.load(real)
    assert state["args"]["num_layers"] == 2
    weight = state["model"]["decoder.layers.1.mlp.linear_fc1.weight"]
    master = state["optimizer"]["state"]["decoder.layers.1.mlp.linear_fc1.weight"]["fp32"]
    assert torch.equal(weight, master.bfloat16())


def test_it_converts_and_verifies(real: Path, tmp_path: Path) -> None:
    done = universal.convert(real, tmp_path / "out", to="dcp", verify=True)
    assert (done.kind, done.leaves, done.step) == ("megatron-core", 80, 7)
    universal.convert(tmp_path / "out", tmp_path / "ours", verify=True)
    difference = everystep.inspect.compare(real, tmp_path / "ours")
    assert (difference.leaves, difference.values, difference.identical) == ((), (), 80)


class MCoreMetadata:
    """Stands for the class that older versions pickled."""


MCoreMetadata.__module__ = "megatron.core.dist_checkpointing.strategies.torch"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flattened_ranges_of_older_versions_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(2.0 * 6 * 4).reshape(2, 6, 4)  # two layers, cut into two parts of three rows
    parts = whole.reshape(2, 2, 1, 12)
    path = tmp_path / "iter_0000003"
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    dcp.save({name: parts, "decoder.final_layernorm.weight": whole[0, 0]}, checkpoint_id=path, no_dist=True)
    # Each part as one item, cut at an odd place: as two data-parallel ranks had it.
    state = {}
    for layer in range(2):
        for part in range(2):
            for begin, end in ((0, 5), (5, 12)):
                state[f"{layer}.{part}.{begin}"] = (
                    parts[layer, part, :, begin:end].reshape(1, 1, 1, -1).clone()
                )
    dcp.save(state, checkpoint_id=tmp_path / "pieces", no_dist=True)
    pieces = dcp.FileSystemReader(tmp_path / "pieces").read_metadata()
    metadata: Any = dcp.FileSystemReader(path).read_metadata()
    (tmp_path / "pieces" / "__0_0.distcp").rename(path / "__1_0.distcp")
    entry = metadata.state_dict_metadata[name]
    entry.chunks.clear()
    index_type = type(next(iter(metadata.storage_data)))
    for index, info in pieces.storage_data.items():
        layer, part, begin = map(int, index.fqn.split("."))
        end = 5 if begin == 0 else 12
        offset = torch.Size((layer, part, 0, begin))
        entry.chunks.append(dcp.metadata.ChunkStorageMetadata(offset, torch.Size((1, 1, 1, end - begin))))
        info.relative_path = "__1_0.distcp"
        metadata.storage_data[index_type(name, offset)] = info
    old = MCoreMetadata()
    vars(old).update(vars(metadata))
    vars(old)["mcore_data"] = {name: {"nd_reformulated_orig_global_shape": (2, 6, 4)}}
    module = types.ModuleType(MCoreMetadata.__module__)
    module.MCoreMetadata = MCoreMetadata  # type: ignore[attr-defined]
    for prefix in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, prefix, types.ModuleType(prefix))
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.strategies", types.ModuleType("s"))
    monkeypatch.setitem(sys.modules, MCoreMetadata.__module__, module)
    (path / ".metadata").write_bytes(pickle.dumps(old))
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 3}, path / "common.pt")
    found = by_name(megatron_core.describe(path))
    for layer in range(2):
        leaf = found[f"optimizer.decoder.layers.{layer}.mlp.linear_fc2.weight.exp_avg"]
        assert_same(leaf, whole[layer])
    vars(old)["mcore_data"] = {name: {"nd_reformulated_orig_global_shape": (2, 6, 5)}}
    (path / ".metadata").write_bytes(pickle.dumps(old))
    with pytest.raises(CorruptCheckpoint, match="linear_fc2"):
        megatron_core.describe(path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_newer_versions_have_their_values_as_an_object(tmp_path: Path) -> None:
    state = {
        "common_state/shard_0_1": [{"iteration": 9, "args": {"num_layers": 1}}],
        "rng_state/shard_0.0_1.1": [{"seed": 1}],
        "decoder.final_layernorm.weight": torch.arange(4.0),
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.zeros(4),
    }
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    source = megatron_core.describe(tmp_path)
    assert [leaf.name for leaf in source.leaves] == ["model.decoder.final_layernorm.weight"]
    assert (source.step, source.values["args.num_layers"]) == (9, 1)
    assert "not read" in source.facts["optimizer state"]
    assert source.facts["objects left out"] == "1, such as rng_state"


def test_other_backends_and_classes_are_refused_by_name(real: Path) -> None:
    path = real / "iter_0000007"
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(metadata.replace(b"torch.distributed.checkpoint.planner", b"t" * 36))
    with pytest.raises(UnsupportedSource, match=r"t{36}\.SavePlan"):
        megatron_core.describe(real)
    (path / ".metadata").write_bytes(metadata)
    torch.save({"iteration": 7, "evil": types.SimpleNamespace()}, path / "common.pt")
    with pytest.raises(UnsupportedSource, match=r"types\.SimpleNamespace"):
        megatron_core.describe(real)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(UnsupportedSource, match=r"'zarr'.*torch_dist"):
        everystep.load(real)
