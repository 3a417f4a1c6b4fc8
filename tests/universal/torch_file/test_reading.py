"""Files of torch.save are read without torch, and nothing in them is ever run."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.universal.state_tree import source_of
from everystep.universal.torch_file.leaves import leaf_of
from everystep.universal.torch_file.pickle_classes import PLAIN_MAKERS, PLAIN_SETTERS, PLAIN_VALUES
from everystep.universal.torch_file.pickle_machine import InertObject, PickleMachine
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file
from support.foreign.source_leaves import assembled, assert_same


def saved(tmp_path: Path, value: Any, **options: Any) -> Path:
    path = tmp_path / "file.pt"
    torch.save(value, path, **options)
    return path


def tensor_of(stored: object) -> torch.Tensor:
    assert isinstance(stored, StoredTensor)
    return assembled(leaf_of("x", stored))


KINDS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_element_type_comes_back_bit_for_bit(tmp_path: Path, kind: torch.dtype) -> None:
    tensor = (torch.arange(30) % 7).reshape(5, 6).to(kind)
    found = read_torch_file(saved(tmp_path, {"a": tensor, "b": tensor[3]}))
    assert_same(tensor_of(found["a"]), tensor)
    assert_same(tensor_of(found["b"]), tensor[3])


def test_shapes_without_elements_and_without_dimensions(tmp_path: Path) -> None:
    found = read_torch_file(saved(tmp_path, [torch.tensor(3.5), torch.empty(0), torch.empty(4, 0, 2)]))
    assert_same(tensor_of(found[0]), torch.tensor(3.5))
    assert [one.shape for one in found] == [(), (0,), (4, 0, 2)]


def test_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(4, 5, 6)
    views = [base[1:3], base[:, 2], base[:, :, 1:4], base.transpose(0, 1), base.expand(2, 4, 5, 6), base]
    for found, view in zip(read_torch_file(saved(tmp_path, views)), views, strict=True):
        assert found.contiguous == (view.is_contiguous() and 0 not in view.stride())
        assert_same(tensor_of(found), view)


def test_a_tensor_in_too_many_pieces_is_computed_or_named(tmp_path: Path) -> None:
    turned = torch.randn(70, 80).t()
    found = read_torch_file(saved(tmp_path, turned))
    assert_same(assembled(leaf_of("model.w", found)), turned)
    with pytest.raises(UnsupportedSource, match=r"'model.w'.*5600 pieces.*contiguous\(\)"):
        found.fragments(leaf="model.w")


def test_parameters_and_state_dicts(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    found = read_torch_file(saved(tmp_path, {"sd": model.state_dict(), "p": model[0].weight}))
    assert list(found["sd"]) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert_same(tensor_of(found["sd"][name]), tensor, name)
    assert_same(tensor_of(found["p"]), model[0].weight)


def test_plain_objects(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.timezone.utc)
    values = {
        "text": "é",
        "bytes": b"\x00\xff",
        "big": 2**100,
        "negative": -5,
        "float": 1.5,
        "none": None,
        "yes": True,
        "list": [1, [2]],
        "tuple": (1, (2, 3)),
        "set": {1, 2},
        "complex": 1 + 2j,
        "bytearray": bytearray(b"ab"),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("aab"),
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "dtype": torch.bfloat16,
        "scalar": np.float32(1.25),
        "int": np.int64(-3),
        "array": np.arange(6).reshape(2, 3),
        "big_endian": np.array([1, 2], dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "arguments": argparse.Namespace(lr=0.1, names=["a"]),
        "path": pathlib.Path("/a/b"),
        "moment": moment,
        "span": datetime.timedelta(days=1, seconds=2),
    }
    path = saved(tmp_path, values)
    found: Any = everystep.load(path)
    expected = torch.load(path, weights_only=False)
    for name in ("array", "big_endian", "fortran"):
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found.pop(name), expected.pop(name))
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol(tmp_path: Path, protocol: int) -> None:
    value = {
        "w": torch.arange(4.0),
        "a": [1, "x" * 300, (None, {3, 4}, frozenset({5})), 2**40],
        "n": np.arange(3),
    }
    found = read_torch_file(saved(tmp_path, value, pickle_protocol=protocol))
    assert_same(tensor_of(found["w"]), value["w"])
    assert found["a"] == value["a"]
    np.testing.assert_array_equal(found["n"], value["n"])


class Custom:
    def __init__(self) -> None:
        self.number = 3


def test_a_class_that_is_not_on_the_list_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(2), "c": Custom()})
    with pytest.raises(UnsupportedSource, match=r"Custom.*not on the list") as error:
        read_torch_file(path)
    assert str(path) in str(error.value)


def test_a_given_class_becomes_a_record(tmp_path: Path) -> None:
    name = f"{Custom.__module__}.Custom"
    found = read_torch_file(saved(tmp_path, Custom()), [name])
    assert isinstance(found, InertObject)
    assert found.name == name
    assert found.attributes == {"number": 3}


class Hostile:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "function", [os.system, eval, exec, getattr, __import__, open, print, subprocess.Popen, torch.load, map]
)
def test_hostile_pickles_run_nothing(tmp_path: Path, function: Any) -> None:
    mark = tmp_path / "mark"
    path = saved(tmp_path, Hostile(function, f"touch {mark}"))
    with pytest.raises(UnsupportedSource, match="not on the list"):
        read_torch_file(path)
    assert not mark.exists()


def rewritten(path: Path, change: Any) -> Path:
    """The same archive with another data.pkl."""
    out = path.with_suffix(".changed")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, change(data) if info.filename.endswith("data.pkl") else data)
    return out


def with_pickle(tmp_path: Path, data: bytes) -> Path:
    return rewritten(saved(tmp_path, {"w": torch.zeros(3)}), lambda _: data)


NESTED_KEY = b"\x80\x02}" + b")" + b"2\x86" * 200 + b"K\x01s."
DEEP = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
LAUGHS = b"\x80\x02]K\x01a" + b"2\x86" * 60 + b"."
ITSELF = b"\x80\x02]q\x00h\x00a."
HUGE_MEMO = b"\x80\x02]r\xff\xff\xff\xff."
HUGE_TEXT = b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"abc."
HUGE_INT = b"\x80\x02\x8b" + struct.pack("<L", 2**20) + b"\x01" * 2**20 + b"."


@pytest.mark.parametrize(
    "data",
    [NESTED_KEY, DEEP, LAUGHS, ITSELF, HUGE_TEXT, HUGE_INT],
    ids=["key", "deep", "laughs", "itself", "text", "int"],
)
def test_pickle_bombs_are_errors_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr("everystep.universal.state_tree.MAX_NODES", 20_000)
    path = with_pickle(tmp_path, data)
    with pytest.raises((UnsupportedSource, CorruptCheckpoint)):
        source_of(str(path), "torch", read_torch_file(path))


def test_a_large_memo_number_takes_no_memory(tmp_path: Path) -> None:
    assert read_torch_file(with_pickle(tmp_path, HUGE_MEMO)) == []


@pytest.mark.parametrize(
    "data", [b"\x80\x02I1\n.", b"\x80\x09N.", b"\x80\x02\xfe.", b"\x80\x02(.", b"\x80\x02NN.", b"."]
)
def test_pickles_that_are_none(tmp_path: Path, data: bytes) -> None:
    with pytest.raises((UnsupportedSource, CorruptCheckpoint)):
        read_torch_file(with_pickle(tmp_path, data))


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = saved(tmp_path, {"w": torch.arange(100.0), "v": [1, 2, "x"]}).read_bytes()
    path = tmp_path / "cut.pt"
    directory = whole.index(b"PK\x01\x02")
    pickled = whole.index(b"\x80\x02")
    lengths = [*range(0, pickled, 5), *range(pickled, pickled + 60), *range(pickled + 60, directory, 23)]
    for length in [*lengths, *range(directory, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises((CorruptCheckpoint, UnsupportedSource)):
            read_torch_file(path)


def test_any_changed_byte_is_an_error_or_stays_inside_of_the_file(tmp_path: Path) -> None:
    whole = bytearray(saved(tmp_path, {"w": torch.arange(40.0), "v": [1, 2, "x"]}).read_bytes())
    path = tmp_path / "changed.pt"
    pickled, directory = whole.index(b"\x80\x02"), whole.index(b"PK\x01\x02")
    for at in [*range(0, pickled, 3), *range(pickled, pickled + 150), *range(directory, len(whole))]:
        for value in (0xFF, whole[at] ^ 0x20):
            changed = whole.copy()
            changed[at] = value
            path.write_bytes(changed)
            try:
                leaves = source_of(str(path), "torch", read_torch_file(path)).leaves
            except (CorruptCheckpoint, UnsupportedSource):
                continue
            for leaf in leaves:
                for fragment in leaf.fragments:
                    assert 0 <= fragment.offset <= len(whole) - fragment.box.volume


@pytest.mark.parametrize("cut", range(1, 60))
def test_every_truncation_of_a_pickle(cut: int) -> None:
    data = pickle.dumps({"a": [1, 2.5, "x", (None, True)], "b": collections.OrderedDict(x=1)}, protocol=4)
    if cut < len(data):
        with pytest.raises(CorruptCheckpoint):
            PickleMachine(
                data[:-cut], path="f", makers=PLAIN_MAKERS, values=PLAIN_VALUES, setters=PLAIN_SETTERS
            ).run()


def test_a_tensor_that_reaches_past_its_storage(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.arange(5.0)})
    # The shape (5,) becomes (6,): the storage still has 5 elements.
    changed = rewritten(path, lambda data: data.replace(b"K\x00K\x05\x85", b"K\x00K\x06\x85"))
    with pytest.raises(CorruptCheckpoint, match="reaches past its storage"):
        read_torch_file(changed)


def test_the_old_format_says_how_to_save_again(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedSource, match=r"old format.*torch\.save\(torch\.load"):
        read_torch_file(path)


def test_a_compressed_archive_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(300)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(UnsupportedSource, match="compressed"):
        read_torch_file(tmp_path / "z")


def test_torchscript_is_an_error(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "s.pt"))
    with pytest.raises(UnsupportedSource, match="TorchScript"):
        read_torch_file(tmp_path / "s.pt")


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint):
        read_torch_file(tmp_path / "none")
    for content in (b"", b"PK", b"hello world", b"PK\x05\x06" + b"\0" * 18):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(CorruptCheckpoint):
            read_torch_file(tmp_path / "other")


def patched(data: bytes, at: int, field: int, form: str, value: int) -> bytes:
    """An archive with another number at byte `field` of the directory's entry number `at`."""
    place = -1
    for _ in range(at + 1):
        place = data.index(b"PK\x01\x02", place + 1)
    packed = struct.pack(form, value)
    return data[: place + field] + packed + data[place + field + len(packed) :]


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lambda data: patched(data, 0, 8, "<H", 1), UnsupportedSource, "encrypted"),
        (lambda data: patched(data, 1, 20, "<L", 3), CorruptCheckpoint, "two sizes"),
        (lambda data: patched(data, 1, 42, "<L", len(data)), CorruptCheckpoint, "reaches past"),
        (lambda data: patched(data, 1, 42, "<L", 2**32 - 1), CorruptCheckpoint, "missing or damaged|reaches"),
        (lambda data: b"PK\x03\x04" + data, CorruptCheckpoint, "before the first record"),
        (lambda data: data[:4] + data[8:], CorruptCheckpoint, "reaches past|missing or damaged"),
        (lambda data: data[:4], CorruptCheckpoint, "directory is missing"),
    ],
    ids=["encrypted", "sizes", "offset", "zip64", "prepended", "shortened", "tiny"],
)
def test_directories_that_lie_are_errors(
    tmp_path: Path, change: Any, error: type[Exception], reason: str
) -> None:
    path = saved(tmp_path, {"w": torch.zeros(3)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(error, match=reason):
        read_torch_file(path)


def test_two_records_of_one_name_are_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(3)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.infolist()[0].filename, b"other")
    with pytest.raises(CorruptCheckpoint, match="two records"):
        read_torch_file(path)


def test_zip64_and_parts_of_files(tmp_path: Path) -> None:
    """zipfile writes zip64 fields when told to; torch does for large files, which are too slow for a test."""
    plain = saved(tmp_path, {"w": torch.arange(7.0)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            with new.open(info.filename, "w", force_zip64=True) as record:
                record.write(old.read(info))
    data = buffer.getvalue()
    path = tmp_path / "part"
    path.write_bytes(b"x" * 1000 + data + b"y" * 1000)
    found = read_torch_file(path, start=1000, nbytes=len(data))
    assert_same(tensor_of(found["w"]), torch.arange(7.0))


def test_many_records_use_the_zip64_directory(tmp_path: Path) -> None:
    path = tmp_path / "many"
    inner = saved(tmp_path, {"w": torch.arange(7.0)})
    with zipfile.ZipFile(inner) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        for number in range(65_600):
            new.writestr(f"other/{number}", b"")
    assert_same(tensor_of(read_torch_file(path)["w"]), torch.arange(7.0))


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(3)})
    script = (
        "import sys; from everystep.universal.torch_file.reading import read_torch_file; "
        f"print(read_torch_file({str(path)!r})['w'].shape); assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(3,)"


def test_the_error_is_public() -> None:
    assert issubclass(everystep.errors.UnsupportedSource, ValueError)
