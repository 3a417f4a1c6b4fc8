"""``everystep export``."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import everystep
from everystep.engine import faults
from everystep.store.stream import leaf_stream
from everystep.store.stream.leaf_windows import windows
from support.processes.command import SHARD, command, damage_leaf, make_run, make_state


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(path, "numpy") as opened:
        names = list(opened.keys())
        return {name: opened.get_tensor(name) for name in names}, opened.metadata()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    everystep.save(tmp_path / "one", make_state(), step=42)
    return tmp_path / "one"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model.safetensors"


def test_other_tools_read_every_leaf_bit_for_bit(checkpoint: Path, output: Path) -> None:
    outcome = command("export", checkpoint, output)
    assert outcome.code == 0
    assert "2 leaves" in outcome.out
    tensors, metadata = read(output)
    expected = make_state()["model"]
    assert set(tensors) == {"model.w", "model.b"}
    assert np.array_equal(tensors["model.w"], expected["w"])
    assert np.array_equal(tensors["model.b"], expected["b"])
    assert metadata["everystep.step"] == "42"
    assert metadata["format"] == "np"
    assert [path.name for path in output.parent.iterdir()] == ["model.safetensors"]


def test_json(checkpoint: Path, output: Path) -> None:
    document = command("export", checkpoint, output, "--json").document
    assert document == {
        "path": str(output),
        "step": 42,
        "leaves": 2,
        "nbytes": output.stat().st_size,
        "tied": {},
    }


def test_all_types_of_torch(tmp_path: Path, output: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.manual_seed(0)
    state = {
        "bf16": torch.randn(7).bfloat16(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    everystep.save(tmp_path / "one", state)
    assert command("export", tmp_path / "one", output).code == 0
    loaded = load_file(output)
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].contiguous().flatten().view(torch.uint8).tolist() == (
            tensor.contiguous().flatten().view(torch.uint8).tolist()
        )


def test_types_without_a_name_are_carried_and_noted(tmp_path: Path, output: Path) -> None:
    state = {"c": np.array([1 + 2j]), "when": np.array(["2020-01-01"], "M8[D]"), "__metadata__": np.ones(1)}
    everystep.save(tmp_path / "one", state)
    command("export", tmp_path / "one", output)
    tensors, metadata = read(output)
    assert tensors["c"].tolist() == [[1.0, 2.0]]
    assert tensors["when"].tobytes() == state["when"].tobytes()
    assert tensors["leaf:__metadata__"].tolist() == [1.0]
    assert json.loads(metadata["everystep.dtypes"]) == {"c": "C128", "when": "NP:<M8[D]"}


def test_tied_leaves_are_written_once_and_noted(tmp_path: Path, output: Path) -> None:
    tied = np.arange(1000.0)
    everystep.save(tmp_path / "one", {"emb": tied, "head": tied, "x": np.ones(1)})
    document = command("export", tmp_path / "one", output, "--json").document
    assert document["tied"] == {"head": "emb"}
    tensors, metadata = read(output)
    assert set(tensors) == {"emb", "x"}
    assert json.loads(metadata["everystep.tied"]) == {"head": "emb"}


def test_a_tied_leaf_alone_is_written_under_its_own_name(tmp_path: Path, output: Path) -> None:
    tied = np.arange(10.0)
    everystep.save(tmp_path / "one", {"emb": tied, "head": tied})
    command("export", tmp_path / "one", output, "--select", "head")
    tensors, metadata = read(output)
    assert tensors["head"].tolist() == tied.tolist()
    assert "emb" not in tensors
    assert "everystep.tied" not in metadata


def test_select_takes_globs(checkpoint: Path, output: Path) -> None:
    command("export", checkpoint, output, "--select", "*.b")
    assert set(read(output)[0]) == {"model.b"}


def test_select_that_matches_nothing_is_an_error_and_writes_nothing(checkpoint: Path, output: Path) -> None:
    outcome = command("export", checkpoint, output, "--select", "*.b", "--select", "nothing*")
    assert outcome.code == 1
    assert "nothing*" in outcome.err
    assert list(output.parent.iterdir()) == []


def test_elements_are_aligned_to_their_size(tmp_path: Path, output: Path) -> None:
    state = {
        "a": np.ones(3, np.int8),
        "b": np.ones(3, np.float16),
        "c": np.ones(3),
        "d": np.ones(5, np.float32),
    }
    everystep.save(tmp_path / "one", state)
    command("export", tmp_path / "one", output)
    data = output.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    for name, array in state.items():
        assert (8 + length + entries[name]["data_offsets"][0]) % array.itemsize == 0
    assert not any("pad" in name for name in entries)


def test_a_checkpoint_without_arrays_makes_a_valid_empty_file(tmp_path: Path, output: Path) -> None:
    everystep.save(tmp_path / "one", {"epoch": 3})
    assert command("export", tmp_path / "one", output).code == 0
    assert read(output)[0] == {}


def test_what_exists_is_not_replaced_unless_forced(checkpoint: Path, output: Path) -> None:
    output.write_text("precious")
    outcome = command("export", checkpoint, output)
    assert outcome.code == 1
    assert "--force" in outcome.err
    assert output.read_text() == "precious"
    assert command("export", checkpoint, output, "--force").code == 0
    assert set(read(output)[0]) == {"model.w", "model.b"}


def test_a_directory_in_the_way_is_an_error_even_when_forced(checkpoint: Path, output: Path) -> None:
    output.mkdir()
    outcome = command("export", checkpoint, output, "--force")
    assert outcome.code == 1
    assert "is a directory" in outcome.err


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "link to a fifo"])
def test_what_is_no_file_is_not_replaced_even_when_forced(kind: str, checkpoint: Path, output: Path) -> None:
    thing = output.with_name("thing") if kind.startswith("link") else output
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(thing))
    elif kind == "device":
        try:
            os.mknod(thing, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes device nodes")
    else:
        os.mkfifo(thing)
    if thing != output:
        output.symlink_to(thing)
    before = output.lstat()
    outcome = command("export", checkpoint, output, "--force", "--json")
    assert outcome.code == 1
    assert outcome.document["error"]["type"] == "CheckpointExists"
    assert "not a regular file" in outcome.document["error"]["message"]
    assert output.lstat().st_ino == before.st_ino


def test_a_link_is_replaced_and_not_what_it_leads_to(checkpoint: Path, output: Path) -> None:
    precious = output.with_name("precious")
    precious.write_text("precious")
    output.symlink_to(precious)
    assert command("export", checkpoint, output, "--force").code == 0
    assert precious.read_text() == "precious"
    assert set(read(output)[0]) == {"model.w", "model.b"}


@pytest.mark.parametrize("name", [SHARD, "other.safetensors"])
@pytest.mark.parametrize("through_link", [False, True], ids=["", "link"])
def test_nothing_is_written_into_a_checkpoint(
    name: str, through_link: bool, checkpoint: Path, tmp_path: Path
) -> None:
    place = checkpoint
    if through_link:
        place = tmp_path / "link"
        place.symlink_to(checkpoint)
    outcome = command("export", checkpoint, place / name, "--force")
    assert outcome.code == 1
    assert "inside a checkpoint" in outcome.err
    assert [path.name for path in checkpoint.iterdir()] == [SHARD]
    assert everystep.verify(checkpoint).intact


def test_nothing_is_written_into_a_save_under_way(checkpoint: Path, tmp_path: Path) -> None:
    partial = tmp_path / "step-000000000003.partial"
    partial.mkdir()
    assert command("export", checkpoint, partial / "x.safetensors").code == 1
    assert list(partial.iterdir()) == []


def test_a_shard_on_another_volume_is_not_replaced_either(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    options = everystep.Options(volumes=[volume])
    everystep.save(tmp_path / "one", make_state(), options=options)
    (shard,) = volume.rglob("*.safetensors")
    outcome = command("export", tmp_path / "one", shard, "--force")
    assert outcome.code == 1
    assert everystep.verify(tmp_path / "one").intact


def test_damage_leaves_neither_file_nor_rest(checkpoint: Path, output: Path) -> None:
    damage_leaf(checkpoint, "model.w")
    outcome = command("export", checkpoint, output, "--json")
    assert outcome.code == 1
    assert outcome.document["error"]["leaf"] == "model.w"
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("fault", ["open:1:EACCES", "write:1:ENOSPC", "sync:1:EIO", "rename:1:EIO"])
def test_whatever_fails_leaves_the_old_file_and_no_rest(fault: str, checkpoint: Path, output: Path) -> None:
    output.write_text("precious")
    command(
        "doctor", output.parent, "--no-speed"
    )  # the trial of direct I/O is made once; it must not meet the fault
    with faults.injected(fault):
        outcome = command("export", checkpoint, output, "--force", "--json")
    assert outcome.code == 1
    kind = {"EACCES": "StorageDenied", "ENOSPC": "StorageFull", "EIO": "SaveFailed"}[fault.rpartition(":")[2]]
    assert outcome.document["error"]["type"] == kind
    assert output.read_text() == "precious"
    assert [path.name for path in output.parent.iterdir()] == ["model.safetensors"]


def test_a_missing_directory_says_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    outcome = command("export", checkpoint, tmp_path / "nowhere" / "x.safetensors")
    assert outcome.code == 1
    assert "does not exist" in outcome.err


def test_of_a_run_the_newest_is_exported(tmp_path: Path, output: Path) -> None:
    run = make_run(tmp_path / "run", [1, 2])
    command("export", run, output)
    assert read(output)[1]["everystep.step"] == "2"


@pytest.mark.parametrize("backend", ["uring", "threads", "buffered"])
def test_leaves_larger_than_a_window_and_sizes_that_are_no_blocks(
    backend: str, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everystep.save(tmp_path / "probe", {})  # settles whether direct I/O works before a backend is forced
    if backend not in _possible(tmp_path):
        pytest.skip(f"{backend} is not available here")
    monkeypatch.setenv("EVERYSTEP_BACKEND", backend)
    monkeypatch.setattr(leaf_stream, "windows", lambda extents: windows(extents, 1 << 20))
    rng = np.random.default_rng(1)
    state = {"w": rng.integers(0, 256, 5_000_001, dtype=np.uint8), "v": rng.standard_normal(300_001)}
    state |= {f"s{i}": rng.standard_normal(i) for i in range(200)}
    everystep.save(tmp_path / "one", state)
    assert command("export", tmp_path / "one", output).code == 0
    tensors, _ = read(output)
    assert all(np.array_equal(tensors[name], array) for name, array in state.items())


def _possible(directory: Path) -> set[str]:
    from everystep.engine import capabilities

    able = capabilities(directory)
    return {
        "buffered",
        *(["threads"] if able.direct else []),
        *(["uring"] if able.direct and able.uring else []),
    }


def test_memory_stays_bounded_whatever_the_size(tmp_path: Path, output: Path) -> None:
    nbytes = 400 << 20
    everystep.save(tmp_path / "one", {"w": np.zeros((1, nbytes), np.uint8)})
    code = """
import sys
from everystep.cli.app import app
app(["export", *sys.argv[1:]], standalone_mode=False)
# Not getrusage: its peak is inherited from the process that started this one.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "one"), str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    peak = int(result.stdout.split()[-1]) * 1024
    assert output.stat().st_size > nbytes
    assert peak < nbytes // 2, f"{peak >> 20} MiB for a leaf of {nbytes >> 20} MiB"


@pytest.mark.parametrize("name", ["model.pt", "model", "model.safetensor", "model.gguf"])
def test_another_ending_is_refused_and_the_known_ones_are_named(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    outcome = command("export", checkpoint, tmp_path / name)
    assert outcome.code == 2
    said = " ".join(outcome.err.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert "export writes .safetensors files" in said
    assert "everystep convert" in said
    with pytest.raises(ValueError, match=r"\.safetensors"):
        everystep.inspect.export(checkpoint, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_convert_makes_no_directory_with_the_ending_of_a_file(checkpoint: Path, tmp_path: Path) -> None:
    outcome = command("convert", checkpoint, tmp_path / "model.gguf")
    assert outcome.code == 2
    assert ".gguf files cannot be written" in outcome.err
    assert ".ckpt" in outcome.err
    assert not (tmp_path / "model.gguf").exists()
    assert command("convert", checkpoint, tmp_path / "run-1.5").code == 0
