"""The commands on a checkpoint that several ranks wrote."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from everystep.plan.placement import LeafLayout, Mesh, MeshPlacement, Split
from everystep.plan.ranks import WritePlan
from everystep.plan.topology import Topology
from support.processes.command import command, step_path
from support.worlds.several_ranks import Own, write_several
from support.worlds.simulated_worlds import Array, random_state

LEAVES = [
    LeafLayout("model.w", "F32", (60, 40), (MeshPlacement(Mesh.grid(4), (Split(1, 0),)),), "numpy"),
    LeafLayout("model.b", "I64", (40,), (MeshPlacement(Mesh.grid(4)),), "numpy"),
]
TREE = {
    "model": {"w": {"$leaf": "model.w"}, "b": {"$leaf": "model.b"}},
    "epoch": 3,
    "rng": {"$per_rank": "rng"},
}
STATE = random_state(LEAVES, 4)


def save(
    path: Path,
    state: dict[str, Array] = STATE,
    world: int = 4,
    volumes: tuple[Path, ...] = (),
    step: int = 7,
) -> Path:
    spreads = (MeshPlacement(Mesh.grid(world), (Split(0, 0),)),)
    leaves = (
        LEAVES if world == 4 else [LeafLayout(x.name, x.dtype, x.shape, spreads, "numpy") for x in LEAVES]
    )
    own = {
        rank: Own(local={"rng": {"$leaf": f"@{rank}.rng"}}, arrays={f"@{rank}.rng": np.arange(5) + rank})
        for rank in range(world)
    }
    plan = WritePlan(leaves, Topology.regular(world), block_nbytes=64)
    write_several(path, plan, state, tree=TREE, own=own, volumes=volumes, step=step)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(step_path(tmp_path / "run", 7))
    return tmp_path / "run"


def test_ls(run: Path) -> None:
    (entry,) = command("ls", run, "--json").document["checkpoints"]
    assert (entry["step"], entry["leaves"], entry["damage"]) == (7, 6, None)
    (step_path(run, 7) / "r00002.json").unlink()
    outcome = command("ls", run, "--json")
    (entry,) = outcome.document["checkpoints"]
    assert "part of rank 2 is missing" in entry["damage"]
    assert entry["step"] == 7
    assert command("ls", run).out


def test_show(run: Path, tmp_path: Path) -> None:
    document = command("show", run, "--json").document
    assert document["world"] == 4
    assert [file["name"] for file in document["files"]] == [
        f"r0000{rank}.v0.safetensors" for rank in range(4)
    ]
    assert {leaf["name"]: leaf["shape"] for leaf in document["leaves"]}["model.w"] == [60, 40]
    assert "@3.rng" in {leaf["name"] for leaf in document["leaves"]}
    assert "written by 4 ranks, 4 shards" in command("show", run).lines
    far = tmp_path / "far"
    far.mkdir()
    save(tmp_path / "striped", volumes=(far,))
    lines = command("show", tmp_path / "striped").lines
    assert "written by 4 ranks, 8 shards on 2 volumes" in lines
    files = command("show", tmp_path / "striped", "--json").document["files"]
    assert {file.get("volume") for file in files} == {None, str(far)}


def test_verify_counts_the_files_of_all_ranks(run: Path) -> None:
    outcome = command("verify", run)
    assert outcome.code == 0
    assert "in 8 files" in outcome.out
    shard = step_path(run, 7) / "r00003.v0.safetensors"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    outcome = command("verify", run, "--json")
    assert outcome.code == 1
    (report,) = outcome.document["checkpoints"]
    assert {problem["file"] for problem in report["problems"]} == {str(shard)}
    assert report["files"] == 8


def test_diff_does_not_mind_how_many_ranks_wrote(run: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "two", world=2)
    document = command("diff", run, other, "--json").document
    assert {(leaf["name"], leaf["change"]) for leaf in document["leaves"]} == {
        ("@2.rng", "only in a"),
        ("@3.rng", "only in a"),
    }
    changed = {name: array.copy() for name, array in STATE.items()}
    changed["model.b"][17] += 1
    save(tmp_path / "changed", changed)
    outcome = command("diff", run, tmp_path / "changed", "--json")
    assert outcome.code == 1
    (leaf,) = outcome.document["leaves"]
    assert (leaf["name"], leaf["differing"], leaf["first"]) == ("model.b", 1, [17])


def test_export_joins_what_ranks_wrote(run: Path, tmp_path: Path) -> None:
    outcome = command("export", run, tmp_path / "out.safetensors", "--json")
    assert outcome.code == 0, outcome.out
    arrays = load_file(tmp_path / "out.safetensors")
    assert arrays["model.w"].tobytes() == STATE["model.w"].tobytes()
    assert arrays["model.b"].tobytes() == STATE["model.b"].tobytes()
    assert arrays["@2.rng"].tolist() == [2, 3, 4, 5, 6]


def test_export_streams_what_is_larger_than_a_window(tmp_path: Path) -> None:
    shape = (4096, 6000)  # 96 MiB
    leaf = LeafLayout("w", "F32", shape, (MeshPlacement(Mesh.grid(3), (Split(1, 0),)),), "numpy")
    array = np.arange(4096 * 6000, dtype=np.float32).reshape(shape)
    write_several(tmp_path / "c", WritePlan([leaf], Topology.regular(3)), {"w": array})
    # Once before: modules that are imported would be traced, too.
    assert command("export", tmp_path / "c", tmp_path / "first.safetensors").code == 0
    tracemalloc.start()
    assert command("export", tmp_path / "c", tmp_path / "out.safetensors").code == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 72 << 20  # numpy's memory is traced: four windows of the leaf, not the leaf
    assert np.array_equal(load_file(tmp_path / "out.safetensors")["w"], array)


def test_prune(run: Path) -> None:
    save(step_path(run, 9), step=9)
    document = command("prune", run, "--last", "1", "--json").document
    assert document["kept"] == [9]
    assert [item["step"] for item in document["removed"]] == [7]
    assert not step_path(run, 7).exists()
    assert command("verify", run).code == 0
