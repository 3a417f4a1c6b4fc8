"""What an export keeps: every array under one name, every value as it was, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep import Shelf
from everystep.shelf import contents


def _filled(path: Path, entries: dict[str, Any]) -> Path:
    with Shelf(path) as shelf, shelf.transaction():
        for name, value in entries.items():
            shelf[name] = value
    return path


@pytest.mark.parametrize("kind", contents.FORMATS)
def test_two_arrays_of_one_name_are_not_exported(tmp_path: Path, kind: str) -> None:
    path = _filled(tmp_path / "a.shelf", {"a.b": np.ones(2), "a": {"b": np.zeros(2)}})
    with pytest.raises(everystep.UnsupportedState, match=r"'a\.b'"):
        contents.export(path, tmp_path / f"out{kind}")
    assert [found.name for found in tmp_path.iterdir()] == ["a.shelf"]


def test_an_npz_file_has_every_name_that_a_shelf_can_have(tmp_path: Path) -> None:
    names = ("file", "allow_pickle", "args", "x/y", "a b")
    entries = {name: np.full(2, float(i)) for i, name in enumerate(names)}
    path = _filled(tmp_path / "a.shelf", {**entries, "file.0": 7, "n": 1.5})
    contents.export(path, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        assert {name: found[name].tolist() for name in found} == {
            **{name: array.tolist() for name, array in entries.items()},
            "file.0": 7,
            "n": 1.5,
        }


def test_an_npz_file_leaves_out_what_numpy_would_change(tmp_path: Path) -> None:
    path = _filled(tmp_path / "a.shelf", {"cut": "text\0", "kept": "text\n", "l": [np.ones(1)], "l.0": 3})
    done = contents.export(path, tmp_path / "out.npz")
    assert sorted(done.left_out) == ["cut", "l", "l.0"]
    with np.load(tmp_path / "out.npz") as found:
        assert {name: found[name].tolist() for name in found} == {"kept": "text\n", "l.0": [1.0]}
    path = _filled(tmp_path / "b.shelf", {"a": np.ones(1), "a.npy": np.zeros(1)})
    with pytest.raises(everystep.UnsupportedState, match=r"a\.npy"):
        contents.export(path, tmp_path / "b.npz")


def test_the_values_of_a_safetensors_file_refer_to_its_arrays(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    shared = np.ones(2)
    path = _filled(
        tmp_path / "a.shelf",
        {
            "dots": {"a.b": np.ones(1), "a": {"b": np.zeros(1)}},
            "empty": {"": np.ones(1)},
            "shared": [shared, shared, np.zeros(0), np.zeros(0)],
            "plain": np.ones(3),
            "keys": {1: np.ones(1), "1": np.zeros(1)},
        },
    )
    contents.export(path, tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "np") as found:
        names, values = set(found.keys()), json.loads(found.metadata()["values"])
    assert set(_references(values)) | {"plain"} == names
    with pytest.raises(everystep.UnsupportedState, match="__metadata__"):
        contents.export(_filled(tmp_path / "b.shelf", {"__metadata__": shared}), tmp_path / "b.safetensors")


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _references(item)]
    if not isinstance(node, dict):
        return []
    if "$leaf" in node:
        return [node["$leaf"]]
    return [name for item in node.values() for name in _references(item)]
