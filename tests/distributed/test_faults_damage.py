"""One shard or part of a checkpoint of several ranks is missing or damaged: all ranks go back together."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import everystep
from everystep.store import step_name
from support.worlds.disturbed_trainings import Course, advance, bits, error_of, make_state, train
from support.worlds.launcher import launch, values

WORLD = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three ranks with the checkpoints of steps 2 and 3."""
    run = tmp_path_factory.mktemp("trained") / "run"
    values(launch(WORLD, train, Course(run, 3)))
    return run


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


DAMAGES: dict[str, Any] = {
    "no shard of 1": lambda path: (path / "r00001.v0.safetensors").unlink(),
    "no part of 2": lambda path: (path / "r00002.json").unlink(),
    "shard of 2": lambda path: _flip(path / "r00002.v0.safetensors"),
    "part of 1": lambda path: _flip(path / "r00001.json"),
    "shard of 0": lambda path: _flip(path / "r00000.v0.safetensors"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}
FILES = {
    "no shard of 1": "r00001.v0.safetensors",
    "no part of 2": "r00002.json",
    "shard of 2": "r00002.v0.safetensors",
    "part of 1": "r00001.json",
    "shard of 0": "r00000.v0.safetensors",
    "no manifest": "",
}


def _resume_all(folder: Path) -> dict[str, tuple[int, bool, list[str], tuple[str, str, tuple[int, ...]]]]:
    """From each damaged run: the step, whether it is exact, what was warned of, and what `load` says."""
    found = {}
    for name in DAMAGES:
        run = folder / name
        state = make_state()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with everystep.Checkpointer(run, state, mode="sync", timeout=60.0) as checkpointer:
                path = run / step_name(3)
                other = make_state()
                said = error_of(lambda path=path, other=other: everystep.load(path, other))  # type: ignore[misc]
                resumed = checkpointer.restore()
                exact = bits(state) == bits(make_state(resumed))
                advance(state)
                checkpointer.save(resumed + 1)
        texts = [str(item.message) for item in warned if "passing over" in str(item.message)]
        found[name] = (resumed, exact, texts, said)
    return found


def test_all_ranks_go_back_to_the_same_step(trained: Path, tmp_path: Path) -> None:
    for name, damage in DAMAGES.items():
        shutil.copytree(trained, tmp_path / name)
        damage(tmp_path / name / step_name(3))
    found = values(launch(2, _resume_all, tmp_path))
    for name in DAMAGES:
        for rank in found:
            resumed, exact, warned, (kind, message, _) = rank[name]
            assert (resumed, exact) == (2, True), name
            assert len(warned) == 1, name
            assert "passing over step 3" in warned[0]
            assert kind in ("CorruptCheckpoint", "IncompleteCheckpoint"), (name, kind, message)
            assert FILES[name] in message, (name, message)
            if name.startswith("shard of"):
                assert "leaf 'model" in message or "leaf 'optimizer" in message, message
        restored = make_state()
        everystep.load(tmp_path / name, restored)
        assert bits(restored) == bits(make_state(3))  # saved again
