"""HDF5 files as h5py writes them: read in place or inflated, named as Keras means them, and hostile ones."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import everystep
from everystep import CorruptCheckpoint, universal
from everystep.errors import UnsupportedSource

h5py = pytest.importorskip("h5py")

RANDOM = np.random.default_rng(1)
MATRIX = RANDOM.standard_normal((37, 5))


def arrays() -> dict[str, tuple[np.ndarray[Any, Any], dict[str, Any]]]:
    return {
        "plain/f64": (MATRIX, {}),
        "plain/f32": (MATRIX.astype("<f4"), {}),
        "plain/f16": (MATRIX.astype("<f2"), {}),
        "plain/i8": (np.arange(-5, 9, dtype="i1"), {}),
        "plain/u64": (np.arange(7, dtype="u8") + 2**63, {}),
        "plain/bool": (MATRIX > 0, {}),
        "plain/complex": (MATRIX[:3] + 1j, {}),
        "plain/big": (MATRIX.astype(">f4"), {}),
        "plain/big_int": (np.arange(9, dtype=">i2"), {}),
        "odd/chunked": (MATRIX, {"chunks": (4, 3)}),
        "odd/gzip": (MATRIX.astype("f4"), {"compression": "gzip", "shuffle": True, "fletcher32": True}),
        "odd/lzf": (np.arange(5000, dtype="i4").reshape(50, 100), {"compression": "lzf"}),
        "plain/scalar": (np.array(3.5), {}),
        "odd/empty": (np.zeros((0, 4), "f4"), {}),
    }


def write(path: Path, **how: Any) -> Path:
    with h5py.File(path, "w", **how) as file:
        for name, (array, options) in arrays().items():
            file.create_dataset(name, data=array, **options)
        file.create_dataset("odd/never_written", (5,), "f4", fillvalue=2.5)
        file["text"] = np.array([b"a", b"bc"])
    return path


@pytest.mark.parametrize("how", [{}, {"userblock_size": 1024}, {"libver": "latest"}])
def test_every_dataset_is_read_bit_for_bit(tmp_path: Path, how: dict[str, Any]) -> None:
    path = write(tmp_path / "a.h5", **how)
    assert universal.recognise(path) == "hdf5"
    source = universal.describe(path)
    leaves = {leaf.name: leaf for leaf in source.leaves}
    for name, leaf in leaves.items():
        assert (leaf.computed is not None) == name.startswith("odd."), name
    with everystep.open(path) as checkpoint:
        for name, (array, _) in arrays().items():
            found = np.asarray(checkpoint[name.replace("/", ".")][...])
            assert found.dtype == array.dtype, name
            assert found.tobytes() == array.tobytes(), name
            assert found.shape == array.shape
        assert checkpoint["text"][...].tolist() == [b"a", b"bc"]
        assert np.asarray(checkpoint["odd.never_written"][...]).tolist() == [2.5] * 5
        assert np.asarray(checkpoint["odd.gzip"][3:7]).tobytes() == MATRIX[3:7].astype("f4").tobytes()


def test_a_large_compressed_dataset_is_inflated_slab_by_slab(tmp_path: Path) -> None:
    array = RANDOM.integers(0, 3, (2_500_003, 2), dtype="i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(1000, 2), compression=1)
        file["y"] = np.arange(3)
    universal.convert(tmp_path / "a.h5", tmp_path / "out", verify=True)
    assert np.array_equal(everystep.load(tmp_path / "out")["x"], array)


def test_big_endian_numbers_stay_so_and_are_turned_for_targets_that_have_no_such_types(
    tmp_path: Path,
) -> None:
    truth = RANDOM.standard_normal((300, 7))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["f4"], file["i8"], file["c8"] = (
            truth.astype(">f4"),
            np.arange(5, dtype=">i8"),
            truth.astype(">c8"),
        )
    assert everystep.load(tmp_path / "a.h5")["f4"].dtype.str == ">f4"
    for name in ("a.safetensors", "a.pt"):
        universal.convert(tmp_path / "a.h5", tmp_path / name, verify=True)
        found = load_file(tmp_path / name) if name != "a.pt" else torch.load(tmp_path / name)
        assert torch.equal(found["f4"], torch.from_numpy(truth.astype("f4")))
        assert torch.equal(found["i8"], torch.arange(5))
        assert torch.equal(found["c8"], torch.from_numpy(truth.astype("c8")))
    universal.convert(tmp_path / "a.h5", tmp_path / "b.safetensors", dtype="float16", verify=True)
    assert torch.equal(
        load_file(tmp_path / "b.safetensors")["f4"], torch.from_numpy(truth.astype("f4")).half()
    )


def keras3(file: Any) -> dict[str, np.ndarray[Any, Any]]:
    found = {
        "layers/dense/vars/0": MATRIX.astype("f4"),
        "layers/dense/vars/1": MATRIX[0].astype("f4"),
        "layers/norm/vars/0": MATRIX[1].astype("f4"),
        "optimizer/vars/1": np.array(0.01, "f4"),
        "optimizer/vars/2": MATRIX.astype("f4") * 2,
    }
    for name, array in found.items():
        file[name] = array
    file["optimizer/vars/0"] = np.array(12, "i8")
    file.create_group("layers/dropout/vars")
    return found


@pytest.mark.parametrize("archive", [False, True])
def test_keras_3_is_a_model_and_an_optimizer_by_number(tmp_path: Path, archive: bool) -> None:
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        truth = keras3(file)
    if archive:
        with zipfile.ZipFile(tmp_path / "m.keras", "w") as out:
            out.writestr("config.json", "{}")
            out.write(path, "model.weights.h5")
        path = tmp_path / "m.keras"
    assert universal.recognise(path) == "hdf5"
    source = universal.describe(path)
    assert (source.step, source.facts["written by"]) == (12, "Keras 3")
    with everystep.open(path) as checkpoint:
        for name, array in truth.items():
            ours = (
                name.replace("/", ".") if name.startswith("optimizer") else "model." + name.replace("/", ".")
            )
            assert np.asarray(checkpoint[ours][...]).tobytes() == array.tobytes(), name
    done = universal.convert(path, tmp_path / "w.safetensors", verify=True)
    assert done.leaves == 3
    assert set(load_file(tmp_path / "w.safetensors")) == {
        "layers.dense.vars.0",
        "layers.dense.vars.1",
        "layers.norm.vars.0",
    }


@pytest.mark.parametrize("names", [["layers"], ["layers", "0"], ["vars"], ["model_weights"]])
def test_names_that_keras_uses_too_are_no_proof(tmp_path: Path, names: list[str]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in names:
            file.create_group(name)
        file["layers/first"] = MATRIX
    loaded = everystep.load(tmp_path / "a.h5")
    assert list(loaded) == sorted({*names, "layers"})
    assert loaded["layers"]["first"].tobytes() == MATRIX.tobytes()


def test_keras_2_whole_models_and_weights(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "model.h5", "w") as file:
        file.attrs["keras_version"] = b"2.15.0"
        file["model_weights/dense/dense/kernel:0"] = MATRIX
        file["optimizer_weights/Adam/m/dense/kernel:0"] = MATRIX * 2
    source = universal.describe(tmp_path / "model.h5")
    assert [leaf.name for leaf in source.leaves] == [
        "model.dense.dense.kernel:0",
        "optimizer.Adam.m.dense.kernel:0",
    ]
    left_out = "attributes of 1 of its groups and datasets"
    assert source.facts == {"written by": "Keras 2", "keras": "2.15.0", "not read": left_out}
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        file.attrs["layer_names"] = [b"dense"]
        file["dense/dense/kernel:0"] = MATRIX
        file["top_level_model_weights/x"] = MATRIX
    names = [leaf.name for leaf in universal.describe(tmp_path / "weights.h5").leaves]
    assert names == ["model.dense.dense.kernel:0", "model.top_level_model_weights.x"]


def test_bfloat16_of_keras(tmp_path: Path) -> None:
    truth = torch.randn(4, 3).bfloat16()
    with h5py.File(tmp_path / "b.weights.h5", "w") as file:
        data = truth.view(torch.int16).numpy().view("V2")
        file.create_dataset("layers/d/vars/0", data=data).attrs["dtype"] = "bfloat16"
    with everystep.open(tmp_path / "b.weights.h5") as checkpoint:
        assert checkpoint.leaves["model.layers.d.vars.0"].dtype == "BF16"
    universal.convert(tmp_path / "b.weights.h5", tmp_path / "b.safetensors", verify=True)
    assert torch.equal(load_file(tmp_path / "b.safetensors")["layers.d.vars.0"], truth)


def test_a_second_link_is_an_alias_and_a_group_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a/x"] = MATRIX
        file["b"] = file["a/x"]
    source = universal.describe(tmp_path / "a.h5")
    assert source.aliases == {"a.x": "b"} or source.aliases == {"b": "a.x"}
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["a/again"] = file["a"]
    with pytest.raises(UnsupportedSource, match=r"'a/again' is the group 'a' again"):
        universal.describe(tmp_path / "a.h5")


def hostile(file: Any, kind: str, folder: Path) -> None:
    if kind == "external link":
        file["x"] = h5py.ExternalLink("/etc/passwd", "/")
    elif kind == "soft link":
        file["x"] = h5py.SoftLink("/y")
    elif kind == "other files":
        file.create_dataset("x", (4,), "f4", external=[(str(folder / "raw"), 0, 16)])
    elif kind == "virtual":
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "y", (4,))
        file.create_virtual_dataset("x", layout)
    elif kind == "no fixed size":
        file.create_dataset("x", data=["text", "more"], dtype=h5py.string_dtype())
    elif kind == "references":
        file.create_dataset("x", (2,), h5py.ref_dtype)
    elif kind == "type":
        file["x"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
    elif kind == "no array":
        file["x"] = h5py.Empty("f4")
    elif kind == "chunks of":
        file.create_dataset("x", (1 << 15, 1 << 12), "f8", chunks=(1 << 15, 1 << 12))
    elif kind == "nested deeper":
        file.create_group("/".join(["x"] * 70))
    elif kind == "neither":
        file["x"] = np.dtype("f4")


@pytest.mark.parametrize(
    "kind",
    [
        "external link",
        "soft link",
        "other files",
        "virtual",
        "no fixed size",
        "references",
        "type",
        "no array",
        "chunks of",
        "nested deeper",
        "neither",
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        hostile(file, kind, tmp_path)
    with pytest.raises(UnsupportedSource, match=rf"'x.*{kind}"):
        universal.describe(tmp_path / "a.h5")
    with pytest.raises(UnsupportedSource):
        universal.convert(tmp_path / "a.h5", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_truncated_and_changed_files_end_in_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    data = path.read_bytes()
    for nbytes in (8, 100, 900, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:nbytes])
        with pytest.raises(CorruptCheckpoint):
            universal.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rng = np.random.default_rng(3)
    for _ in range(40):
        changed = bytearray(data)
        for at in rng.integers(0, min(len(data), 6000), 4):
            changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            with everystep.open(path) as checkpoint:
                for name in checkpoint:
                    checkpoint[name][...]
        except (everystep.EverystepError, MemoryError):
            pass


def test_an_archive_without_weights_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as out:
        out.writestr("config.json", "{}")
    with pytest.raises(CorruptCheckpoint, match=r"model\.weights\.h5"):
        universal.describe(tmp_path / "m.keras")
    (tmp_path / "n.keras").write_bytes(b"nothing")
    with pytest.raises(UnsupportedSource):
        universal.recognise(tmp_path / "n.keras")


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    script = (
        "import sys; sys.modules['h5py'] = None\n"
        "from everystep import universal\n"
        "from everystep.errors import UnsupportedSource\n"
        "assert universal.recognise(sys.argv[1]) == 'hdf5'\n"
        "try: universal.describe(sys.argv[1])\n"
        "except UnsupportedSource as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert "pip install everystep[hdf5]" in done.stdout
