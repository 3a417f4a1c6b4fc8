"""What tests of the command share: running it, making runs, damaging them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app
from everystep.store.read.checkpoint import open_newest

SHARD = "r00000.v0.safetensors"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document; fails when there is anything beside it."""
        return json.loads(self.out, parse_constant=_refuse)

    @property
    def lines(self) -> list[str]:
        """What was printed, with single spaces: tests are not about the width of columns."""
        return [" ".join(line.split()) for line in self.out.splitlines()]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def command(*arguments: str | Path) -> Outcome:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def make_state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": np.arange(600, dtype=np.float32).reshape(30, 20) * scale, "b": np.zeros(20)},
        "epoch": 3,
        "note": "hello",
    }


TWO_FILES = everystep.Options(small_nbytes=0)
"""Writes even a tiny state as a large one: shard and manifest."""


def make_run(
    path: Path, steps: Sequence[int] = (1, 2, 3, 4, 5), options: everystep.Options | None = None
) -> Path:
    state = make_state()
    with everystep.Checkpointer(
        path, state, keep=everystep.Keep(last=100), mode="sync", options=options
    ) as checkpointer:
        for step in steps:
            state["model"]["b"][:] = step
            checkpointer.save(step, metrics={"loss": 10.0 / step})
    return path


def step_path(run: Path, step: int) -> Path:
    return run / f"step-{step:012d}"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage_manifest(checkpoint: Path) -> None:
    """Of a small one, which has it in the header of its shard."""
    flip(checkpoint / SHARD, 200)


def damage_leaf(checkpoint: Path, name: str) -> None:
    with open_newest(checkpoint) as opened:
        leaf = next(leaf for leaf in opened._parts.root.part.leaves if leaf.name == name)
    flip(checkpoint / SHARD, leaf.fragments[0].offset)


def truncate(checkpoint: Path) -> None:
    data = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(data[:-1])


def run_names(run: Path) -> list[str]:
    beside = (".rules", ".lock", "events.jsonl")
    return sorted(path.name for path in run.iterdir() if path.name not in beside)
