"""Objects of DeepSpeed's classes in a checkpoint, without DeepSpeed: stand-ins with their names."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.universal.deepspeed.everystep_files import read_everystep_file
from everystep.universal.deepspeed.names import CLASSES, FRAGMENT, NAMESPACE, STAGE
from everystep.universal.deepspeed.plain_objects import from_plain, to_plain
from everystep.universal.torch_file.pickle_machine import InertObject
from everystep.universal.torch_file.reading import StoredTensor


class Fragment:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class Stage(int, Enum):
    gradients = 2


class Strange:
    pass


for _name, _kind in ((FRAGMENT, Fragment), (STAGE, Stage)):
    _kind.__module__, _, _kind.__qualname__ = _name.rpartition(".")


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        "stage": Stage.gradients,
        "slices": [OrderedDict(w=Fragment(3, 5))],
        "args": argparse.Namespace(lr=0.1, sizes=(1, 2)),
        "flat": np.arange(6.0).reshape(2, 3),
        "scale": math.inf,
    }


def make(name: str, value: Any) -> Any:
    if name == NAMESPACE:
        return argparse.Namespace(**value)
    return Stage(value) if name == STAGE else (name, value)


def test_objects_come_back_from_a_checkpoint(tmp_path: Path, state: dict[str, Any]) -> None:
    everystep.save(tmp_path / "file.pt", to_plain(state))
    found = from_plain(everystep.load(tmp_path / "file.pt"), make)
    assert found["stage"] is Stage.gradients
    assert found["slices"] == [OrderedDict(w=(FRAGMENT, {"numel": 3, "start": 5}))]
    assert found["args"] == state["args"]
    assert np.array_equal(found["flat"], state["flat"])
    assert found["scale"] == math.inf


def test_other_objects_are_refused_by_their_place(tmp_path: Path) -> None:
    with pytest.raises(everystep.UnsupportedState, match=r"client\.0"):
        everystep.save(tmp_path / "file.pt", to_plain({"client": [Strange()]}))


def test_a_class_that_is_not_known_is_not_made() -> None:
    said = {"everystep.class": "os.system", "everystep.state": "true"}
    assert "os.system" not in CLASSES
    assert from_plain(said, make) == said


def test_the_converter_reads_it_as_it_reads_a_torch_file(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "file.pt"
    everystep.save(path, to_plain(state))
    found = read_everystep_file(str(path))
    stage = found["stage"]
    assert isinstance(stage, InertObject)
    assert (stage.name, stage.args) == (STAGE, (2,))
    assert found["slices"][0]["w"].attributes == {"numel": 3, "start": 5}
    assert found["args"] == state["args"]
    flat = found["flat"]
    assert isinstance(flat, StoredTensor)
    with open(flat.file, "rb") as file:
        file.seek(flat.offset)
        read = np.frombuffer(file.read(flat.itemsize * flat.count)).reshape(flat.shape)
    assert np.array_equal(read, state["flat"])
    assert flat.contiguous


def test_the_converter_refuses_damage(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "file.pt"
    everystep.save(path, to_plain({**state, "flat": np.zeros(1 << 17)}))
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(everystep.CorruptCheckpoint, match="flat"):
        read_everystep_file(str(path))
