"""Safetensors files with types that no array has: they are listed and copied, and hide no other tensor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import everystep
from everystep import inspect, universal
from everystep.errors import CorruptCheckpoint, UnsupportedSource, UnsupportedState
from support.processes.command import command

Entry = tuple[str, list[int], bytes]

ODD: dict[str, Entry] = {
    "four": ("F4", [2, 3], bytes(range(3))),
    "two": ("F6_E2M3", [2, 8], bytes(range(12))),
    "three": ("F6_E3M2", [4], bytes(range(3))),
    "scale": ("F32", [2], np.arange(2, dtype="<f4").tobytes()),
    "none": ("F6_E2M3", [0, 7], b""),
}
TOMORROW: dict[str, Entry] = {
    **ODD,
    "new": ("F3_E1M1-X.2", [5], b"1234567"),
    "scalar": ("I128", [], bytes(16)),
}


def write(path: Path, entries: dict[str, Entry]) -> Path:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in entries.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entries_of(path: Path) -> dict[str, Entry]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_they_are_listed_with_their_types_and_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", TOMORROW)
    wanted = {name: (dtype, tuple(shape), len(data)) for name, (dtype, shape, data) in TOMORROW.items()}
    found = inspect.describe(path).leaves
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in found.items()} == wanted
    with everystep.open(path) as checkpoint:
        assert {name: info.dtype for name, info in checkpoint.leaves.items()} == {
            name: dtype for name, (dtype, _, _) in TOMORROW.items()
        }
    shown = command("show", path)
    assert shown.code == 0
    assert "two F6_E2M3 [2, 8] 12 B torch" in shown.lines
    assert everystep.verify(path).intact


def test_other_tensors_are_read_and_these_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", TOMORROW)
    assert torch.equal(everystep.load(path, select="scale")["scale"], torch.arange(2.0))
    target = {"scale": torch.zeros(2)}
    with pytest.warns(RuntimeWarning, match="not in the target"):
        everystep.load(path, into=target, strict=False)
    assert torch.equal(target["scale"], torch.arange(2.0))
    for framework in ("torch", "numpy", None):
        with pytest.raises(UnsupportedState, match=r"two: .*no arrays of the element type 'F6_E2M3'"):
            everystep.load(path, select="two", framework=framework)
    with pytest.raises(UnsupportedState, match="no arrays of the element type"):
        everystep.load(path)
    with everystep.open(path) as checkpoint, pytest.raises(UnsupportedState, match="I128"):
        _ = checkpoint["scalar"][...]


@pytest.mark.parametrize("entries", [ODD, TOMORROW], ids=["odd", "tomorrow"])
def test_their_bytes_are_copied_as_they_are(tmp_path: Path, entries: dict[str, Entry]) -> None:
    path = write(tmp_path / "a.safetensors", entries)
    inspect.export(path, tmp_path / "b.safetensors")
    assert entries_of(tmp_path / "b.safetensors") == entries
    assert universal.convert(path, tmp_path / "c.safetensors").verified
    assert entries_of(tmp_path / "c.safetensors") == entries
    assert universal.convert(path, tmp_path / "d", to="hf").verified
    assert entries_of(tmp_path / "d" / "model.safetensors") == entries
    assert inspect.compare(path, tmp_path / "b.safetensors").equal
    if entries is ODD:
        with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
            assert file.get_slice("two").get_dtype() == "F6_E2M3"


@pytest.mark.parametrize("to", ["everystep", "torch", "dcp", "ds-universal"])
def test_other_targets_refuse_them_by_name_and_take_the_others(tmp_path: Path, to: str) -> None:
    path = write(tmp_path / "a.safetensors", ODD)
    with pytest.raises(UnsupportedSource, match=r"'(model\.)?four' has the element type 'F4'"):
        universal.convert(path, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
    if to != "ds-universal":
        assert universal.convert(path, tmp_path / "out", to=to, select="scale").leaves == 1


def test_a_difference_in_them_is_found(tmp_path: Path) -> None:
    one = write(tmp_path / "a.safetensors", ODD)
    other = write(tmp_path / "b.safetensors", {**ODD, "two": ("F6_E2M3", [2, 8], bytes(12))})
    assert [change.name for change in inspect.compare(one, other).leaves] == ["two"]
    third = write(tmp_path / "c.safetensors", {**ODD, "two": ("F6_E2M3", [8, 2], ODD["two"][2])})
    (change,) = inspect.compare(one, third).leaves
    assert (change.change, change.a, change.b) == ("dtype", "F6_E2M3 [2, 8]", "F6_E2M3 [8, 2]")


def test_pairs_of_four_bits_are_what_torch_has(tmp_path: Path) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 4)
    safetensors.torch.save_file({"x": tensor}, tmp_path / "a.safetensors")
    found = everystep.load(tmp_path / "a.safetensors")["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    universal.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    everystep.save(tmp_path / "own", {"x": tensor})
    inspect.export(tmp_path / "own", tmp_path / "c.safetensors")
    for name in ("b", "c"):
        back = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")["x"]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "entry",
    [
        ("F4", [3, 3], bytes(5)),
        ("F4", [3, 3], bytes(4)),
        ("F4", [4], bytes(4)),
        ("F6_E2M3", [4], bytes(4)),
        ("F6_E3M2", [3], bytes(3)),
        ("F4", [], b"1"),
    ],
)
def test_sizes_in_bits_are_checked(tmp_path: Path, entry: Entry) -> None:
    path = write(tmp_path / "a.safetensors", {"x": entry})
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "pt")
    with pytest.raises(CorruptCheckpoint, match="not what its shape takes"):
        inspect.describe(path)


@pytest.mark.parametrize("dtype", ["", "F 4", "F4\n", "x" * 41, "[1]", "ST:U8[1]"])
def test_what_cannot_name_a_type_is_corrupt(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        inspect.describe(write(tmp_path / "a.safetensors", {"x": (dtype, [1], b"1")}))


def test_random_files_are_copied_entry_by_entry(tmp_path: Path) -> None:
    chosen = random.Random(7)
    for number in range(100):
        entries: dict[str, Entry] = {}
        for index in range(chosen.randrange(1, 6)):
            dtype, bits = chosen.choice(
                [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("U8", 8), ("F32", 32), ("X7", 7)]
            )
            shape = [chosen.randrange(4) for _ in range(chosen.randrange(3))] + [8]
            nbytes = int(np.prod(shape)) * bits // 8
            entries[f"t{index}"] = (dtype, shape, chosen.randbytes(nbytes))
        path = write(tmp_path / f"{number}.safetensors", entries)
        universal.convert(path, tmp_path / f"{number}-out.safetensors")
        assert entries_of(tmp_path / f"{number}-out.safetensors") == entries
