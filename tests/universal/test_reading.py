"""Foreign checkpoints are read as ours are: opened, sliced, loaded, restored, shown, compared."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import everystep
from everystep import universal
from everystep.errors import CheckpointNotFound, CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.format.geometry import Box, whole
from everystep.universal.foreign_checkpoint import ForeignCheckpoint
from everystep.universal.source import SourceFragment, SourceLeaf, flat_fragments
from support.foreign.foreign_checkpoints import make_model, same_weights, write_hf
from support.foreign.source_leaves import source_of_leaves
from support.processes.command import command
from support.worlds.launcher import launch, values


@pytest.mark.parametrize("shards", [1, 3])
def test_a_hugging_face_directory_is_opened_sliced_and_loaded(tmp_path: Path, shards: int) -> None:
    model = make_model()
    path = write_hf(tmp_path / "hf", model, shards=shards)
    assert universal.recognise(path) == "hf"
    with everystep.open(path) as checkpoint:
        assert set(checkpoint) == {f"model.{name}" for name in model.state_dict()}
        assert torch.equal(checkpoint["model.0.weight"][3:5, 7:9], model[0].weight[3:5, 7:9])
        assert checkpoint.leaves["model.0.weight"].dtype == "F32"
    loaded = everystep.load(path)["model"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    other = make_model(1)
    everystep.load(path, into={"model": other})
    assert same_weights(model, other)


def test_reading_writes_nothing_beside_the_files(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    before = os.stat(path).st_mtime_ns
    everystep.load(path)
    assert os.stat(path).st_mtime_ns == before


def _load_shards(path: str) -> bool:
    mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    model, truth = make_model(1), make_model()
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model.state_dict().items()}
    everystep.load(path, into={"model": state})
    whole = {name: tensor.full_tensor() for name, tensor in state.items()}
    return all(torch.equal(whole[name], tensor) for name, tensor in truth.state_dict().items())


def _start_from(path: str, run: str) -> tuple[int, int, bool]:
    model = make_model(1)
    state = {"model": model, "epoch": 5}
    with everystep.Checkpointer(run, state, mode="sync") as ckpt:
        first = ckpt.restore(init_from=path)
        ckpt.save(first + 1)
    other = make_model(2)
    with everystep.Checkpointer(run, {"model": other, "epoch": 0}, mode="sync") as ckpt:
        return first, ckpt.restore(init_from="/nowhere"), same_weights(other, make_model())


@pytest.mark.timeout(600)
def test_ranks_load_their_shards_of_a_foreign_checkpoint(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model(), shards=2)
    assert values(launch(3, _load_shards, str(path))) == [True] * 3
    found = values(launch(2, _start_from, str(path), str(tmp_path / "run")))
    assert found == [(0, 1, True)] * 2


def test_an_empty_run_starts_from_a_foreign_checkpoint_and_later_from_its_own(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    assert _start_from(str(path), str(tmp_path / "run")) == (0, 1, True)


def test_a_run_continues_the_steps_of_a_native_checkpoint_when_asked(tmp_path: Path) -> None:
    everystep.save(tmp_path / "first", {"model": make_model(), "epoch": 3}, step=41)
    state = {"model": make_model(1), "epoch": 0, "other": np.zeros(2)}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        assert ckpt.restore(init_from=tmp_path / "first", continue_steps=True) == 41
        assert ckpt.steps == []
        assert state["epoch"] == 3
        assert same_weights(state["model"], make_model())
        ckpt.save(42)
        assert ckpt.steps == [42]


def test_start_from_leaves_out_what_only_the_source_has(tmp_path: Path) -> None:
    first = {"model": make_model(), "epoch": 3, "other": {"a": np.zeros(2)}, "steps": 4}
    everystep.save(tmp_path / "first", first, step=41)
    state = {"model": make_model(1), "epoch": 0}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        ckpt.restore(init_from=tmp_path / "first")
    assert state["epoch"] == 3
    assert same_weights(state["model"], make_model())
    with (
        everystep.Checkpointer(tmp_path / "run2", {"weights": make_model(1)}, mode="sync") as ckpt,
        pytest.raises(everystep.StateMismatch, match=r"not in the target"),
    ):
        ckpt.restore(init_from=tmp_path / "first")


def test_start_from_fails_when_an_entry_does_not_fit(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    larger = torch.nn.Sequential(*make_model(), torch.nn.Linear(6, 2))
    with everystep.Checkpointer(tmp_path / "run", {"model": larger}, mode="sync") as ckpt:
        with pytest.raises(everystep.StateMismatch, match=r"2\.weight"):
            ckpt.restore(init_from=path)
        with pytest.raises(CheckpointNotFound):
            ckpt.restore(init_from=tmp_path / "nowhere")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_arrays_keep_names_types_and_order(tmp_path: Path, save: object) -> None:
    arrays = {
        "w": np.arange(12, dtype=np.int32).reshape(3, 4),
        "fortran": np.asfortranarray(np.random.default_rng(1).standard_normal((3, 5, 2))),
        "swapped": np.arange(4, dtype=">f4"),
        "empty": np.zeros((0, 3)),
        "scalar": np.float32(3),
        "big": np.random.default_rng(2).standard_normal(300_000),
    }
    save(tmp_path / "a.npz", **arrays)  # type: ignore[operator]
    loaded = everystep.load(tmp_path / "a.npz")
    assert list(loaded) == list(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == np.asarray(array).dtype
        assert np.array_equal(loaded[name], array)
    with everystep.open(tmp_path / "a.npz") as checkpoint:
        assert np.array_equal(checkpoint["fortran"][1:, 2], arrays["fortran"][1:, 2])


def test_computed_and_stored_arrays_are_read_at_once(tmp_path: Path) -> None:
    """A file on the disk that comes behind a computed one is read from the disk."""
    stored, computed = np.arange(6.0), np.asfortranarray(np.arange(6.0).reshape(2, 3) + 50)
    for names in (("a", "b"), ("b", "a")):
        arrays = dict(zip(names, (computed, stored), strict=True))
        np.savez(tmp_path / "x.npz", **arrays)
        found = everystep.load(tmp_path / "x.npz")
        assert all(np.array_equal(found[name], array) for name, array in arrays.items())


@pytest.mark.parametrize(
    ("member", "kind"),
    [("notes.txt", UnsupportedSource), ("x.npy", CorruptCheckpoint)],
)
def test_an_npz_member_that_is_no_array_is_named(tmp_path: Path, member: str, kind: type[Exception]) -> None:
    """`numpy.load` gives the bytes of such a member, whether it was an array once or not."""
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr(member, b"as trained")
    with pytest.raises(kind, match=f"{member!r}"):
        everystep.load(tmp_path / "a.npz")


def test_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", bad=np.array([{}], dtype=object))
    with pytest.raises(UnsupportedSource, match=r"'bad' has Python objects"):
        everystep.open(tmp_path / "a.npz")


def test_a_damaged_compressed_array_is_named(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.random.default_rng(1).standard_normal(50_000))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[200_000] ^= 0xFF
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="w"):
        everystep.load(tmp_path / "a.npz")


def test_a_member_that_inflates_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (10,), }".ljust(117) + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        archive.writestr("w.npy", data + bytes(50_000_000))
    with pytest.raises(CorruptCheckpoint, match="where its shape takes"):
        everystep.load(tmp_path / "a.npz")


@pytest.mark.parametrize("nbytes", [0, 7, 100, -1])
def test_truncated_files_are_corrupt_checkpoints(tmp_path: Path, nbytes: int) -> None:
    save_numpy({"w": np.arange(100.0)}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", w=np.arange(100.0))
    for name in ("a.safetensors", "a.npz"):
        path = tmp_path / name
        os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size - 1)
        with pytest.raises(CorruptCheckpoint, match=name):
            everystep.load(path)


def test_damage_of_a_sharded_directory_names_file_and_leaf(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model(), shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["1.bias"]
    (path / shard).rename(path / "away")
    with pytest.raises(IncompleteCheckpoint, match=shard):
        everystep.open(path)
    (path / "away").rename(path / shard)
    for wrong in ("../secret", "/etc/passwd", ""):
        index["weight_map"]["1.bias"] = wrong
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptCheckpoint, match="not a file beside the index"):
            everystep.open(path)
    index["weight_map"]["1.bias"] = index["weight_map"]["0.bias"]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if shard != index["weight_map"]["0.bias"]:
        with pytest.raises(CorruptCheckpoint, match=r"1\.bias"):
            everystep.open(path)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", make_model())
    with everystep.open(path) as checkpoint:
        os.truncate(path / "model.safetensors", 500)
        with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
            checkpoint.read()


def test_what_is_not_known_says_what_was_looked_for_and_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UnsupportedSource, match=r"(?s)Found .*(notes|hello).*Looked for .*safetensors"):
            universal.recognise(path)
        with pytest.raises(FileNotFoundError, match=r"(?s)Found .*(notes|hello).*Looked for .*npz"):
            everystep.open(path)
    with pytest.raises(CheckpointNotFound):
        universal.recognise(tmp_path / "nowhere")
    with pytest.raises(UnsupportedSource, match="unknown kind"):
        universal.describe(tmp_path, "word")


def test_closed_means_closed(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.arange(3))
    with everystep.open(tmp_path / "a.npz") as checkpoint:
        leaf = checkpoint["w"]
        assert leaf[1] == 1
    with pytest.raises(everystep.errors.CheckpointClosed):
        leaf[1]


def test_show_and_diff_read_foreign_checkpoints(tmp_path: Path) -> None:
    model = make_model()
    path = write_hf(tmp_path / "hf", model)
    shown = command("show", path)
    assert shown.code == 0
    assert "kind hf" in shown.lines
    assert "model type tiny" in shown.lines
    document = command("show", path, "--json").document
    assert document["facts"]["model type"] == "tiny"
    assert len(document["leaves"]) == 4
    everystep.save(tmp_path / "ours", {"model": everystep.load(path)["model"]})
    assert command("diff", tmp_path / "ours", path).code == 0
    with torch.no_grad():
        model[1].bias += 1
    everystep.save(tmp_path / "other", {"model": model})
    assert command("diff", tmp_path / "other", path).code == 1


def test_leaves_that_share_bytes_are_read_by_all_names(tmp_path: Path) -> None:
    data = np.arange(24, dtype=np.float32)
    file = str(tmp_path / "bytes")
    data.tofile(file)
    leaves = (
        SourceLeaf("model.a", "F32", (24,), (SourceFragment(file, 0, whole((24,))),)),
        SourceLeaf("model.b", "F32", (4, 6), (SourceFragment(file, 0, whole((4, 6))),)),
        SourceLeaf("model.c", "F32", (6,), (SourceFragment(file, 40, whole((6,))),)),
    )
    with ForeignCheckpoint(source_of_leaves(file, leaves, aliases={"model.d": "model.c"})) as checkpoint:
        found = checkpoint.load(framework="numpy")["model"]
        assert np.array_equal(found["a"], data)
        assert np.array_equal(found["b"], data.reshape(4, 6))
        assert np.array_equal(found["c"], data[10:16])
        assert found["d"] is found["c"]
        assert np.array_equal(checkpoint["model.b"][2, 1:3], data[13:15])


def test_pieces_of_a_flat_leaf_join_in_any_cut(tmp_path: Path) -> None:
    data = np.arange(105, dtype=np.int64).reshape(3, 5, 7)
    fragments: tuple[SourceFragment, ...] = ()
    for number, (start, stop) in enumerate([(0, 11), (11, 12), (12, 60), (60, 105)]):
        file = str(tmp_path / f"rank{number}")
        np.concatenate([[0], data.reshape(-1)[start:stop]]).tofile(file)
        fragments += flat_fragments(file, 8, start, stop, data.shape, 8)
    leaf = SourceLeaf("model.w", "I64", data.shape, fragments, framework="numpy")
    with ForeignCheckpoint(source_of_leaves(str(tmp_path), [leaf])) as checkpoint:
        assert np.array_equal(checkpoint["model.w"][:], data)
        assert np.array_equal(checkpoint["model.w"][1:, 2:4, 3], data[1:, 2:4, 3])
    short = SourceLeaf("model.w", "I64", data.shape, fragments[1:])
    with pytest.raises(IncompleteCheckpoint, match="nowhere"):
        ForeignCheckpoint(source_of_leaves(str(tmp_path), [short]))


@pytest.mark.parametrize(("reduce", "dtype"), [("mean", "F32"), ("sum", "F32"), ("mean", "BF16")])
def test_partial_leaves_are_the_mean_or_sum_of_their_copies(tmp_path: Path, reduce: str, dtype: str) -> None:
    torch_dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    copies = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(1)).to(torch_dtype)
    file = tmp_path / "copies"
    file.write_bytes(copies.view(torch.uint8).numpy().tobytes())
    nbytes = copies[0].nbytes
    places = [(SourceFragment(str(file), number * nbytes, whole((40, 2))),) for number in range(3)]
    leaf = SourceLeaf("model.w", dtype, (40, 2), places[0], terms=tuple(places[1:]), reduce=reduce)  # type: ignore[arg-type]
    with ForeignCheckpoint(source_of_leaves(str(tmp_path), [leaf])) as checkpoint:
        wide = copies.double()
        expected = (wide.mean(0) if reduce == "mean" else wide.sum(0)).to(torch_dtype)
        assert torch.equal(checkpoint["model.w"][:], expected)


def test_an_optimizer_is_restored_by_the_names_of_parameters(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 48)).sum().backward()
    optimizer.step()
    file = tmp_path / "bytes"
    leaves: list[SourceLeaf] = []
    with file.open("wb") as out:

        def add(name: str, tensor: torch.Tensor) -> None:
            fragment = SourceFragment(str(file), out.tell(), whole(tuple(tensor.shape)))
            leaves.append(SourceLeaf(name, "F32", tuple(tensor.shape), (fragment,)))
            out.write(tensor.detach().contiguous().numpy().tobytes())

        for name, parameter in model.named_parameters():
            add(f"model.{name}", parameter)
            for key, item in optimizer.state[parameter].items():
                add(f"optimizer.{name}.{key}", item)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    group["params"] = [name for name, _ in model.named_parameters()]
    source = source_of_leaves(str(tmp_path), leaves, step=9, groups=[group], epoch=2)
    other = make_model(1)
    target = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "epoch": 0}
    with ForeignCheckpoint(source) as checkpoint:
        restored = checkpoint.load(target)
    assert restored["epoch"] == 2
    assert same_weights(model, other)
    again = target["optimizer"].state_dict()  # type: ignore[union-attr]
    truth = optimizer.state_dict()
    assert again["param_groups"] == truth["param_groups"]
    for index, state in truth["state"].items():
        assert all(torch.equal(again["state"][index][key], item) for key, item in state.items())


def test_box_records_reject_nonsense(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(40))
    wrong = [
        SourceLeaf("model.w", "F32", (20,), (SourceFragment(str(file), 0, Box((0,), (20,))),)),
        SourceLeaf("@0.w", "F32", (2,), (SourceFragment(str(file), 0, Box((0,), (2,))),)),
        SourceLeaf("model.w", "F3", (2,), (SourceFragment(str(file), 0, Box((0,), (2,))),)),
    ]
    for leaf in wrong:
        with pytest.raises((CorruptCheckpoint, UnsupportedSource)):
            ForeignCheckpoint(source_of_leaves(str(tmp_path), [leaf]))
