"""Right digests around a tree that makes no sense: `verify` says of it what `load` would say."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import everystep
from everystep.format.manifest import decode_root, encode_root
from store.read.test_several_damage import LEAVES, PLAN
from support.worlds.several_ranks import Own, write_several
from support.worlds.simulated_worlds import random_state

MALFORMED = {
    "unknown tag": {"$nonsense": 1},
    "key twice": {"$dict": [[1, "a"], [1, "b"]]},
    "equal keys": {"$dict": [[1, "a"], [True, "b"]]},
    "member twice": {"$set": [1, 1]},
    "base64": {"$bytes": "!!"},
    "int": {"$int": "12x"},
    "float": {"$float": "00"},
    "date": {"$date": [2020, 13, 1]},
    "dtype": {"$torch.dtype": "float31"},
    "tag among others": {"$int": "1", "b": 2},
    "tuple": {"$tuple": 3},
}


def rewrite(path: Path, inner: Any) -> None:
    """Puts a node beside the state of a checkpoint in two files, with all digests right."""
    manifest = path / "manifest.json"
    root = decode_root(manifest.read_bytes(), str(manifest))
    manifest.write_bytes(encode_root(replace(root, tree={**root.tree, "deep": [0, {"er": inner}]})))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state = {"w": np.arange(3), "n": 1}
    everystep.save(tmp_path / "c", state, options=everystep.Options(small_nbytes=0))
    return tmp_path / "c"


@pytest.mark.parametrize("inner", MALFORMED.values(), ids=MALFORMED)
def test_what_load_calls_corrupt_is_damage_with_file_and_place(path: Path, inner: Any) -> None:
    rewrite(path, inner)
    with pytest.raises(everystep.CorruptCheckpoint):
        everystep.load(path)
    report = everystep.verify(path)
    (problem,) = report.problems
    assert problem.file == str(path / "manifest.json")
    assert "'deep.1.er'" in problem.reason


def test_every_malformed_value_is_named(path: Path) -> None:
    rewrite(path, {"a": {"$int": "x"}, "b": {"$tuple": [1, {"$set": [2, 2]}]}, "c": {"$float": "zz"}})
    reasons = [problem.reason for problem in everystep.verify(path).problems]
    assert [reason.split("'")[1] for reason in reasons] == ["deep.1.er.a", "deep.1.er.b.1", "deep.1.er.c"]


def test_values_of_every_kind_are_intact(path: Path) -> None:
    rewrite(path, {"a": {"$torch.dtype": "float32"}, "b": {"$dict": [[{"$tuple": [1]}, {"$set": [1, 2]}]]}})
    assert everystep.verify(path).intact


def test_a_value_of_torch_is_no_damage_where_torch_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: Any, **more: Any) -> Any:
        if name == "torch":
            raise ImportError("no torch here")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    rewrite(path, {"a": {"$torch.dtype": "float32"}})
    assert everystep.verify(path).intact
    rewrite(path, {"a": {"$torch.dtype": "float32"}, "b": {"$int": "x"}})
    (problem,) = everystep.verify(path).problems
    assert "'deep.1.er.b'" in problem.reason


@pytest.mark.parametrize("kind", ["tree", "local"])
def test_trees_of_other_ranks_are_looked_at_too(tmp_path: Path, kind: str) -> None:
    bad = {"$int": "x"}
    own = Own(tree={"x": {"y": bad}}) if kind == "tree" else Own(local={"x": {"y": bad}})
    write_several(tmp_path / "c", PLAN, random_state(LEAVES, 2), own={2: own})
    problem = everystep.verify(tmp_path / "c").problems[0]
    assert problem.file == str(tmp_path / "c" / "r00002.json")
    assert "'x.y'" in problem.reason


def test_keys_that_are_equal_only_together_are_found(tmp_path: Path) -> None:
    """Two ranks, two keys: each tree is fine by itself, what `load` makes of both is not."""
    tree = {leaf.name: {"$leaf": leaf.name} for leaf in LEAVES}
    tree["x"] = {"$dict": [[1, "a"]]}
    own = {1: Own(tree={"x": {"$dict": [[True, "b"]]}})}
    write_several(tmp_path / "c", PLAN, random_state(LEAVES, 2), tree=tree, own=own)
    with pytest.raises(everystep.CorruptCheckpoint, match="twice"):
        everystep.load(tmp_path / "c")
    assert "twice" in everystep.verify(tmp_path / "c").problems[0].reason
